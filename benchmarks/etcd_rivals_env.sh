#!/usr/bin/env bash
# Builds the isolated environment in which other Python clients of etcd v3 are measured.
# usage: benchmarks/etcd_rivals_env.sh [FOLDER]      default: benchmarks/.venv-rivals-etcd
# Prints the path of its python on the last line. A rival that cannot be installed is left out; the benchmark says so.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
folder="${1:-$here/.venv-rivals-etcd}"
stamp="$folder/.installed"
rivals="etcd-client-py==0.5.1 etcd-sdk-python==0.0.7 etcd3gw==2.7.0 aetcd==1.0.0"
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$rivals" ]; then
    "${PYTHON:-python3}" -m venv "$folder" >&2
    for rival in $rivals protobuf tenacity; do
        "$folder/bin/pip" install --quiet --disable-pip-version-check "$rival" >&2 || echo "$rival cannot be installed" >&2
    done
    echo "$rivals" > "$stamp"
fi
echo "$folder/bin/python"
