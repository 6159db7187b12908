#!/usr/bin/env bash
# twinbed: gpt_tiny, zeropp, 2 x 8 ranks (local_2x2)
# Start it once on each of the 2 nodes, all of which must see this folder; RDZV_HOST is the name or
# address of one of them:
#   RDZV_HOST=node0 '/runs/it'"'"'s here/launch.sh'
# twinbed must be installed on the nodes: activate its environment first, or set PYTHON to its interpreter.
set -euo pipefail
FOLDER=${TWINBED_FOLDER:-'/runs/it'"'"'s here'}
export PYTHONSAFEPATH=1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "${PYTHON:-python3}" -m torch.distributed.run \
    --nnodes=2 --nproc-per-node=8 --max-restarts=0 \
    --rdzv-backend=c10d --rdzv-id=twinbed-zeropp \
    --rdzv-endpoint="${RDZV_HOST:?set it to the name of one of the nodes}:${RDZV_PORT:-29400}" \
    -m twinbed.runtime.worker "$FOLDER"
