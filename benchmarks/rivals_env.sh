#!/usr/bin/env bash
# Builds the isolated environment in which the rivals (torchft, torchrun) are measured.
# usage: benchmarks/rivals_env.sh [FOLDER]      default: benchmarks/.venv-rivals
# Prints the path of its python on the last line; exits non-zero if a rival cannot be installed.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
folder="${1:-$here/.venv-rivals}"
stamp="$folder/.installed"
wanted="torch==${RIVALS_TORCH:-2.13.0} torchft==${RIVALS_TORCHFT:-0.2.0} numpy pyyaml xxhash"
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
    "${PYTHON:-python3}" -m venv "$folder" >&2
    # shellcheck disable=SC2086
    "$folder/bin/pip" install --quiet --disable-pip-version-check $wanted >&2
    "$folder/bin/python" -c 'import torch, torchft; print("torch", torch.__version__)' >&2
    echo "$wanted" > "$stamp"
fi
echo "$folder/bin/python"
