{{- define "torpor.labels" -}}
app.kubernetes.io/name: torpor
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{/* Annotations of what machines end with: an uninstall, and a value that has gone, leave it. */}}
{{- define "torpor.kept" -}}
helm.sh/resource-policy: keep
argocd.argoproj.io/sync-options: Prune=false,Delete=false
{{- end }}

{{- define "torpor.image" -}}
{{ .Values.image.name }}{{ if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ .Values.image.tag }}{{ end }}
{{- end }}

{{/* The namespaces of machines, each once, as JSON. */}}
{{- define "torpor.namespaces" -}}
{{- $all := .Values.machines.namespaces }}
{{- range .Values.teams }}{{ $all = append $all .namespace }}{{ end }}
{{- if has .Release.Namespace $all }}
{{- fail (printf "namespace %s has the workers' Secrets, which torpor's Role could read: give machines another one" .Release.Namespace) }}
{{- end }}
{{- dict "all" ($all | uniq) | toJson }}
{{- end }}

{{/* What every pod of torpor has. Its own part: containers, restartPolicy. */}}
{{- define "torpor.pod" -}}
serviceAccountName: {{ .Release.Name }}
enableServiceLinks: false
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.workers.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.workers.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "torpor.container" -}}
image: {{ include "torpor.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
workingDir: /opt/torpor
securityContext:
  allowPrivilegeEscalation: false
  capabilities: {drop: [ALL]}
  readOnlyRootFilesystem: true
{{- end }}

{{/* The environment of what talks to the Prefect server. Files go to the two volumes of torpor.volumes. */}}
{{- define "torpor.environment" -}}
env:
  - {name: PREFECT_API_URL, value: {{ .Values.prefect.url | quote }}}
  {{- with .Values.prefect.login }}
  {{- if .secret }}
  - name: PREFECT_API_AUTH_STRING
    valueFrom: {secretKeyRef: {name: {{ .secret }}, key: {{ .key }}}}
  {{- end }}
  {{- end }}
  - {name: HOME, value: /var/lib/torpor}
  - {name: PREFECT_HOME, value: /var/lib/torpor/prefect}
  - {name: PREFECT_WORKER_QUERY_SECONDS, value: "2"}
  - {name: PREFECT_CLIENT_RETRY_EXTRA_CODES, value: "500"}
  - {name: DO_NOT_TRACK, value: "1"}
  - name: POD_NAME
    valueFrom: {fieldRef: {fieldPath: metadata.name}}
  {{- range $name, $value := .Values.workers.environment }}
  - {name: {{ $name }}, value: {{ $value | quote }}}
  {{- end }}
{{- end }}

{{- define "torpor.mounts" -}}
volumeMounts:
  - {name: state, mountPath: /var/lib/torpor}
  - {name: temporary, mountPath: /tmp}
{{- end }}

{{- define "torpor.volumes" -}}
- {name: state, emptyDir: {}}
- {name: temporary, emptyDir: {}}
{{- end }}
