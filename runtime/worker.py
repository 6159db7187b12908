"""One rank: `python -m twinbed.runtime.worker FOLDER`, started by our launcher or by torchrun.

It runs the cases of FOLDER/launch.json one after the other, and never composes a config.
"""

import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ..analysis.record import RESULT
from ..conf.compose import load_experiment
from ..conf.placement import Placement
from ..conf.schema import Backend
from .case import CALIBRATE, TRAIN, Case, LaunchFile, finished_marker, read_launch
from .failure import Failure, Heartbeat, Kind, describe_failure, write_failure

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]

    from ..kernels import Prepared
    from ..policies.mesh import Mesh
    from .groups import Groups

_START_TIMEOUT_S = 120.0  # ranks import torch at different speeds
_PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class WorkerContext:
    """What a case is given on each rank."""

    folder: Path  # of the launch
    rank: int
    num_ranks: int
    local_rank: int
    ranks_per_node: int
    device: "torch.device"
    heartbeat: Heartbeat
    git_commit: str
    timeout: timedelta  # of a collective
    placement: Placement | None = None  # None: block order
    kernels: "Prepared | None" = None  # what quantizes, and what its first call cost
    case_index: int = 0
    _groups: "dict[Mesh, Groups]" = field(default_factory=dict)

    @property
    def node(self) -> int:
        return self.rank // self.ranks_per_node if self.placement is None else self.placement.node(self.rank)

    def case_folder(self, case: Case) -> Path:
        return self.folder / case.folder

    def groups(self, mesh: "Mesh") -> "Groups":
        """The process groups of `mesh`, made once a launch; to be asked for on all ranks."""
        from .groups import Groups

        if mesh not in self._groups:
            self._groups[mesh] = Groups(mesh, timeout=self.timeout)
        return self._groups[mesh]

    def beat(self, step: int) -> None:
        """Say that `step` begins."""
        self.heartbeat.beat(case=self.case_index, step=step)


CaseFunction = Callable[[Case, WorkerContext], None]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run all cases; the process ends here, without Python's and torch's slow farewell."""
    die_with_parent()
    faulthandler.register(signal.SIGUSR1)  # the launcher asks a rank that hangs where it is
    (folder,) = (Path(argument) for argument in (sys.argv[1:] if arguments is None else arguments))
    rank = int(os.environ["RANK"])
    heartbeat: Heartbeat | None = None
    launch: LaunchFile | None = None
    try:
        launch = read_launch(folder)
        heartbeat = Heartbeat(folder, rank)
        _run(folder, rank, launch, heartbeat)
    except BaseException as err:
        _report(err, folder, rank, launch, heartbeat)
        _leave(1)
    _leave(0)


def _run(folder: Path, rank: int, launch: LaunchFile, heartbeat: Heartbeat) -> None:
    import torch
    import torch.distributed as dist

    from ..kernels import prepare, prepare_gpu
    from .memory import use_huge_pages

    experiments = [load_experiment(case.experiment) for case in launch.cases]
    if any(experiment.offload.name == "disk" for experiment in experiments):
        use_huge_pages()
    world, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    for case, experiment in zip(launch.cases, experiments, strict=True):
        if experiment.cluster.num_ranks != world:
            raise ValueError(
                f"case {case.name}: cluster.nodes={experiment.cluster.nodes} x cluster.devices_per_node="
                f"{experiment.cluster.devices_per_node} must be the {world} ranks that were started"
            )
    nccl = {experiment.cluster.backend for experiment in experiments} == {Backend.nccl}
    device = torch.device("cuda", local) if nccl else torch.device("cpu")
    if nccl:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # ranks share the cores
    prepared = prepare()
    if nccl:  # what lies in the host's memory still takes the CPU's
        first_s = prepared.seconds
        prepared = prepare_gpu(device)
        prepared = replace(prepared, seconds=first_s + prepared.seconds)
    if rank == 0 and "TWINBED_LAUNCHER_PID" not in os.environ:  # what the launcher does elsewhere
        for index in range(len(launch.cases)):
            finished_marker(folder, index).unlink(missing_ok=True)
        for old in folder.glob("failure.*.json"):
            old.unlink()
        for case in launch.cases:
            (folder / case.folder).mkdir(parents=True, exist_ok=True)
            (folder / case.folder / RESULT).unlink(missing_ok=True)
    timeout = timedelta(seconds=max(experiment.train.timeout_s for experiment in experiments))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if nccl else "gloo",
        store=_store(rank, world),
        rank=rank,
        world_size=world,
        timeout=timeout,
        device_id=device if nccl else None,
    )
    context = WorkerContext(
        folder=folder,
        rank=rank,
        num_ranks=world,
        local_rank=local,
        ranks_per_node=experiments[0].cluster.devices_per_node,
        device=device,
        placement=experiments[0].cluster.placement,
        heartbeat=heartbeat,
        git_commit=launch.git_commit,
        timeout=timeout,
        kernels=prepared,
    )
    for index, case in enumerate(launch.cases):
        context.case_index = index
        context.beat(-1)
        context.ranks_per_node = experiments[index].cluster.devices_per_node
        _function(case.kind)(case, context)
        gc.collect()  # a case's model and its hooks hold each other
        if rank == 0:
            finished_marker(folder, index).touch()
    dist.barrier()  # rank 0 holds the store
    dist.destroy_process_group()


def _function(kind: str) -> CaseFunction:
    if kind == TRAIN:
        from .trainer import run_training

        return run_training
    if kind == CALIBRATE:
        from .calibrate import run_calibration

        return run_calibration
    where, _, name = kind.rpartition(":")
    if where.endswith(".py"):
        spec = importlib.util.spec_from_file_location(f"twinbed_case_{Path(where).stem}", where)
        if spec is None or spec.loader is None:
            raise ValueError(f"kind={kind!r}: cannot read {where}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(where)
    function: CaseFunction = getattr(module, name)
    return function


def _store(rank: int, world: int) -> "Store":
    from torch.distributed import TCPStore, rendezvous  # type: ignore[attr-defined]

    timeout = timedelta(seconds=_START_TIMEOUT_S)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's agent holds the store
        store: Store = next(rendezvous("env://", rank, world, timeout=timeout))[0]
        return store
    handed = os.environ.get("TWINBED_STORE_FD")
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        return TCPStore(
            address,
            port,
            world,
            is_master=rank == 0,
            timeout=timeout,
            master_listen_fd=int(handed) if handed is not None else None,
        )
    except RuntimeError as err:
        if "EADDRINUSE" in str(err):
            raise RuntimeError(f"MASTER_PORT={port} is in use on {address}; set another one") from err
        raise


def _report(
    error: BaseException, folder: Path, rank: int, launch: LaunchFile | None, heartbeat: Heartbeat | None
) -> None:
    case_index, step = (heartbeat.case, heartbeat.step) if heartbeat is not None else (-1, -1)
    cases = launch.cases if launch is not None else ()
    name = cases[case_index].name if 0 <= case_index < len(cases) else ""
    failure = describe_failure(error, rank=rank, case=name, step=step)
    write_failure(folder, failure)
    where = f" in step {step} of {name}" if step >= 0 else f" in {name}" if name else " while starting"
    sys.stderr.write(f"{failure.trace}rank {rank} failed{where}: {failure.error}\n")
    if "TWINBED_LAUNCHER_PID" not in os.environ and launch is not None and failure.kind <= Kind.timeout:
        _write_failed_results(folder, launch, failure)


def _write_failed_results(folder: Path, launch: LaunchFile, failure: Failure) -> None:
    """Under torchrun nobody else does."""
    from .failure import Cause
    from .launcher import write_failed_result

    cause = Cause(failure.rank, f"rank {failure.rank} failed in step {failure.step}: {failure.error}")
    for index, case in enumerate(launch.cases):
        if case.kind == TRAIN and not finished_marker(folder, index).exists():
            try:
                write_failed_result(folder / case.folder, case, cause, git_commit=launch.git_commit)
            except OSError as err:
                sys.stderr.write(f"{err}\n")


def die_with_parent() -> None:
    """Nothing is left behind if what watches over this process is killed. torchrun sees to its own children."""
    launcher = os.environ.get("TWINBED_LAUNCHER_PID")
    if launcher is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(launcher):  # it died before the call
        os._exit(1)


def _leave(code: int) -> NoReturn:
    """At once: destroying groups whose peers are gone can hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
