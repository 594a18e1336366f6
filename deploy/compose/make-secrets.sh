#!/bin/sh
# Makes the secrets of compose.yaml, once; what is there stays as it is.
#
# Files are readable by every user, since the containers' users differ; the folder is for its owner alone, and only the
# files that a service names are mounted into it.
set -eu
cd "$(dirname "$0")"
umask 022
mkdir -p secrets
chmod 700 secrets
cd secrets

random() { head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n'; }

make() { # NAME PREFIX
  [ -s "$1" ] || printf '%s%s' "$2" "$(random)" > "$1"
}

make api-key sk-bootstrap-
make admin-key tl-admin-
make otlp-token ''
make redis-password ''
make grafana-password ''
[ -s redis-url ] || printf 'redis://:%s@redis:6379/0' "$(cat redis-password)" > redis-url
[ -s collector.env ] || printf 'TOKENLINE_OTLP_TOKEN=%s\n' "$(cat otlp-token)" > collector.env

echo "Secrets are in $(pwd). The key for apps is in api-key, the admin key (console, keys) in admin-key,"
echo "Grafana's password (user admin) in grafana-password."
