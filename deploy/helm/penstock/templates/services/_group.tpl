{{/* Retrieval, tokenizer and router: one of each a pod. Callers find them in the registry. */}}
{{- define "penstock.services.group" -}}
groupName: services
replicas: {{ .Values.services.replicas }}
minReplicas: {{ .Values.services.replicas }}
maxReplicas: {{ .Values.services.replicas }}
rayStartParams:
  {{- include "penstock.rayPorts" . | nindent 2 }}
  num-cpus: "0"
  resources: '''{"penstock-retrieval": 1, "penstock-tokenizer": 1, "penstock-router": 1}'''
template:
  {{- include "penstock.podTemplate" (dict
      "root" . "component" "services" "own" .Values.services "gpus" 0
      "container" "services" "identities" (list "retrieval" "tokenizer" "router")
      "drains" 2 "models" true "environment" (include "penstock.qdrant.key" .)
      "ports" (include "penstock.services.ports" .) "probes" (include "penstock.services.probes" .)
    ) | nindent 2 }}
{{- end -}}

{{- define "penstock.services.ports" -}}
- {name: retrieval, containerPort: 9001}
- {name: tokenizer, containerPort: 9002}
- {name: router, containerPort: 9003}
- {name: metrics, containerPort: 8080}
- {containerPort: 9101}
- {containerPort: 9102}
- {containerPort: 9103}
- {containerPort: 9201}
- {containerPort: 9202}
- {containerPort: 9203}
{{- end -}}

{{/* A probe asks one port: the first that all three are there, then the one that requests meet first. */}}
{{- define "penstock.services.probes" -}}
startupProbe:
  exec:
    command: [bash, -c, 'for port in 9201 9202 9203; do : < /dev/tcp/$PENSTOCK_BIND_HOST/$port || exit; done']
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: {{ div (int .Values.services.startupSeconds) 5 }}
readinessProbe:
  grpc: {port: 9202}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 2
livenessProbe:
  {{- include "penstock.rayHealth" . | nindent 2 }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 12
{{- end -}}
