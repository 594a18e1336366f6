{{- define "tokenline.fullname" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 52 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "tokenline.selector" -}}
app.kubernetes.io/name: tokenline
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "tokenline.labels" -}}
{{ include "tokenline.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "tokenline.secret" -}}
{{ .Values.secrets.existingSecret | default (printf "%s-secrets" (include "tokenline.fullname" .)) }}
{{- end }}

{{- define "tokenline.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "tokenline.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- /* What would start and then not work is refused here. */ -}}
{{- define "tokenline.check" -}}
{{- $most := ternary .Values.autoscaling.maxReplicas .Values.replicas .Values.autoscaling.enabled | int }}
{{- if and (gt $most 1) (not .Values.redis.enabled) }}
{{- fail "more than one gateway share keys and limits by Redis: set redis.enabled=true and give its URL (secrets.redisUrl, or redis-url in secrets.existingSecret), or set replicas=1" }}
{{- end }}
{{- if not .Values.secrets.existingSecret }}
{{- if not .Values.secrets.apiKey }}{{ fail "secrets.apiKey is empty: give a first key for apps, or name a Secret in secrets.existingSecret" }}{{ end }}
{{- if not .Values.secrets.adminKey }}{{ fail "secrets.adminKey is empty: give a key for the admin API, or name a Secret in secrets.existingSecret" }}{{ end }}
{{- if not .Values.secrets.otlpToken }}{{ fail "secrets.otlpToken is empty: give a token for engines that send spans, or name a Secret in secrets.existingSecret" }}{{ end }}
{{- if and .Values.redis.enabled (not .Values.secrets.redisUrl) }}{{ fail "redis.enabled is true, but secrets.redisUrl is empty" }}{{ end }}
{{- end }}
{{- if and (not .Values.engine.enabled) (not (contains "[[models]]" .Values.config)) }}
{{- fail "nothing could answer requests: name servers under [[upstreams]] and [[models]] in config, or set engine.enabled=true" }}
{{- end }}
{{- end }}
