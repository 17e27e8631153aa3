{{/* Redis and Qdrant: where they are and how pods of the graph reach them. */}}

{{/* redis:// or rediss://HOST:PORT, as Ray takes it. */}}
{{- define "penstock.redis.address" -}}
{{- if .Values.redis.enabled -}}
{{ ternary "rediss" "redis" .Values.certificates.enabled }}://{{ include "penstock.fullname" . }}-redis.{{ .Release.Namespace }}.svc:6379
{{- else -}}
{{- $url := urlParse (required "redis.external.url: needed when redis.enabled is false" .Values.redis.external.url) -}}
{{- if not (has $url.scheme (list "redis" "rediss")) -}}
{{- fail "redis.external.url: must be redis://HOST:PORT/DB or rediss://HOST:PORT/DB" -}}
{{- end -}}
{{- if $url.userinfo -}}
{{- fail "redis.external.url: no user and password here; use redis.external.username and redis.external.existingSecret" -}}
{{- end -}}
{{ $url.scheme }}://{{ $url.host }}{{ if not (regexMatch ":[0-9]+$" $url.host) }}:6379{{ end }}
{{- end -}}
{{- end -}}

{{/* The same with user, password ($(REDIS_AUTH), which the kubelet fills in) and database. */}}
{{- define "penstock.redis.url" -}}
{{- $address := urlParse (include "penstock.redis.address" .) -}}
{{- $user := ternary "" .Values.redis.external.username .Values.redis.enabled -}}
{{- $database := "/0" -}}
{{- if not .Values.redis.enabled -}}
{{- $database = default "/0" (urlParse .Values.redis.external.url).path -}}
{{- end -}}
{{- if include "penstock.redis.passwordRef" . -}}
{{ $address.scheme }}://{{ $user }}:$(REDIS_AUTH)@{{ $address.host }}{{ $database }}
{{- else -}}
{{ $address.scheme }}://{{ $address.host }}{{ $database }}
{{- end -}}
{{- end -}}

{{/* Name and key of the password; empty: an external Redis without one. */}}
{{- define "penstock.redis.passwordRef" -}}
{{- if .Values.redis.enabled -}}
{{ include "penstock.secretKey" (list . .Values.redis.auth "redis" "password") }}
{{- else if .Values.redis.external.existingSecret -}}
{{ include "penstock.secretKey" (list . .Values.redis.external "redis" "password") }}
{{- end -}}
{{- end -}}

{{- define "penstock.redis.environment" -}}
{{- with include "penstock.redis.passwordRef" . }}
- name: REDIS_AUTH  # put into the URL below: letters and digits, or percent-encoded
  valueFrom:
    secretKeyRef:
      {{- . | nindent 6 }}
{{- end }}
- name: PENSTOCK_REDIS_URL
  value: {{ include "penstock.redis.url" . | quote }}
{{- if include "penstock.redis.caRef" . }}
- name: PENSTOCK_REDIS_CA
  value: /etc/penstock/stores/redis-ca.crt
{{- end }}
{{- end -}}

{{/* The Secret and key with Redis' authority; empty: the system's authorities, or no TLS. */}}
{{- define "penstock.redis.caRef" -}}
{{- if and .Values.redis.enabled .Values.certificates.enabled -}}
name: {{ include "penstock.tls.secretName" (list . "redis") }}
key: ca.crt
{{- else if and (not .Values.redis.enabled) .Values.redis.external.caSecret.name -}}
name: {{ .Values.redis.external.caSecret.name }}
key: {{ .Values.redis.external.caSecret.key }}
{{- end -}}
{{- end -}}

{{- define "penstock.qdrant.url" -}}
{{- if .Values.qdrant.enabled -}}
{{ ternary "https" "http" .Values.certificates.enabled }}://{{ include "penstock.fullname" . }}-qdrant.{{ .Release.Namespace }}.svc:6333
{{- else -}}
{{- $url := required "qdrant.external.url: needed when qdrant.enabled is false" .Values.qdrant.external.url -}}
{{- if not (has (urlParse $url).scheme (list "http" "https")) -}}
{{- fail "qdrant.external.url: must be http://HOST:PORT or https://HOST:PORT" -}}
{{- end -}}
{{ $url }}
{{- end -}}
{{- end -}}

{{/* Name and key of the API key; empty: an external Qdrant without one. */}}
{{- define "penstock.qdrant.keyRef" -}}
{{- if .Values.qdrant.enabled -}}
{{ include "penstock.secretKey" (list . .Values.qdrant.auth "qdrant" "api-key") }}
{{- else if .Values.qdrant.external.existingSecret -}}
{{ include "penstock.secretKey" (list . .Values.qdrant.external "qdrant" "api-key") }}
{{- end -}}
{{- end -}}

{{- define "penstock.qdrant.caRef" -}}
{{- if and .Values.qdrant.enabled .Values.certificates.enabled -}}
name: {{ include "penstock.tls.secretName" (list . "qdrant") }}
key: ca.crt
{{- else if and (not .Values.qdrant.enabled) .Values.qdrant.external.caSecret.name -}}
name: {{ .Values.qdrant.external.caSecret.name }}
key: {{ .Values.qdrant.external.caSecret.key }}
{{- end -}}
{{- end -}}

{{- define "penstock.qdrant.environment" -}}
- name: PENSTOCK_QDRANT_URL
  value: {{ include "penstock.qdrant.url" . | quote }}
{{- if include "penstock.qdrant.caRef" . }}
- name: PENSTOCK_QDRANT_CA
  value: /etc/penstock/stores/qdrant-ca.crt
{{- end }}
{{- end -}}

{{/* Its API key: for retrieval, and the command line that asks how Qdrant is. */}}
{{- define "penstock.qdrant.key" -}}
{{- with include "penstock.qdrant.keyRef" . }}
- name: PENSTOCK_QDRANT_API_KEY
  valueFrom:
    secretKeyRef:
      {{- . | nindent 6 }}
{{- end }}
{{- end -}}

{{/* One volume with the authorities of what is dialled besides services; empty: none is our own. */}}
{{- define "penstock.stores.volume" -}}
{{- $authorities := dict -}}
{{- range $store := list "redis" "qdrant" "otlp" -}}
{{- with include (printf "penstock.%s.caRef" $store) $ -}}
{{- $_ := set $authorities $store (fromYaml .) -}}
{{- end -}}
{{- end -}}
{{- with $authorities }}
- name: stores
  projected:
    sources:
      {{- range $store, $ref := . }}
      - secret:
          name: {{ $ref.name }}
          items:
            - key: {{ $ref.key }}
              path: {{ $store }}-ca.crt
      {{- end }}
{{- end }}
{{- end -}}
