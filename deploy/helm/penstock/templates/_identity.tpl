{{/* The Secret with the admin listener's certificate: its own, or the door's; empty: there is no listener. */}}
{{- define "penstock.admin.secretName" -}}
{{- if .Values.gateway.admin.enabled -}}
{{- $secret := default (include "penstock.door.secretName" .) .Values.gateway.admin.existingSecret -}}
{{- if not $secret -}}
{{- fail "gateway.admin.existingSecret: name a Secret (tls.crt, tls.key), or enable certificates.door: the admin listener speaks TLS alone" -}}
{{- end -}}
{{- $secret -}}
{{- end -}}
{{- end -}}

{{/* Variables of the gateways alone: the admin listener, and the authority of the OIDC issuer. */}}
{{- define "penstock.identity.environment" -}}
{{- if .Values.gateway.admin.enabled }}
- name: PENSTOCK_IDENTITY__ADMIN_HOST
  value: "0.0.0.0"
- name: PENSTOCK_IDENTITY__ADMIN_PORT
  value: "8002"
- name: PENSTOCK_IDENTITY__ADMIN_TLS_CERT
  value: /etc/penstock/admin/tls.crt
- name: PENSTOCK_IDENTITY__ADMIN_TLS_KEY
  value: /etc/penstock/admin/tls.key
{{- end }}
{{- if include "penstock.oidc.caRef" . }}
- name: PENSTOCK_IDENTITY__OIDC_CA
  value: /etc/penstock/stores/oidc-ca.crt
{{- end }}
{{- end -}}

{{/* The Secret and key with the authority of the OIDC issuer; empty: the system's authorities. */}}
{{- define "penstock.oidc.caRef" -}}
{{- with .Values.gateway.oidcCaSecret.name -}}
name: {{ . }}
key: {{ $.Values.gateway.oidcCaSecret.key }}
{{- end -}}
{{- end -}}

{{/* The way of the gateways to the OIDC issuer: its port anywhere, as no selector knows where it is. */}}
{{- define "penstock.oidc.egress" -}}
{{- $ports := list -}}
{{- range $name := list "IDENTITY__OIDC_ISSUER" "IDENTITY__OIDC_JWKS_URL" -}}
{{- with get $.Values.settings $name -}}
{{- $ports = append $ports (include "penstock.port" .) -}}
{{- end -}}
{{- end -}}
{{- with uniq $ports -}}
- ports: {{- include "penstock.tcp" . | nindent 4 }}
{{- end -}}
{{- end -}}
