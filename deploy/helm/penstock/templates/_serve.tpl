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
    {{- with include "penstock.settings" (list . "services") }}
    runtime_env:
      env_vars:
        {{- . | nindent 8 }}
    {{- end }}
    args:
      {{- include "penstock.services.scale" . | trim | nindent 6 }}
  {{- range .Values.models }}
  {{- if ne .enabled false }}
  - name: {{ printf "penstock:%s" (.name | replace "/" "~") | quote }}
    route_prefix: null
    import_path: services.app:model
    {{- with include "penstock.settings" (list $ "model") }}
    runtime_env:
      env_vars:
        {{- . | nindent 8 }}
    {{- end }}
    args:
      {{- include "penstock.model.spec" (dict "root" $ "model" .) | nindent 6 }}
  {{- end }}
  {{- end }}
{{- end -}}

{{/* How many of each service, and the resource of which each pod has one: so a pod has one replica.
Gateways are a Deployment. */}}
{{- define "penstock.services.scale" -}}
gateway: null
{{- range $service := list "retrieval" "tokenizer" "router" }}
{{ $service }}:
  replicas: {{ $.Values.services.replicas }}
  ray:
    resources: {penstock-{{ $service }}: 1}
{{- end }}
{{- end -}}
