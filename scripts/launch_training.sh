#!/usr/bin/env bash
# Launches training: the script that is named, or the built-in trainer.
#   scripts/launch_training.sh [train.py] [arguments]                      one node, this machine
#   NNODES=4 MIN_NODES=2 MAX_NODES=8 scripts/launch_training.sh train.py   the same on each of several machines, in any order
# STORE: the etcd through which several nodes agree (etcd://127.0.0.1:2379). RUN_ID: the job's name, alike on all (training).
# NNODES: how many machines are wanted. MIN_NODES (1), MAX_NODES (NNODES): how few will do, how many may join.
# NPROC_PER_NODE (auto), NODE_NAME, NODE_HOST: as the options of elastic-harness launch.
set -euo pipefail
if [ "${1:-}" = "--help" ]; then
    sed -n '2,7s/^# //p' "$0"
    exit 0
fi
here="$(cd "$(dirname "$0")/.." && pwd)"
command="$here/.venv/bin/elastic-harness"
[ -x "$command" ] || command=elastic-harness
[ $# -gt 0 ] || set -- -m elastic_harness.train
workers=(--nproc-per-node "${NPROC_PER_NODE:-auto}")
if [ -z "${STORE:-}${NNODES:-}${MIN_NODES:-}${MAX_NODES:-}" ]; then
    exec "$command" launch --standalone "${workers[@]}" ${RUN_ID:+--run-id "$RUN_ID"} "$@"
fi
exec "$command" launch --nnodes "${MIN_NODES:-1}:${MAX_NODES:-${NNODES:-${MIN_NODES:-1}}}" \
    --store "${STORE:-etcd://127.0.0.1:2379}" --run-id "${RUN_ID:-training}" "${workers[@]}" \
    ${NODE_NAME:+--node-name "$NODE_NAME"} ${NODE_HOST:+--host "$NODE_HOST"} "$@"
