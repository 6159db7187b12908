#!/usr/bin/env bash
# twinbed: gpt_tiny, zeropp, 2 x 8 ranks (local_2x2)
# Submit it from any folder; all nodes must see the run's folder:
#   sbatch '/runs/it'"'"'s here/launch.sh'
# twinbed must be installed on the nodes: activate its environment first, or set PYTHON to its interpreter.
#SBATCH --job-name=twinbed-zeropp
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --output='/runs/it'"'"'s here'/slurm-%j.log
set -euo pipefail
FOLDER=${TWINBED_FOLDER:-'/runs/it'"'"'s here'}
export PYTHONSAFEPATH=1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
HEAD="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
exec srun --kill-on-bad-exit=1 "${PYTHON:-python3}" -m torch.distributed.run \
    --nnodes=2 --nproc-per-node=8 --max-restarts=0 \
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$HEAD:${RDZV_PORT:-29400}" \
    -m twinbed.runtime.worker "$FOLDER"
