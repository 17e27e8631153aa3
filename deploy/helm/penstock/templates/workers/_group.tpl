{{/*
Workers of one pool of a model: one a pod, with all of the pod's GPUs.
A pool is (dict "role" "decode" "values" …), see penstock.model.pools.
*/}}
{{- define "penstock.worker.group" -}}
{{- $root := .root -}}
{{- $slug := include "penstock.slug" .model.name -}}
{{- $pool := .pool.values -}}
{{- $replicas := ternary 0 (int $pool.replicas) (eq .model.enabled false) -}}
groupName: {{ .pool.role }}-{{ $slug }}
replicas: {{ $replicas }}
minReplicas: {{ $replicas }}
maxReplicas: {{ $replicas }}
rayStartParams:
  {{- include "penstock.rayPorts" $root | nindent 2 }}
  num-cpus: "0"
  num-gpus: {{ $pool.gpus | quote }}
  resources: '''{"penstock-{{ .pool.role }}-{{ $slug }}": 1}'''
template:
  {{- include "penstock.podTemplate" (dict
      "root" $root "component" (ternary "decode" .pool.role (eq .pool.role "both"))
      "labels" (dict "penstock.dev/model" $slug) "own" $pool "gpus" $pool.gpus
      "container" "worker" "identities" (list "worker") "drains" 1 "models" true
      "waitsFor" (include "penstock.model.download" (dict "root" $root "model" .model))
      "ports" (include "penstock.worker.ports" $root)
      "probes" (include "penstock.worker.probes" $pool)
    ) | nindent 2 }}
{{- end -}}

{{- define "penstock.worker.ports" -}}
- {name: internal, containerPort: 9004}
- {name: metrics, containerPort: 8080}
- {name: metrics-worker, containerPort: 9104}
- {name: health, containerPort: 9204}
{{- end -}}

{{- define "penstock.worker.probes" -}}
startupProbe:
  grpc: {port: 9204}
  periodSeconds: 10
  timeoutSeconds: 3
  failureThreshold: {{ div (int .startupSeconds) 10 }}
readinessProbe:
  grpc: {port: 9204}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 2
livenessProbe:
  {{- include "penstock.rayHealth" . | nindent 2 }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 12
{{- end -}}
