"""Save and resume through torch.distributed.checkpoint. Finding a checkpoint needs no torch.

A checkpoint is written to a folder of another name, completed by its manifest, and then renamed: what is
called `step_<n>` is whole. All ranks must see the same folder.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..analysis.record import write_text
from ..conf.compose import model_spec
from ..conf.schema import ExperimentConf, ParallelConf
from ..policies.comm import Placement, build_comm
from ..policies.layout import replicas_of

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner

CHECKPOINTS = "checkpoints"
_MANIFEST = "twinbed.json"
_VERSION = 3
_BEFORE_LAYOUTS = 2  # without `parallel`, and else the same
_FULL_BYTES = 64 << 10  # less is free where a write has failed: the disk is full


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    folder: Path
    step: int  # optimizer steps done
    loss_scale: dict[str, float] | None
    model: dict[str, Any]  # the spec's fields
    optimizer: str
    placement: str  # where weights lived (policies.comm.Placement)
    parallel: dict[str, Any]  # axes that cut the model, larger than 1; {} if none does
    files: dict[str, int]  # all but the manifest, with their sizes in bytes


def find_checkpoint(path: Path, said: str = "train.resume_from") -> Checkpoint:
    """The checkpoint in `path`: a `step_<n>` folder, or the latest below a run's or a `checkpoints` folder.

    Args:
        said: What the user gave the path as.

    Raises:
        ValueError: There is none, or its manifest is broken.
    """
    for where in (path, path / CHECKPOINTS):
        if (where / _MANIFEST).is_file():
            return _read_manifest(where)
        steps = sorted(p.parent for p in where.glob(f"step_*/{_MANIFEST}"))
        if steps:
            return _read_manifest(steps[-1])
    raise ValueError(f"{said}={str(path)!r}: holds no whole checkpoint (step_<n>/{_MANIFEST})")


def check_resume(experiment: ExperimentConf) -> None:
    """Refuse a checkpoint that the run cannot go on from, before any process starts.

    Raises:
        ValueError: There is none in `train.resume_from`, a file of it is gone or cut off, it is of another
            model, optimizer or placement of the weights, or the run would have no steps left.
    """
    if experiment.train.resume_from is None:
        return
    found = find_checkpoint(Path(experiment.train.resume_from))
    where = f"train.resume_from={experiment.train.resume_from!r}"
    spec = _plain(asdict(model_spec(experiment)))
    others = [name for name in spec if name != "name" and spec[name] != found.model.get(name)]
    if others:
        key = others[0]
        raise ValueError(
            f"{where}: its model has {key}={found.model.get(key)!r}; model.{key}={spec[key]!r} here"
        )
    if found.optimizer != experiment.optimizer.name:
        raise ValueError(
            f"{where}: written with optimizer={found.optimizer}; optimizer={experiment.optimizer.name} here"
        )
    placement = _placement(experiment)
    if (found.placement == Placement.sharded.value) != (placement == Placement.sharded.value):
        raise ValueError(
            f"{where}: written with {found.placement} weights; comm={experiment.comm.name} keeps them {placement} "
            "here, and optimizer states of the one do not fit the other; go on with a policy that keeps them "
            f"{found.placement}"
        )
    _check_files(found, where)
    if found.step >= experiment.steps:
        raise ValueError(f"{where}: {found.step} steps are done; steps={experiment.steps} must be more")


def _placement(experiment: ExperimentConf) -> str:
    seen = replicas_of(experiment)
    policy, _ = build_comm(experiment.comm, num_ranks=seen.num_ranks, ranks_per_node=seen.ranks_per_node)
    return policy.placement.value


def _parallel(experiment: ExperimentConf) -> dict[str, Any]:
    """What cuts the model, so that only the same layout can read a checkpoint; replicas may be more or fewer."""
    conf, usual = experiment.parallel, ParallelConf()
    if conf.ranks_a_replica == 1:
        return {}
    keys = ("pipeline", "virtual_stages", "tensor", "tensor_mode", "depth", "stage_layers")
    return {key: getattr(conf, key) for key in keys if getattr(conf, key) != getattr(usual, key)}


def _check_files(found: Checkpoint, where: str) -> None:
    for name, nbytes in found.files.items():
        path = found.folder / name
        try:
            present = path.stat().st_size
        except OSError as err:
            raise ValueError(f"{where}: {path} cannot be read: {err.strerror or type(err).__name__}") from err
        if present != nbytes:
            raise ValueError(f"{where}: {path} has {present} bytes, but {nbytes} were written: it is damaged")


class Stateful(Protocol):
    """What of a communication engine a checkpoint needs."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    @property
    def place(self) -> str: ...

    def named_parameters(self) -> "Mapping[str, torch.nn.Parameter]":
        """What the optimizer steps, in its order."""
        ...

    def local_part(self, name: str, whole: "torch.Tensor") -> "torch.Tensor":
        """This rank's part of what lies like the parameter of that name; where it is sharded, of all its replicas."""
        ...


def save_checkpoint(
    folder: Path,
    *,
    step: int,
    experiment: ExperimentConf,
    engine: Stateful,
    optimizer: "torch.optim.Optimizer | None",
    loss_scale: Mapping[str, float] | None,
    rank: int,
    planner: "SavePlanner | None" = None,
) -> Path:
    """Write `folder`/step_<n>; to be called on all ranks.

    Args:
        planner: Fetches the tensors that lie elsewhere; torch's own by default.

    Raises:
        RuntimeError: A rank could not write its part; nothing is then named `step_<n>`.
    """
    import torch.distributed as dist
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    final = folder / f"step_{step:08d}"
    partial = folder / f".{final.name}.partial"
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    state = {"model": engine.state_dict(), "optimizer": _optimizer_state(optimizer, engine.place)}
    try:
        save(state, checkpoint_id=partial, planner=planner)
    except CheckpointException as err:  # a BaseException, which nobody expects
        full = _full_disk(partial)
        said = _first_line(err)
        raise RuntimeError(f"checkpoint {final} cannot be written: {full}{said}") from err
    if rank == 0:
        manifest = {
            "version": _VERSION,
            "step": step,
            "loss_scale": dict(loss_scale) if loss_scale is not None else None,
            "model": asdict(model_spec(experiment)),
            "optimizer": experiment.optimizer.name,
            "placement": _placement(experiment),
            "parallel": _parallel(experiment),
            "files": {path.name: path.stat().st_size for path in sorted(partial.iterdir()) if path.is_file()},
        }
        write_text(partial / _MANIFEST, json.dumps(manifest, indent=1) + "\n")
        shutil.rmtree(final, ignore_errors=True)  # of an earlier run that got as far
        partial.rename(final)
    return final


def load_checkpoint(
    checkpoint: Checkpoint,
    *,
    experiment: ExperimentConf,
    engine: Stateful,
    optimizer: "torch.optim.Optimizer | None",
    planner: "LoadPlanner | None" = None,
) -> None:
    """Bring weights and optimizer states of all ranks to where the checkpoint was taken.

    Of another layout than this run's (`is_recut`) they are put together and cut anew.

    Args:
        experiment: Of this run.
        planner: Puts tensors where they lie, if not into the engine's own; torch's by default.

    Raises:
        RuntimeError: It cannot be read, or lacks what this run needs.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    if is_recut(checkpoint, experiment):
        _load_recut(checkpoint, experiment, engine, optimizer)
        return
    state = {"model": engine.state_dict(), "optimizer": _optimizer_state(optimizer, engine.place)}
    try:
        load(state, checkpoint_id=checkpoint.folder, planner=planner)
    except CheckpointException as err:
        raise RuntimeError(f"checkpoint {checkpoint.folder} cannot be read: {_first_line(err)}") from err
    if planner is None:
        engine.load_state_dict(state["model"])


def is_recut(checkpoint: Checkpoint, experiment: ExperimentConf) -> bool:
    """Whether a run under another layout than the checkpoint's goes on from it."""
    return checkpoint.parallel != _parallel(experiment)


def _load_recut(
    checkpoint: Checkpoint,
    experiment: ExperimentConf,
    engine: Stateful,
    optimizer: "torch.optim.Optimizer | None",
) -> None:
    from torch.distributed.checkpoint.api import CheckpointException

    from .layout.recut import WrittenLayout, read_recut

    written = WrittenLayout(
        checkpoint.folder,
        checkpoint.parallel,
        model_spec(experiment),
        replicated=checkpoint.placement != Placement.sharded.value,
    )
    state = engine.state_dict()
    prefix = f"{engine.place}/" if engine.place else ""
    try:
        read_recut(
            written,
            model={name.removeprefix(prefix): tensor for name, tensor in state.items()},
            parameters=engine.named_parameters(),
            optimizer=optimizer,
            cut=engine.local_part,
        )
    except CheckpointException as err:
        raise RuntimeError(f"checkpoint {checkpoint.folder} cannot be read: {_first_line(err)}") from err
    engine.load_state_dict(state)


def prepare_optimizer_state(optimizer: "torch.optim.Optimizer | None") -> None:
    """Make the states that the first step would make, so that they can be loaded, and counted, before it."""
    import torch

    from .optim.trust import TrustRatioOptimizer

    if optimizer is None:
        return
    if isinstance(optimizer, TrustRatioOptimizer):
        optimizer.prepare_states()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if isinstance(optimizer, torch.optim.AdamW):
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            elif group.get("momentum"):
                state["momentum_buffer"] = torch.zeros_like(parameter)


def _optimizer_state(optimizer: "torch.optim.Optimizer | None", place: str) -> dict[str, Any]:
    """The state tensors themselves, so that loading fills them, by the parameter's place on this rank and the rank's in
    the layout.
    """
    if optimizer is None:
        return {}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    prefix = f"{place}/" if place else ""
    return {f"{prefix}{i}": dict(optimizer.state[parameter]) for i, parameter in enumerate(parameters)}


def _read_manifest(folder: Path) -> Checkpoint:
    path = folder / _MANIFEST
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["version"] not in (_BEFORE_LAYOUTS, _VERSION):
            raise ValueError(f"version {values['version']}, must be {_BEFORE_LAYOUTS} or {_VERSION}")
        return Checkpoint(
            folder,
            step=int(values["step"]),
            loss_scale=values["loss_scale"],
            model=dict(values["model"]),
            optimizer=str(values["optimizer"]),
            placement=Placement(values["placement"]).value,
            parallel=dict(values["parallel"] if values["version"] == _VERSION else {}),
            files={str(name): int(nbytes) for name, nbytes in dict(values["files"]).items()},
        )
    except KeyError as err:
        raise ValueError(f"{path}: broken manifest of a checkpoint: {err} is missing") from err
    except (OSError, TypeError, ValueError) as err:
        raise ValueError(f"{path}: broken manifest of a checkpoint: {err}") from err


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """As JSON would give it back: tuples are lists."""
    plain: dict[str, Any] = json.loads(json.dumps(values))
    return plain


def _full_disk(folder: Path) -> str:
    """Says that the disk is full, if it is: torch's writer may only say that a position is not what it expects."""
    try:
        free_bytes = shutil.disk_usage(folder).free
    except OSError:
        return ""
    return f"No space left on the disk ({free_bytes:,} bytes are free): " if free_bytes < _FULL_BYTES else ""


def _first_line(err: BaseException) -> str:
    causes = getattr(err, "failures", {})
    for rank, failure in sorted(causes.items()):
        return f"rank {rank}: {_line(failure[0])}"
    return _line(err)


def _line(err: BaseException) -> str:
    """The type too: some errors, such as that of a file that ends early, say nothing else."""
    said = str(err).strip().split("\n")[0]
    return f"{type(err).__name__}: {said}" if said else type(err).__name__
