{{/* A StatefulSet's claim; call with (dict "name" "data" "persistence" .Values.redis.persistence). */}}
{{- define "penstock.stateClaim" -}}
{{- if .persistence.enabled }}
persistentVolumeClaimRetentionPolicy:
  whenDeleted: Retain
  whenScaled: Retain
volumeClaimTemplates:
  - metadata:
      name: {{ .name }}
      {{- with .persistence.annotations }}
      annotations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
    spec:
      accessModes: [ReadWriteOnce]
      {{- with .persistence.storageClassName }}
      storageClassName: {{ . }}
      {{- end }}
      resources:
        requests:
          storage: {{ .persistence.size }}
{{- end }}
{{- end -}}
