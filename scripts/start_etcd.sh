#!/usr/bin/env bash
# An etcd for development on this machine: scripts/start_etcd.sh start|status|stop [options of elastic-harness etcd]
set -euo pipefail
here="$(cd "$(dirname "$0")/.." && pwd)"
command="$here/.venv/bin/elastic-harness"
[ -x "$command" ] || command=elastic-harness
exec "$command" etcd "${@:-start}"
