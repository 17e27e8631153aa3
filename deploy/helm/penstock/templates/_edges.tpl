{{/* What selects all pods of the release. */}}
{{- define "penstock.releaseLabels" -}}
app.kubernetes.io/name: {{ include "penstock.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* Peers of a network policy: the pods of this release with one of the components.
     Takes (list $ "component" …). */}}
{{- define "penstock.peers" -}}
{{- $root := first . -}}
- podSelector:
    matchLabels: {{- include "penstock.releaseLabels" $root | nindent 6 }}
    matchExpressions:
      - {key: app.kubernetes.io/component, operator: In, values: {{ rest . | toJson }}}
{{- end -}}

{{/* A peer of another namespace, from {namespace: …, podLabels: {…}}. */}}
{{- define "penstock.podsElsewhere" -}}
- namespaceSelector:
    matchLabels: {kubernetes.io/metadata.name: {{ .namespace }}}
  podSelector:
    matchLabels: {{- toYaml .podLabels | nindent 6 }}
{{- end -}}

{{/* TCP ports of a network policy's rule, from a list of numbers or `first-last`. */}}
{{- define "penstock.tcp" -}}
{{- range . }}
{{- $range := splitList "-" (toString .) }}
- {protocol: TCP, port: {{ first $range }}{{ if eq (len $range) 2 }}, endPort: {{ last $range }}{{ end }}}
{{- end }}
{{- end -}}

{{/* The way to Redis: its pods, or its URL's port anywhere, as no selector knows where it is. */}}
{{- define "penstock.redis.egress" -}}
{{- if .Values.redis.enabled -}}
- to: {{- include "penstock.peers" (list . "redis") | nindent 4 }}
  ports: {{- include "penstock.tcp" (list 6379) | nindent 4 }}
{{- else -}}
- ports: {{- include "penstock.tcp" (list (include "penstock.redis.address" . | splitList ":" | last)) | nindent 4 }}
{{- end -}}
{{- end -}}

{{/* The way of Ray's state, where that is elsewhere; empty: it is that to Redis, or there is none. */}}
{{- define "penstock.redis.rayEgress" -}}
{{- if and .Values.ray.gcsFaultTolerance (not .Values.redis.enabled) .Values.redis.external.ray.url -}}
- ports: {{- include "penstock.tcp" (list (include "penstock.redis.rayAddress" . | splitList ":" | last)) | nindent 4 }}
{{- end -}}
{{- end -}}

{{/* The way to Qdrant likewise. */}}
{{- define "penstock.qdrant.egress" -}}
{{- if .Values.qdrant.enabled -}}
- to: {{- include "penstock.peers" (list . "qdrant") | nindent 4 }}
  ports: {{- include "penstock.tcp" (list 6333) | nindent 4 }}
{{- else -}}
- ports: {{- include "penstock.tcp" (list (include "penstock.port" (include "penstock.qdrant.url" .))) | nindent 4 }}
{{- end -}}
{{- end -}}

{{/* To the bucket of uploaded files, by TLS: its endpoint may be anywhere. Empty: they are in a volume. */}}
{{- define "penstock.blobs.egress" -}}
{{- if .Values.blobs.url -}}
- ports: {{- include "penstock.tcp" (list 443) | nindent 4 }}
{{- end -}}
{{- end -}}

{{/* The way of spans: to the collector, or to the endpoint's port anywhere; empty: they stay. */}}
{{- define "penstock.otlp.egress" -}}
{{- if .Values.collector.enabled -}}
- to: {{- include "penstock.peers" (list . "collector") | nindent 4 }}
  ports: {{- include "penstock.tcp" (list 4317) | nindent 4 }}
{{- else if .Values.otlp.endpoint -}}
- ports: {{- include "penstock.tcp" (list (include "penstock.port" .Values.otlp.endpoint)) | nindent 4 }}
{{- end -}}
{{- end -}}

{{/* The port of an http(s) URL. */}}
{{- define "penstock.port" -}}
{{- $url := urlParse . -}}
{{- if regexMatch ":[0-9]+$" $url.host -}}
{{- splitList ":" $url.host | last -}}
{{- else -}}
{{- ternary "443" "80" (eq $url.scheme "https") -}}
{{- end -}}
{{- end -}}

{{/* The door's public paths, as YAML: what a route from outside leads to it, of either kind. Probes'
     own (/healthz, /health) are not among them. */}}
{{- define "penstock.door.paths" -}}
- {type: Prefix, path: /v1}
- {type: Exact, path: /v2/rerank}
- {type: Exact, path: /tokenize}
- {type: Exact, path: /detokenize}
- {type: Exact, path: /readyz}
- {type: Exact, path: /version}
- {type: Exact, path: /openapi.json}
- {type: Prefix, path: /docs}
{{- end -}}
