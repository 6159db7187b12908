"""One process under a memory limit of its own, for test_memory.py: limited.py MODE FOLDER CGROUP [ALLOWANCE].

It imports all it needs, takes what it then holds for its baseline, sets the limit to that and ALLOWANCE bytes, and
does MODE. It writes FOLDER/MODE.json.
"""

import json
import os
import sys
from pathlib import Path

CGROUP = Path(sys.argv[3])
FIRST_VERSION = (CGROUP / "memory.limit_in_bytes").exists()
(CGROUP / "cgroup.procs").write_text(str(os.getpid()))  # before anything is imported: charges do not move

import torch  # noqa: E402
import torch._dynamo  # noqa: E402  (FSDP2 imports it when it is first used)
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402

from twinbed.conf.compose import compose, load_experiment  # noqa: E402
from twinbed.conf.schema import OffloadConf  # noqa: E402
from twinbed.runtime.checkpoint import Checkpoint  # noqa: E402
from twinbed.runtime.failure import Heartbeat  # noqa: E402
from twinbed.runtime.memory import use_huge_pages  # noqa: E402
from twinbed.runtime.model import GPT  # noqa: E402
from twinbed.runtime.offload.generate import Generator, import_weights  # noqa: E402
from twinbed.runtime.trainer import Trainer  # noqa: E402
from twinbed.runtime.worker import WorkerContext  # noqa: E402

TRAINED = ["model.layers=16", "model.hidden=256", "model.heads=4", "model.vocab=256", "model.sequence=32"]
STREAMED = ["model.layers=16", "model.hidden=512", "model.heads=4", "model.vocab=256", "model.sequence=32"]
STEPS = 3


def main() -> None:
    mode, folder = sys.argv[1], Path(sys.argv[2])
    allowance = int(sys.argv[4]) if len(sys.argv) > 4 else None
    torch.set_num_threads(1)
    if mode == "train_disk":
        use_huge_pages()
    warm_up()
    baseline = held_bytes()
    if allowance is not None:
        limit = "memory.limit_in_bytes" if FIRST_VERSION else "memory.max"
        (CGROUP / limit).write_text(str(baseline + allowance))
    found = {
        "train": train,
        "train_disk": train,
        "save": save,
        "generate": generate,
        "generate_disk": generate,
    }[mode](folder, mode)
    peak = int((CGROUP / ("memory.max_usage_in_bytes" if FIRST_VERSION else "memory.peak")).read_text())
    result = {"baseline": baseline, "needed": peak - baseline, **found}
    (folder / f"{mode}.json").write_text(json.dumps(result))


def warm_up() -> None:
    """What torch makes at its first use belongs to the baseline."""
    x = torch.ones(64, 64, requires_grad=True)
    torch.nn.functional.gelu(x @ x).sum().backward()


def held_bytes() -> int:
    """Without the page cache, which the kernel can take back."""
    stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    used = int((CGROUP / ("memory.usage_in_bytes" if FIRST_VERSION else "memory.current")).read_text())
    return used - int(stat["active_file"]) - int(stat["inactive_file"])


def train(folder: Path, mode: str) -> dict[str, object]:
    store = folder / f"{mode}.store"
    store.unlink(missing_ok=True)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    experiment = load_experiment(
        compose(
            [
                "target=runtime",
                "cluster.nodes=1",
                "cluster.devices_per_node=1",
                "cluster.shaped=false",
                "model=gpt",
                *TRAINED,
                "comm=zero3",
                "precision=fp32",
                "data=synthetic",
                f"offload={'disk' if mode == 'train_disk' else 'none'}",
                f"steps={STEPS}",
            ]
        ).resolved
    )
    context = WorkerContext(
        folder=folder,
        rank=0,
        num_ranks=1,
        local_rank=0,
        ranks_per_node=1,
        device=torch.device("cpu"),
        heartbeat=Heartbeat(folder, 0),
        git_commit="",
        timeout=dist.default_pg_timeout,
    )
    trainer = Trainer(experiment, context, folder=folder)
    report = trainer.run(folder, name=mode)
    trainer.close()
    return {"loss": [step.loss.hex() for step in report.metrics]}


def spec():
    return compose(["target=sim", "model=gpt", *STREAMED]).spec


def checkpoint(folder: Path) -> Checkpoint:
    return Checkpoint(folder / "checkpoint", 0, None, {}, "adamw", "sharded", {}, {})


def save(folder: Path, mode: str) -> dict[str, object]:
    model = GPT(spec(), seed=0)
    with torch.no_grad():  # initial weights are small: every token would be the same
        for parameter in model.parameters():
            parameter.mul_(8)
    dcp.save({"model": dict(model.named_parameters())}, checkpoint_id=folder / "checkpoint", no_dist=True)
    return {"model_bytes": sum(4 * p.numel() for p in model.parameters())}


def generate(folder: Path, mode: str) -> dict[str, object]:
    store = import_weights(checkpoint(folder), spec(), folder / f"{mode}.weights")
    conf = OffloadConf(name="disk" if mode == "generate_disk" else "none")
    tokens = Generator(spec(), store, conf).generate(b"a prompt", 8)
    store.close()
    return {"tokens": tokens}


main()
