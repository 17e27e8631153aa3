{{/* The pods of the Ray cluster: one template for all, filled in by each group. */}}

{{/* Ports that `ray start` would choose freely, so that network policies can name them. */}}
{{- define "penstock.rayPorts" -}}
node-manager-port: "6380"
object-manager-port: "6381"
runtime-env-agent-port: "6382"
dashboard-agent-grpc-port: "6383"
dashboard-agent-listen-port: "52365"
metrics-export-port: "8080"
min-worker-port: "10002"
max-worker-port: "10999"
object-store-memory: "104857600"  # the graph keeps no objects in Ray
{{- end -}}

{{/* Whether the Ray node of a pod lives; the services' own health is Serve's to watch. */}}
{{- define "penstock.rayHealth" -}}
httpGet:
  path: /api/healthz
  port: 52365
{{- end -}}

{{/*
A pod's template. Call with a dict:
  root       the chart's context
  component  label and selector
  labels     further labels of the pod
  own        the group's values: placement, resources, annotations, extraEnv, sharedMemory
  gpus       whole GPUs of the container
  container  the container's name
  identities certificates to mount: of what runs in the pod, which drains itself by them
  environment YAML of further variables
  ports      YAML of container ports
  probes     YAML of the probes
  drains     in how many waves it is drained before it ends; 0: not at all
  models     whether the model cache is mounted
  waitsFor   folder of a checkpoint that must be there before the pod starts
*/}}
{{- define "penstock.podTemplate" -}}
{{- $root := .root -}}
{{- $selector := include "penstock.selectorLabels" (list $root .component) | fromYaml -}}
{{- $selector = merge $selector (default dict .labels) -}}
metadata:
  labels:
    {{- /* No version here: pods change when what runs in them does. */}}
    {{- include "penstock.podLabels" (list $root .component) | nindent 4 }}
    {{- with .labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with .own.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "penstock.serviceAccountName" $root }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ if .drains }}{{ include "penstock.gracePeriod" (list $root .drains) }}{{ else }}30{{ end }}
  securityContext:
    {{- include "penstock.podSecurityContext" $root | nindent 4 }}
  {{- with include "penstock.imagePullSecrets" $root }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- include "penstock.placement" (dict "root" $root "own" .own "selector" $selector "gpus" .gpus) | trim | nindent 2 }}
  {{- if .waitsFor }}
  initContainers:
    - name: wait-for-model
      image: {{ include "penstock.image" $root }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      command: [bash, -c]
      args: ['until [ -e "$CHECKPOINT/.complete" ]; do echo "waits for $CHECKPOINT"; sleep 5; done']
      env:
        - name: CHECKPOINT
          value: {{ .waitsFor }}
      securityContext:
        {{- include "penstock.containerSecurityContext" $root | nindent 8 }}
      resources:
        requests: {cpu: 10m, memory: 32Mi}
        limits: {memory: 64Mi}
      volumeMounts:
        - name: models
          mountPath: /models
          readOnly: true
  {{- end }}
  containers:
    - name: {{ .container }}
      image: {{ include "penstock.image" $root }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      securityContext:
        {{- include "penstock.containerSecurityContext" $root | nindent 8 }}
      env:
        {{- include "penstock.environment" $root | trim | nindent 8 }}
        {{- include "penstock.ray.environment" $root | trim | nindent 8 }}
        {{- with .environment }}
        {{- . | trim | nindent 8 }}
        {{- end }}
        {{- with .own.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- if and (has "retrieval" .identities) $root.Values.blobs.existingSecret }}
      envFrom:
        - secretRef: {name: {{ $root.Values.blobs.existingSecret }}}
      {{- end }}
      ports:
        {{- .ports | nindent 8 }}
      {{- .probes | nindent 6 }}
      {{- if .drains }}
      lifecycle:
        preStop:
          exec:
            command: [bash, -c, 'exec penstock drain --node "$PENSTOCK_BIND_HOST" --wait']
      {{- end }}
      resources:
        {{- $resources := deepCopy .own.resources }}
        {{- if gt (int .gpus) 0 }}
        {{- $_ := set $resources "limits" (merge (dict $root.Values.workers.gpuResource (int .gpus)) (default dict $resources.limits)) }}
        {{- end }}
        {{- toYaml $resources | nindent 8 }}
      volumeMounts:
        - name: tmp
          mountPath: /tmp
        - name: data
          mountPath: /var/lib/penstock
        - name: shared-memory
          mountPath: /dev/shm
        - name: compile-cache
          mountPath: /var/cache/penstock
        {{- if and .models $root.Values.modelCache.enabled }}
        - name: models
          mountPath: /models
          readOnly: true
        {{- end }}
        {{- if and (has "worker" .identities) $root.Values.kvDisk.enabled }}
        - name: kv
          mountPath: /var/cache/penstock-kv
        {{- end }}
        {{- if $root.Values.certificates.enabled }}
        {{- range .identities }}
        - name: tls-{{ . }}
          mountPath: /etc/penstock/tls/{{ . }}
          readOnly: true
        {{- end }}
        {{- end }}
        {{- if has "retrieval" .identities }}
        {{- with include "penstock.blobs.mount" $root | trim }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- end }}
        {{- with include "penstock.policy.mount" $root | trim }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- if include "penstock.stores.volume" $root }}
        - name: stores
          mountPath: /etc/penstock/stores
          readOnly: true
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: {sizeLimit: {{ $root.Values.scheduling.tmpSizeLimit }}}
    - name: data
      emptyDir: {sizeLimit: 1Gi}
    - name: shared-memory
      emptyDir: {medium: Memory, sizeLimit: {{ .own.sharedMemory }}}
    - name: compile-cache
      {{- with $root.Values.compileCache.existingClaim }}
      persistentVolumeClaim:
        claimName: {{ . }}
      {{- else }}
      emptyDir: {sizeLimit: {{ $root.Values.compileCache.sizeLimit }}}
      {{- end }}
    {{- if and .models $root.Values.modelCache.enabled }}
    - name: models
      persistentVolumeClaim:
        claimName: {{ include "penstock.modelCache.claim" $root }}
    {{- end }}
    {{- if and (has "worker" .identities) $root.Values.kvDisk.enabled }}
    - name: kv
      {{- with $root.Values.kvDisk.existingClaim }}
      persistentVolumeClaim:
        claimName: {{ . }}
      {{- else }}
      emptyDir: {sizeLimit: {{ $root.Values.kvDisk.sizeLimit }}}
      {{- end }}
    {{- end }}
    {{- if $root.Values.certificates.enabled }}
    {{- range .identities }}
    - name: tls-{{ . }}
      secret:
        secretName: {{ include "penstock.tls.secretName" (list $root .) }}
        defaultMode: 0440
    {{- end }}
    {{- end }}
    {{- if has "retrieval" .identities }}
    {{- with include "penstock.blobs.volume" $root | trim }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- end }}
    {{- with include "penstock.policy.volume" $root | trim }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with include "penstock.stores.volume" $root }}
    {{- . | trim | nindent 4 }}
    {{- end }}
{{- end -}}
