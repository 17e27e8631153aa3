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

{{/* Non-empty where the door's certificate is not signed by the release's own issuer. */}}
{{- define "penstock.door.ofOthers" -}}
{{- or .Values.certificates.door.existingSecret .Values.certificates.door.issuerRef.name | default "" -}}
{{- end -}}

{{/* A name in the door's certificate; empty: nobody told us which it has. */}}
{{- define "penstock.door.name" -}}
{{- if not (include "penstock.door.ofOthers" .) -}}
{{- include "penstock.fullname" . -}}
{{- else if .Values.certificates.door.dnsNames -}}
{{- first .Values.certificates.door.dnsNames -}}
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

{{/* Secrets that the values name and somebody else makes: name: [key …], as YAML. */}}
{{- define "penstock.secrets.given" -}}
{{- $v := .Values -}}
{{- $state := $v.ray.gcsFaultTolerance -}}
{{- $downloads := dict -}}
{{- range $v.models }}{{ if .download }}{{ $_ := set $downloads .name true }}{{ end }}{{ end -}}
{{- $wanted := list
    (list true $v.internalSecret.existingSecret $v.internalSecret.key)
    (list $v.redis.enabled $v.redis.auth.existingSecret $v.redis.auth.key)
    (list (and $v.redis.enabled $state) $v.redis.rayAuth.existingSecret $v.redis.rayAuth.key)
    (list (not $v.redis.enabled) $v.redis.external.existingSecret $v.redis.external.key)
    (list (not $v.redis.enabled) $v.redis.external.caSecret.name $v.redis.external.caSecret.key)
    (list (and (not $v.redis.enabled) $state) $v.redis.external.ray.existingSecret $v.redis.external.ray.key)
    (list $v.qdrant.enabled $v.qdrant.auth.existingSecret $v.qdrant.auth.key)
    (list (not $v.qdrant.enabled) $v.qdrant.external.existingSecret $v.qdrant.external.key)
    (list (not $v.qdrant.enabled) $v.qdrant.external.caSecret.name $v.qdrant.external.caSecret.key)
    (list (not $v.collector.enabled) $v.otlp.caSecret.name $v.otlp.caSecret.key)
    (list true $v.gateway.oidcCaSecret.name $v.gateway.oidcCaSecret.key)
    (list $v.gateway.admin.enabled $v.gateway.admin.existingSecret "tls.crt")
    (list $v.gateway.admin.enabled $v.gateway.admin.existingSecret "tls.key")
    (list (not (empty $downloads)) $v.modelCache.download.tokenSecret.name $v.modelCache.download.tokenSecret.key)
    (list true $v.certificates.door.existingSecret "tls.crt")
    (list true $v.certificates.door.existingSecret "tls.key")
-}}
{{- $given := dict -}}
{{- range $wanted -}}
{{- if and (index . 0) (index . 1) -}}
{{- $_ := set $given (index . 1) (append (default list (get $given (index . 1))) (index . 2) | uniq) -}}
{{- end -}}
{{- end -}}
{{- with $given }}{{ toYaml . }}{{ end -}}
{{- end -}}

{{/* The seconds of a duration such as 2160h or 1h30m. */}}
{{- define "penstock.seconds" -}}
{{- $seconds := 0 -}}
{{- range regexFindAll "[0-9]+[hms]" . -1 -}}
{{- $seconds = add $seconds (mul (trimAll "hms" . | int64) (get (dict "h" 3600 "m" 60 "s" 1) (regexFind "[hms]" .))) -}}
{{- end -}}
{{ $seconds }}
{{- end -}}
