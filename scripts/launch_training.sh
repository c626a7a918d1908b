#!/usr/bin/env bash
# Launches this machine's part of a job on several machines: the same on each, in any order.
#   STORE=etcd://10.0.0.1:2379 RUN_ID=my-job NNODES=4 NPROC_PER_NODE=8 scripts/launch_training.sh train.py [arguments]
# NNODES: how many machines are wanted. MIN_NODES (1), MAX_NODES (NNODES): how few will do, how many may join.
set -euo pipefail
if [ $# -eq 0 ] || [ "$1" = "--help" ] || [ -z "${STORE:-}" ] || [ -z "${RUN_ID:-}" ]; then
    sed -n '2,4s/^# //p' "$0"
    [ "${1:-}" = "--help" ] && exit 0
    echo "STORE is '${STORE:-}' and RUN_ID is '${RUN_ID:-}': set both, and name a script" >&2
    exit 2
fi
most="${MAX_NODES:-${NNODES:-1}}"
exec elastic-harness launch --nnodes "${MIN_NODES:-1}:$most" --store "$STORE" --run-id "$RUN_ID" \
    --nproc-per-node "${NPROC_PER_NODE:-auto}" ${NODE_NAME:+--node-name "$NODE_NAME"} ${NODE_HOST:+--host "$NODE_HOST"} "$@"
