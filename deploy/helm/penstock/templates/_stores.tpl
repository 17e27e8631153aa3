{{/* Redis and Qdrant: where they are and how pods of the graph reach them. */}}

{{/* Beside a store of the chart's own nothing is read of an external one; call with (list "redis" .Values.redis.external). */}}
{{- define "penstock.external.unused" -}}
{{- $its := index . 1 -}}
{{- $ray := default dict $its.ray -}}
{{- if or $its.url $its.username $its.existingSecret $its.caSecret.name $ray.url $ray.username $ray.existingSecret -}}
{{- fail (printf "%s.external: set, but %s.enabled is true, so that the chart's own is used" (index . 0) (index . 0)) -}}
{{- end -}}
{{- end -}}

{{/* redis:// or rediss://HOST:PORT. */}}
{{- define "penstock.redis.address" -}}
{{- if .Values.redis.enabled -}}
{{- include "penstock.external.unused" (list "redis" .Values.redis.external) -}}
{{ ternary "rediss" "redis" .Values.certificates.enabled }}://{{ include "penstock.fullname" . }}-redis.{{ .Release.Namespace }}.svc:6379
{{- else -}}
{{ include "penstock.redis.checkedAddress" (list "redis.external.url" (required "redis.external.url: needed when redis.enabled is false" .Values.redis.external.url)) }}
{{- end -}}
{{- end -}}

{{/* An external one's, of its URL; call with (list "the value's name" URL). */}}
{{- define "penstock.redis.checkedAddress" -}}
{{- $url := urlParse (index . 1) -}}
{{- if not (has $url.scheme (list "redis" "rediss")) -}}
{{- fail (printf "%s: must be redis://HOST:PORT/DB or rediss://HOST:PORT/DB" (index . 0)) -}}
{{- end -}}
{{- if $url.userinfo -}}
{{- fail (printf "%s: no user and password here; they have values of their own" (index . 0)) -}}
{{- end -}}
{{ $url.scheme }}://{{ $url.host }}{{ if not (regexMatch ":[0-9]+$" $url.host) }}:6379{{ end }}
{{- end -}}

{{/* The same with user, password ($(REDIS_AUTH), which the kubelet fills in) and database. */}}
{{- define "penstock.redis.url" -}}
{{- $address := urlParse (include "penstock.redis.address" .) -}}
{{- $user := ternary "penstock" .Values.redis.external.username .Values.redis.enabled -}}
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

{{/*
Where Ray keeps its state, as KubeRay takes it, and by which user: one of its own, because who may
write that state runs code in every pod of Ray. Only Ray's head has its password.
*/}}
{{- define "penstock.redis.rayAddress" -}}
{{- if or .Values.redis.enabled (not .Values.redis.external.ray.url) -}}
{{ include "penstock.redis.address" . }}
{{- else -}}
{{ include "penstock.redis.checkedAddress" (list "redis.external.ray.url" .Values.redis.external.ray.url) }}
{{- end -}}
{{- end -}}

{{- define "penstock.redis.rayUser" -}}
{{ ternary "ray" .Values.redis.external.ray.username .Values.redis.enabled }}
{{- end -}}

{{/* Name and key of its password; empty: an external Redis without one. */}}
{{- define "penstock.redis.rayPasswordRef" -}}
{{- $own := .Values.redis.external -}}
{{- if .Values.redis.enabled -}}
{{ include "penstock.secretKey" (list . .Values.redis.rayAuth "redis-ray" "password") }}
{{- else if $own.ray.existingSecret -}}
{{- $same := eq (urlParse (include "penstock.redis.rayAddress" . | lower)).host (urlParse (include "penstock.redis.address" . | lower)).host -}}
{{- if and $same (eq $own.ray.username $own.username) -}}
{{- fail "redis.external.ray: needs a username or a url that Penstock itself does not use, since who writes Ray's state runs code in its pods" -}}
{{- end -}}
{{ include "penstock.secretKey" (list . $own.ray "redis-ray" "password") }}
{{- else if $own.existingSecret -}}
{{- fail "redis.external.ray.existingSecret: needed, for a user or a Redis of Ray's own; or ray.gcsFaultTolerance: false" -}}
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
{{- include "penstock.external.unused" (list "qdrant" .Values.qdrant.external) -}}
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
{{- range $store := list "redis" "qdrant" "otlp" "oidc" -}}
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
