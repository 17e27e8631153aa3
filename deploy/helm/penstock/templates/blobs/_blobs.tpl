{{/* Where uploaded files are: a bucket, or a volume that gateways and retrieval mount. */}}
{{- define "penstock.blobs.url" -}}
{{- default "file:///var/lib/penstock-blobs" .Values.blobs.url -}}
{{- end -}}

{{- define "penstock.blobs.mount" -}}
{{- if not .Values.blobs.url }}
- name: blobs
  mountPath: /var/lib/penstock-blobs
{{- end }}
{{- end -}}

{{- define "penstock.blobs.volume" -}}
{{- if not .Values.blobs.url }}
- name: blobs
  persistentVolumeClaim:
    claimName: {{ default (printf "%s-blobs" (include "penstock.fullname" .)) .Values.blobs.existingClaim }}
{{- end }}
{{- end -}}
