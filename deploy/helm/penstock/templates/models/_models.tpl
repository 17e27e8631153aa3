{{/* Models: their pools, their checkpoints, and what is told of them to Serve. */}}

{{/*
Checks of what the schema cannot say. Every model has a pool that decodes, one source, and a name
that stays different from the others' once it is a Kubernetes name.
*/}}
{{- define "penstock.models.check" -}}
{{- $seen := dict -}}
{{- range .Values.models -}}
{{- $slug := include "penstock.slug" .name -}}
{{- if hasKey $seen $slug -}}
{{- fail (printf "models: %q and %q are the same name to Kubernetes" (get $seen $slug) .name) -}}
{{- end -}}
{{- $_ := set $seen $slug .name -}}
{{- if and .path .download -}}
{{- fail (printf "models[%s]: path or download, not both" .name) -}}
{{- else if not (or .path .download) -}}
{{- fail (printf "models[%s]: needs path (a folder in the image or the model cache) or download" .name) -}}
{{- else if and .path (not (hasPrefix "/" .path)) -}}
{{- fail (printf "models[%s].path: must be an absolute folder; for a model of the hub use download.repo" .name) -}}
{{- else if and .download (not $.Values.modelCache.enabled) -}}
{{- fail (printf "models[%s].download: needs modelCache.enabled" .name) -}}
{{- end -}}
{{- if not .decode -}}
{{- fail (printf "models[%s].decode: needed; without prefill its workers compute prompts as well" .name) -}}
{{- end -}}
{{- $model := . -}}
{{- range (include "penstock.model.pools" (dict "root" $ "model" .) | fromYaml).pools -}}
{{- $gpus := int .values.gpus -}}
{{- $own := mergeOverwrite (dict) (default dict $model.worker) (default dict .values.worker) -}}
{{- $ranks := int (default (max 1 $gpus) $own.tensor_parallel) -}}
{{- if and (gt $gpus 0) (ne $ranks $gpus) -}}
{{- fail (printf "models[%s]: tensor_parallel %v, gpus: %v: each rank has one GPU, so they are as many" $model.name $ranks $gpus) -}}
{{- end -}}
{{- if and $own.placement_group_strategy (ne $own.placement_group_strategy "STRICT_PACK") -}}
{{- fail (printf "models[%s]: placement_group_strategy %s: ranks of a worker are in one pod here, which is STRICT_PACK; on several hosts without the chart: docs/hosts.md" $model.name $own.placement_group_strategy) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* {"pools": [{"role": …, "values": …}]}: a model's pools, over the defaults of `workers`. */}}
{{- define "penstock.model.pools" -}}
{{- $defaults := .root.Values.workers -}}
{{- $pools := list -}}
{{- if .model.prefill -}}
{{- $pools = append $pools (dict "role" "prefill" "values" (mergeOverwrite (deepCopy $defaults) .model.prefill)) -}}
{{- $pools = append $pools (dict "role" "decode" "values" (mergeOverwrite (deepCopy $defaults) .model.decode)) -}}
{{- else -}}
{{- $pools = append $pools (dict "role" "both" "values" (mergeOverwrite (deepCopy $defaults) .model.decode)) -}}
{{- end -}}
{{- toYaml (dict "pools" $pools) -}}
{{- end -}}

{{/* The folder that the download Job fills; empty: the model is not downloaded. */}}
{{- define "penstock.model.download" -}}
{{- with .model.download -}}
/models/{{ include "penstock.slug" $.model.name }}/{{ .revision }}
{{- end -}}
{{- end -}}

{{- define "penstock.modelCache.claim" -}}
{{- default (printf "%s-models" (include "penstock.fullname" .)) .Values.modelCache.existingClaim -}}
{{- end -}}

{{/* What one pool is to Serve: replicas, what each asks of its Ray node, settings of its workers. */}}
{{- define "penstock.model.poolSpec" -}}
{{- $slug := include "penstock.slug" .model.name -}}
{{- $pool := .pool.values -}}
{{- $worker := deepCopy (default dict $pool.worker) -}}
{{- if gt (int $pool.gpus) 0 -}}
{{- $_ := set $worker "device" "cuda" -}}
{{- end -}}
{{- if gt (int $pool.gpus) 1 -}}
{{- $_ := set $worker "tensor_parallel" (int $pool.gpus) -}}
{{- end -}}
replicas: {{ $pool.replicas }}
ray:
  {{- if gt (int $pool.gpus) 0 }}
  num_gpus: {{ $pool.gpus }}
  {{- end }}
  resources: {penstock-{{ .pool.role }}-{{ $slug }}: 1}
{{- with $worker }}
worker:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* A ModelSpec, see docs/settings.md. */}}
{{- define "penstock.model.spec" -}}
name: {{ .model.name }}
path: {{ default .model.path (include "penstock.model.download" .) }}
{{- with .model.adapters }}
adapters:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .model.worker }}
worker:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- range (include "penstock.model.pools" . | fromYaml).pools }}
{{ ternary "decode" .role (eq .role "both") }}:
  {{- include "penstock.model.poolSpec" (dict "model" $.model "pool" .) | nindent 2 }}
{{- end }}
{{- end -}}
