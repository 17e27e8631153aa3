{{/* What all pods share: security, placement, environment, volumes. */}}

{{- define "penstock.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "penstock.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: {{ .Values.readOnlyRootFilesystem }}
runAsNonRoot: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "penstock.imagePullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/*
Where pods go: the part's own values, else those of `scheduling`. Without constraints of its own a
part spreads over hosts and zones as well as it can.
Call with (dict "root" . "own" .Values.gateway "selector" (dict label value …) "gpus" 0).
*/}}
{{- define "penstock.placement" -}}
{{- $shared := .root.Values.scheduling -}}
{{- with default $shared.nodeSelector .own.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- $tolerations := default $shared.tolerations .own.tolerations }}
{{- if gt (int .gpus) 0 }}
{{- $tolerations = append (default list $tolerations) (dict "key" .root.Values.workers.gpuResource "operator" "Exists" "effect" "NoSchedule") }}
{{- end }}
{{- with $tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with default $shared.affinity .own.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
{{- with default $shared.topologySpreadConstraints .own.topologySpreadConstraints }}
  {{- toYaml . | nindent 2 }}
{{- else }}
  {{- $selector := .selector }}
  {{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- toYaml $selector | nindent 8 }}
  {{- end }}
{{- end }}
{{- with default (include "penstock.priorityClassName" .root) .own.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with default $shared.runtimeClassName .own.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end -}}

{{/* A class belongs to no namespace, so its name says which. */}}
{{- define "penstock.priorityClass.own" -}}
{{- printf "%s-%s" (include "penstock.fullname" .) .Release.Namespace | trimSuffix "-" -}}
{{- end -}}

{{- define "penstock.priorityClassName" -}}
{{- with .Values.scheduling.priorityClass -}}
{{- ternary (include "penstock.priorityClass.own" $) .name .create -}}
{{- end -}}
{{- end -}}

{{/*
Seconds that a pod has to leave: the longest stream, once for each of the waves in which `penstock
drain --wait` ends what is in the pod, with what comes before and after. Call with (list . 1).
*/}}
{{- define "penstock.gracePeriod" -}}
{{- $values := (index . 0).Values -}}
{{- add (int $values.lameDuckSeconds) (mul (index . 1) (add (int $values.requestTimeoutSeconds) 15)) 30 -}}
{{- end -}}
