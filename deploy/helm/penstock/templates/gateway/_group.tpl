{{/* Gateways: one a pod, the only pods that are called from outside. */}}
{{- define "penstock.gateway.group" -}}
groupName: gateway
replicas: {{ .Values.gateway.replicas }}
minReplicas: {{ .Values.gateway.replicas }}
maxReplicas: {{ .Values.gateway.replicas }}
rayStartParams:
  {{- include "penstock.rayPorts" . | nindent 2 }}
  num-cpus: "0"
  resources: '''{"penstock-gateway": 1}'''
template:
  {{- include "penstock.podTemplate" (dict
      "root" . "component" "gateway" "own" .Values.gateway "gpus" 0
      "container" "gateway" "identities" (list "gateway") "drains" 1 "models" false
      "ports" (include "penstock.gateway.ports" .) "probes" (include "penstock.gateway.probes" .)
    ) | nindent 2 }}
{{- end -}}

{{- define "penstock.gateway.ports" -}}
- {name: http, containerPort: 8000}
- {name: grpc, containerPort: 8001}
- {name: internal, containerPort: 9000}
- {name: metrics, containerPort: 8080}
- {name: metrics-gateway, containerPort: 9100}
{{- end -}}

{{- define "penstock.gateway.probes" -}}
{{- $scheme := ternary "HTTPS" "HTTP" (ne "" (include "penstock.door.secretName" .)) -}}
startupProbe:
  httpGet: {path: /healthz, port: http, scheme: {{ $scheme }}}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: {{ div (int .Values.gateway.startupSeconds) 5 }}
readinessProbe:
  httpGet: {path: /readyz, port: http, scheme: {{ $scheme }}}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 2
livenessProbe:
  {{- include "penstock.rayHealth" . | nindent 2 }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 12
{{- end -}}
