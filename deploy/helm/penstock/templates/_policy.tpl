{{/* The rules as a file in the pods that ask them. No subPath: a file that is mounted so never changes. */}}
{{- define "penstock.policy.mount" -}}
{{- if .Values.policy }}
- {name: policy, mountPath: /etc/penstock/policy, readOnly: true}
{{- end }}
{{- end -}}

{{- define "penstock.policy.volume" -}}
{{- if .Values.policy }}
- name: policy
  configMap: {name: {{ include "penstock.fullname" . }}-policy}
{{- end }}
{{- end -}}

{{- define "penstock.policy.environment" -}}
{{- if .Values.policy }}
- name: PENSTOCK_POLICY__FILE
  value: /etc/penstock/policy/policy.yaml
{{- end }}
{{- end -}}
