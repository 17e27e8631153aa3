{{/*
The environment of every pod that runs Penstock. What differs by pod is its address.
*/}}
{{- define "penstock.environment" -}}
- name: PENSTOCK_BIND_HOST
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
- name: PENSTOCK_GATEWAY__HOST  # the door is the one port for others than pods of this release
  value: "0.0.0.0"
- name: PENSTOCK_GATEWAY__PORT
  value: "8000"
- name: PENSTOCK_GATEWAY__GRPC_PORT
  value: "8001"
{{- range $i, $service := list "GATEWAY" "RETRIEVAL" "TOKENIZER" "ROUTER" "WORKER" }}
- name: PENSTOCK_{{ $service }}__INTERNAL_PORT
  value: {{ add 9000 $i | quote }}
- name: PENSTOCK_{{ $service }}__METRICS_PORT
  value: {{ add 9100 $i | quote }}
- name: PENSTOCK_{{ $service }}__HEALTH_PORT
  value: {{ add 9200 $i | quote }}
{{- end }}
- name: PENSTOCK_GATEWAY__REQUEST_TIMEOUT_S
  value: {{ int64 .Values.requestTimeoutSeconds | quote }}
- name: PENSTOCK_DRAIN_GRACE_S
  value: {{ int64 .Values.requestTimeoutSeconds | quote }}
- name: PENSTOCK_GATEWAY__LAME_DUCK_S
  value: {{ int64 .Values.lameDuckSeconds | quote }}
- name: PENSTOCK_DATA_DIR
  value: /var/lib/penstock
- name: PENSTOCK_BLOBS_URL
  value: {{ include "penstock.blobs.url" . | quote }}
- name: HOME
  value: /var/lib/penstock
- name: PENSTOCK_INTERNAL_SECRET
  valueFrom:
    secretKeyRef:
      {{- include "penstock.secretKey" (list . .Values.internalSecret "internal" "internal-secret") | nindent 6 }}
- name: PENSTOCK_INTERNAL_SECRET_ALSO  # while the secret is changed
  valueFrom:
    secretKeyRef:
      name: {{ (include "penstock.secretKey" (list . .Values.internalSecret "internal" "internal-secret") | fromYaml).name }}
      key: {{ .Values.internalSecret.keyAlso }}
      optional: true
{{- include "penstock.redis.environment" . | trim | nindent 0 }}
{{- if .Values.certificates.enabled }}
- name: PENSTOCK_TLS_DIR
  value: /etc/penstock/tls
{{- end }}
{{- if include "penstock.door.secretName" . }}
- name: PENSTOCK_GATEWAY__TLS_CERT
  value: /etc/penstock/door/tls.crt
- name: PENSTOCK_GATEWAY__TLS_KEY
  value: /etc/penstock/door/tls.key
{{- end }}
{{- with include "penstock.policy.environment" . | trim }}
{{ . }}
{{- end }}
{{- with include "penstock.otlp.endpoint" . }}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ . | quote }}
{{- if include "penstock.otlp.caRef" $ }}
- name: OTEL_EXPORTER_OTLP_CERTIFICATE
  value: /etc/penstock/stores/otlp-ca.crt
{{- end }}
{{- end }}
{{- end -}}

{{/*
Besides, that of the pods of the Ray cluster; the head's too: the graph is built there, from the same
settings. Those of `settings` are not here but in serveConfigV2, where a change is a rolling update
in place instead of a new cluster of pods.
*/}}
{{- define "penstock.ray.environment" -}}
{{- include "penstock.qdrant.environment" . | trim | nindent 0 }}
- name: HF_HUB_OFFLINE  # checkpoints come with the image or by the download Job
  value: "1"
- name: PENSTOCK_WORKER__PACKED_DIR  # no folder is shared with another worker: it packs in memory
  value: ""
{{- if .Values.kvDisk.enabled }}
- name: PENSTOCK_WORKER__KV_DISK_DIR  # below the volume, whose own folder is root's
  value: /var/cache/penstock-kv/blocks
{{- end }}
- name: TRITON_CACHE_DIR
  value: /var/cache/penstock/triton
- name: TORCHINDUCTOR_CACHE_DIR
  value: /var/cache/penstock/inductor
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
- name: RAY_LOG_TO_STDERR  # else replicas' lines go to files in the pod, and `kubectl logs` has none
  value: "1"
- name: RAY_BACKEND_LOG_LEVEL  # of Ray's own processes, whose lines are among ours then
  value: warning
{{- end -}}

{{- define "penstock.otlp.endpoint" -}}
{{- if (.Values.collector).enabled -}}
{{- if .Values.otlp.endpoint -}}
{{- fail "otlp.endpoint: set, but collector.enabled is true, and spans would go to the chart's own collector" -}}
{{- end -}}
{{ ternary "https" "http" .Values.certificates.enabled }}://{{ include "penstock.fullname" . }}-collector.{{ .Release.Namespace }}.svc:4317
{{- else -}}
{{- .Values.otlp.endpoint -}}
{{- end -}}
{{- end -}}

{{/* The Secret and key with its authority; empty: the system's authorities, or no TLS. */}}
{{- define "penstock.otlp.caRef" -}}
{{- if and (.Values.collector).enabled .Values.certificates.enabled -}}
name: {{ include "penstock.tls.secretName" (list . "collector") }}
key: ca.crt
{{- else if .Values.otlp.caSecret.name -}}
name: {{ .Values.otlp.caSecret.name }}
key: {{ .Values.otlp.caSecret.key }}
{{- end -}}
{{- end -}}

{{/*
Those of `settings` that somebody reads, as variables, so that a change of the router's restarts no
worker. What the chart derives from other values cannot be set twice. Call with (list . "gateway"),
(list . "services"), (list . "model"), or (list . "cli"), whose doctor looks at all of them.
*/}}
{{- define "penstock.settings" -}}
{{- $derived := "^(BIND_HOST|ADVERTISE_HOST|DATA_DIR|BLOBS_URL|NAMESPACE|TLS_DIR|INTERNAL_SECRET.*|RAY_TOKEN.*|REDIS_.*|QDRANT_.*|MODELS|POLICY__FILE|IDENTITY__(ADMIN_(HOST|PORT|TLS_CERT|TLS_KEY)|OIDC_CA)|DRAIN_GRACE_S|WORKER__(ROLE|MODEL|DEVICE|PACKED_DIR|KV_DISK_DIR)|GATEWAY__(REQUEST_TIMEOUT_S|LAME_DUCK_S|HOST|PORT|GRPC_PORT|TLS_CERT|TLS_KEY)|.*__(REPLICAS|RAY|INTERNAL_PORT|METRICS_PORT|HEALTH_PORT))$" -}}
{{- $sections := dict "gateway" "^(GATEWAY|IDENTITY|METERING|RETRIEVAL|POLICY)__" "services" "^(RETRIEVAL|TOKENIZER|ROUTER|POLICY)__|^WORKER__MAX_MODEL_LEN$" "model" "^WORKER__|^ROUTER__STALL_TIMEOUT_S$" "cli" "__" -}}
{{- $own := get $sections (index . 1) -}}
{{- $variables := dict -}}
{{- range $name, $value := (index . 0).Values.settings -}}
{{- if regexMatch $derived $name -}}
{{- fail (printf "settings.%s: the chart sets this one from its other values" $name) -}}
{{- end -}}
{{- if or (regexMatch $own $name) (not (contains "__" $name)) -}}
{{- $_ := set $variables (printf "PENSTOCK_%s" $name) (kindIs "string" $value | ternary $value (toJson $value)) -}}
{{- end -}}
{{- end -}}
{{- with $variables }}{{ toYaml . }}{{ end -}}
{{- end -}}

{{/* The same as a container's variables. */}}
{{- define "penstock.settings.environment" -}}
{{- range $name, $value := include "penstock.settings" . | fromYaml }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end -}}
