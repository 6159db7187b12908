"""The script that starts a launch folder's ranks on a cluster: under torchrun by hand, or through Slurm."""

import re
import shlex
from pathlib import Path

from ..conf.schema import Backend, ExperimentConf, Launch

_COMMON = """\
export PYTHONSAFEPATH=1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
"""

_TORCHRUN = """\
#!/usr/bin/env bash
# {title}
# Start it once on each of the {nodes} nodes, all of which must see this folder; RDZV_HOST is the name or
# address of one of them:
#   RDZV_HOST=node0 {script}
# twinbed must be installed on the nodes: activate its environment first, or set PYTHON to its interpreter.
set -euo pipefail
FOLDER=${{TWINBED_FOLDER:-{folder}}}
{common}exec {torchrun} \\
    --nnodes={nodes} --nproc-per-node={per_node} --max-restarts=0 \\
    --rdzv-backend=c10d --rdzv-id={job} \\
    --rdzv-endpoint="${{RDZV_HOST:?set it to the name of one of the nodes}}:${{RDZV_PORT:-29400}}" \\
    -m twinbed.runtime.worker "$FOLDER"
"""

_SLURM = """\
#!/usr/bin/env bash
# {title}
# Submit it from any folder; all nodes must see the run's folder:
#   sbatch {script}
# twinbed must be installed on the nodes: activate its environment first, or set PYTHON to its interpreter.
#SBATCH --job-name={job}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{devices}#SBATCH --output={folder}/slurm-%j.log
set -euo pipefail
FOLDER=${{TWINBED_FOLDER:-{folder}}}
{common}HEAD="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
exec srun --kill-on-bad-exit=1 {torchrun} \\
    --nnodes={nodes} --nproc-per-node={per_node} --max-restarts=0 \\
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$HEAD:${{RDZV_PORT:-29400}}" \\
    -m twinbed.runtime.worker "$FOLDER"
"""


_SLURM_CYCLIC = """\
#!/usr/bin/env bash
# {title}
# Submit it from any folder; all nodes must see the run's folder:
#   sbatch {script}
# twinbed must be installed on the nodes: activate its environment first, or set PYTHON to its interpreter.
# Slurm places the ranks, and not torchrun, which numbers them node by node: cluster.rank_order=cyclic.
#SBATCH --job-name={job}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={per_node}
{devices}#SBATCH --output={folder}/slurm-%j.log
set -euo pipefail
FOLDER=${{TWINBED_FOLDER:-{folder}}}
{common}MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export MASTER_ADDR MASTER_PORT="${{RDZV_PORT:-29400}}" LOCAL_WORLD_SIZE={per_node}
exec srun --kill-on-bad-exit=1 --distribution=cyclic bash -c '
    export RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID" WORLD_SIZE="$SLURM_NTASKS"
    exec "${{PYTHON:-python3}}" -m twinbed.runtime.worker "$0"' "$FOLDER"
"""


def write_script(folder: Path, experiment: ExperimentConf) -> Path:
    """Write `launch.sh` (launch=torchrun) or `launch.sbatch` (launch=slurm) into the run's folder.

    It runs the cases of the folder's launch.json.

    Raises:
        ValueError: The launch needs no script.
        OSError: The folder cannot be written.
    """
    path = folder.resolve() / ("launch.sbatch" if experiment.launch is Launch.slurm else "launch.sh")
    path.write_text(script_text(path, experiment), encoding="utf-8")
    path.chmod(0o755)
    return path


def script_text(path: Path, experiment: ExperimentConf) -> str:
    """What `write_script` writes to `path`."""
    cluster = experiment.cluster
    if experiment.launch is Launch.local:
        raise ValueError("launch=local starts the ranks here; a script is for ['torchrun', 'slurm']")
    per_node = cluster.devices_per_node
    gpus = cluster.backend is Backend.nccl
    values = {
        "title": re.sub(
            r"[^\w.,:() -]",
            "_",
            f"twinbed: {experiment.model.name}, {experiment.comm.name}, {cluster.nodes} x {per_node} ranks "
            f"({cluster.name})",
        ),
        "nodes": cluster.nodes,
        "per_node": per_node,
        "job": "twinbed-" + re.sub(r"[^\w.-]", "_", experiment.comm.name),
        "folder": shlex.quote(str(path.parent)),
        "script": shlex.quote(str(path)),
        "devices": f"#SBATCH --gpus-per-node={per_node}\n"
        if gpus
        else f"#SBATCH --cpus-per-task={1 if cluster.placement.cyclic else per_node}\n",
        "common": _COMMON,
        # torchrun by another name: that one need not be on the PATH
        "torchrun": '"${PYTHON:-python3}" -m torch.distributed.run',
    }
    if experiment.launch is Launch.torchrun:
        return _TORCHRUN.format(**values)
    return (_SLURM_CYCLIC if cluster.placement.cyclic else _SLURM).format(**values)
