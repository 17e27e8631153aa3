{{/*
Names of Secrets. Each comes from the values' existingSecret, or the chart makes it.
*/}}

{{/* Name and key of a secret value; call with (list . .Values.redis.auth "redis" "password"). */}}
{{- define "penstock.secretKey" -}}
{{- $root := index . 0 -}}
{{- $values := index . 1 -}}
name: {{ default (printf "%s-%s" (include "penstock.fullname" $root) (index . 2)) $values.existingSecret }}
key: {{ default (index . 3) $values.key }}
{{- end -}}

{{/*
A secret value that is made once: what the cluster has, else new.
Call with (list . "redis" "password" 32).
*/}}
{{- define "penstock.keptSecret" -}}
{{- $root := index . 0 -}}
{{- $name := printf "%s-%s" (include "penstock.fullname" $root) (index . 1) -}}
{{- $found := lookup "v1" "Secret" $root.Release.Namespace $name -}}
{{- $kept := index (default dict $found.data) (index . 2) -}}
{{- default (randAlphaNum (index . 3) | b64enc) $kept -}}
{{- end -}}

{{/* The Secret of one identity's certificate; call with (list . "gateway"). */}}
{{- define "penstock.tls.secretName" -}}
{{- printf "%s-tls-%s" (include "penstock.fullname" (index . 0)) (index . 1) -}}
{{- end -}}

{{/* The Secret of the door's certificate; empty: no TLS at the door. */}}
{{- define "penstock.door.secretName" -}}
{{- $door := .Values.certificates.door -}}
{{- if $door.existingSecret -}}
{{- $door.existingSecret -}}
{{- else if $door.enabled -}}
{{- include "penstock.tls.secretName" (list . "door") -}}
{{- end -}}
{{- end -}}

{{/*
Who has a certificate, and for which DNS names: the identities, by which services know each other
(docs/decisions/0013), and what is reached by the name of a Service.
*/}}
{{- define "penstock.certificates.names" -}}
{{- range list "gateway" "retrieval" "tokenizer" "router" "worker" "cli" }}
{{ . }}: [{{ . }}.penstock.internal]
{{- end }}
{{- $full := include "penstock.fullname" . -}}
{{- $door := and .Values.certificates.door.enabled (not .Values.certificates.door.existingSecret) -}}
{{- $served := dict "redis" .Values.redis.enabled "qdrant" .Values.qdrant.enabled "collector" (.Values.collector).enabled "door" $door -}}
{{- range $name, $ours := $served }}
{{- if $ours }}
{{- $host := ternary $full (printf "%s-%s" $full $name) (eq $name "door") }}
{{ $name }}:
  {{- if eq $name "door" }}
  {{- range $.Values.certificates.door.dnsNames }}
  - {{ . | quote }}
  {{- end }}
  {{- end }}
  - {{ $host }}
  - {{ $host }}.{{ $.Release.Namespace }}
  - {{ $host }}.{{ $.Release.Namespace }}.svc
  - {{ $host }}.{{ $.Release.Namespace }}.svc.{{ $.Values.clusterDomain }}
{{- end }}
{{- end }}
{{- end -}}
