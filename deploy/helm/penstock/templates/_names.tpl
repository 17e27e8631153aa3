{{/* Names and labels. */}}

{{- define "penstock.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* The release's full name. KubeRay adds to a RayService's name, and allows it 47 characters. */}}
{{- define "penstock.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "penstock.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "penstock.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* What selects pods of one component; call with (list . "gateway"). */}}
{{- define "penstock.selectorLabels" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "penstock.name" $root }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* Labels of every object; call with (list . "gateway"). */}}
{{- define "penstock.labels" -}}
{{- $root := index . 0 -}}
{{ include "penstock.selectorLabels" . }}
app.kubernetes.io/part-of: penstock
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- with $root.Values.labels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Labels of pods; call with (list . "gateway"). */}}
{{- define "penstock.podLabels" -}}
{{- $root := index . 0 -}}
{{ include "penstock.selectorLabels" . }}
app.kubernetes.io/part-of: penstock
{{- with $root.Values.labels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "penstock.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "penstock.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "penstock.image" -}}
{{- $tag := default (printf "%s-%s" .Chart.AppVersion .Values.image.flavor) .Values.image.tag -}}
{{- printf "%s:%s" .Values.image.repository $tag -}}
{{- end -}}

{{/* A model's name as Kubernetes, Ray and labels take it: "Llama-3.1/8B" is "llama-3-1-8b". */}}
{{- define "penstock.slug" -}}
{{- join "-" (regexFindAll "[a-z0-9]+" (lower .) -1) | trunc 36 | trimSuffix "-" -}}
{{- end -}}
