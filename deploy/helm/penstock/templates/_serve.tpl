{{/*
What Serve shall run: one application for the services, one for each model, so that adding a model
touches nothing else. Serve's proxies are off: each replica has servers of its own.
*/}}
{{- define "penstock.serveConfig" -}}
{{- include "penstock.models.check" . -}}
proxy_location: Disabled
applications:
  - name: penstock
    route_prefix: null
    import_path: services.app:application
    runtime_env:
      env_vars:
        {{- $settings := include "penstock.settings" . | fromYaml }}
        {{- $settings = merge $settings (include "penstock.services.replicas" . | fromYaml) }}
        {{- toYaml $settings | nindent 8 }}
  {{- range .Values.models }}
  {{- if .enabled }}
  - name: model-{{ include "penstock.slug" .name }}
    route_prefix: null
    import_path: services.app:model
    runtime_env:
      env_vars:
        {{- include "penstock.settings" $ | nindent 8 }}
    args:
      {{- include "penstock.model.spec" (dict "root" $ "model" .) | nindent 6 }}
  {{- end }}
  {{- end }}
{{- end -}}

{{/* Replicas of the services, each bound to a pod by a resource of which a pod has one. */}}
{{- define "penstock.services.replicas" -}}
{{- $replicas := dict "gateway" .Values.gateway.replicas "retrieval" .Values.services.replicas "tokenizer" .Values.services.replicas "router" .Values.services.replicas -}}
{{- range $service, $count := $replicas }}
PENSTOCK_{{ upper $service }}__REPLICAS: {{ $count | quote }}
PENSTOCK_{{ upper $service }}__RAY: {{ dict "num_cpus" 0 "resources" (dict (printf "penstock-%s" $service) 1) | toJson | quote }}
{{- end }}
{{- end -}}
