#!/usr/bin/env bash
# Builds the isolated environment in which data loaders are measured: the rivals' and ours, with one torch and numpy.
# usage: benchmarks/data_rivals_env.sh [FOLDER]      default: benchmarks/.venv-rivals-data
# Prints the path of its python on the last line. A rival that cannot be installed is left out; the benchmark says so.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
folder="${1:-$here/.venv-rivals-data}"
stamp="$folder/.installed"
ours="torch==${RIVALS_TORCH:-2.13.0} numpy<2.2 xxhash<4 pyyaml safetensors rich"
rivals="torchdata==0.11.0 grain==0.2.18 litdata==0.2.76 mosaicml-streaming==0.13.0"
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$ours $rivals" ]; then
    "${PYTHON:-python3}" -m venv "$folder" >&2
    pip() { "$folder/bin/pip" install --quiet --disable-pip-version-check "$@" >&2; }
    read -ra wanted <<< "$ours"
    pip "${wanted[@]}"
    # litdata and streaming name torchvision, which only their image readers use and which would fetch gigabytes.
    for rival in $rivals; do
        pip --no-deps "$rival" || echo "$rival cannot be installed" >&2
    done
    pip absl-py array-record cloudpickle 'etils[epath,epy]' portpicker 'protobuf>=5.28.3' requests urllib3 \
        lightning-utilities filelock boto3 tifffile Brotli python-snappy zstd tqdm catalogue 'transformers<5' \
        pillow matplotlib 'numpy<2.2' 'xxhash<4' || true
    site="$("$folder/bin/python" -c 'import site; print(site.getsitepackages()[0])')"
    mkdir -p "$site/torchvision/transforms"
    : > "$site/torchvision/__init__.py"
    : > "$site/torchvision/transforms/__init__.py"
    echo 'class VisionDataset: ...' > "$site/torchvision/datasets.py"
    echo 'def to_tensor(image): raise NotImplementedError' > "$site/torchvision/transforms/functional.py"
    echo "$ours $rivals" > "$stamp"
fi
echo "$folder/bin/python"
