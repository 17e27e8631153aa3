{{/* The head: Ray's control plane and Serve's controller. It runs no replica and carries no request. */}}
{{- define "penstock.head.group" -}}
rayStartParams:
  {{- include "penstock.rayPorts" . | nindent 2 }}
  port: "6379"
  dashboard-host: "0.0.0.0"
  dashboard-port: "8265"
  num-cpus: "0"
template:
  {{- include "penstock.podTemplate" (dict
      "root" . "component" "head" "own" .Values.head "gpus" 0
      "container" "head" "identities" list "drains" 0 "models" false
      "ports" (include "penstock.head.ports" .) "probes" (include "penstock.head.probes" .)
      "environment" (include "penstock.head.environment" .)
    ) | nindent 2 }}
{{- end -}}

{{/* Nothing listens on `serve`: KubeRay wants a port of that name, for a Service that nobody uses. */}}
{{- define "penstock.head.ports" -}}
- {name: gcs-server, containerPort: 6379}
- {name: dashboard, containerPort: 8265}
- {name: metrics, containerPort: 8080}
- {name: serve, containerPort: 8000}
{{- end -}}

{{- define "penstock.head.environment" -}}
{{- if and .Values.ray.gcsFaultTolerance (include "penstock.redis.caRef" .) }}
- name: RAY_REDIS_CA_CERT
  value: /etc/penstock/stores/redis-ca.crt
{{- end }}
{{- end -}}

{{/* No startup probe: KubeRay's Job that cleans Redis is a copy of this pod, and would keep it. */}}
{{- define "penstock.head.probes" -}}
readinessProbe:
  {{- include "penstock.rayHealth" . | nindent 2 }}
  initialDelaySeconds: 5
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 6
livenessProbe:
  {{- include "penstock.rayHealth" . | nindent 2 }}
  initialDelaySeconds: 60
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 12
{{- end -}}
