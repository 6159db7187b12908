"""How long each unit computes, and how long quantizing takes, between collectives: what the simulator replays."""

import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..analysis.record import Span, write_text
from ..conf.compose import load_experiment, model_spec
from ..conf.schema import ExperimentConf
from ..policies.partition import even_split
from .case import Case
from .intervals import length_ns, union
from .laps import PIPELINE_LAP, Lap
from .ledger import BESIDE, QUANTIZE_STREAM
from .trainer import Trainer
from .worker import WorkerContext

CALIBRATION = "calibration.json"
_WARMUP, _ITERATIONS = 2, 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Means over ranks that all compute at once.

    Attributes:
        compute_ns: "forward/root", "forward/block.0", ..., "backward/root", ...: of one micro-batch; "step":
            of one optimizer step (data, clipping, optimizer). FSDP's own copies are in them, quantizing is not.
            Of a layout, whose root may lie on two stages, "embed" and "head" in place of "root".
        quantize_ns: All encoding and decoding of one optimizer step, in its place: caches are as cold, and
            buffers as new, as in a run.
        iteration_ns: The same iterations by the clock, start to end, without the collectives.
        micro_batches: Of a step.
        spread: (slowest - fastest) / mean of the iterations that were used.
    """

    compute_ns: dict[str, int]
    quantize_ns: int
    iteration_ns: int
    micro_batches: int
    spread: float

    @property
    def sum_ns(self) -> int:
        """An iteration put together from its parts."""
        once = self.compute_ns.get("step", 0)
        return once + self.quantize_ns + self.micro_batches * (sum(self.compute_ns.values()) - once)


def run_calibration(case: Case, context: WorkerContext) -> None:
    """Calibrate and write `calibration.json` (rank 0)."""
    experiment = load_experiment(case.experiment)
    if context.rank == 0:
        sys.stderr.write(
            f"twinbed: {case.name}: measuring the computation of each unit between collectives\n"
        )
    found = calibrate(
        experiment,
        context,
        warmup=int(case.options.get("warmup", _WARMUP)),
        iterations=int(case.options.get("iterations", _ITERATIONS)),
        folder=context.case_folder(case),
    )
    if context.rank == 0:
        text = json.dumps(asdict(found), indent=1) + "\n"
        write_text(context.case_folder(case) / CALIBRATION, text)


def read_calibration(folder: Path) -> Calibration:
    """What `run_calibration` wrote.

    Raises:
        ValueError: There is none, or it is broken.
    """
    try:
        return Calibration(**json.loads((folder / CALIBRATION).read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as err:
        raise ValueError(f"{folder / CALIBRATION} cannot be read: {err}") from err


def calibrate(
    experiment: ExperimentConf, context: WorkerContext, *, warmup: int, iterations: int, folder: Path
) -> Calibration:
    """Run some steps of the same engine, and leave out what its collectives and waits for a disk take.

    To be called on all ranks.

    A layout's collectives all block meanwhile, so that each lap holds them whole. All ranks run at full speed, on an
    even split: the simulator knows of `cluster.slowdown` and of what balancing moves.

    Computation is measured in its place: cores that were idle begin slowly, those that carried traffic less so, and
    ranks that waited for each other compete for the cores together. A pause in place of a collective does not
    have that effect (a short one is 11 to 18% too fast, one as long as the collective 16 to 25% too slow). Of the
    iterations the half whose total time is nearest the middle counts, and parts are means over it: they add
    up to the iteration, which medians of parts would not.

    Args:
        warmup: Iterations before the first that counts.
        iterations: That are measured.
        folder: For what is offloaded to disk meanwhile, where offload.path does not say.
    """
    experiment = _evenly(_own_store(experiment))
    if experiment.offload.path is not None:  # what a kill left of an earlier one
        shutil.rmtree(Path(experiment.offload.path) / f"rank_{context.rank}", ignore_errors=True)
    trainer = Trainer(experiment, context, overlap=False, folder=folder, undisturbed=True)
    try:
        for number in range(warmup + iterations):
            dist.barrier()
            context.beat(number)
            trainer.step(trainer.first_step + number)
        laps, steps_ns = trainer.laps.laps, trainer.progress.steps_ns
        if experiment.parallel.ranks_a_replica > 1:
            laps = split_root(laps)
        spans = [span for span in trainer.ledger.spans if span.stream not in BESIDE]
    finally:
        if trainer.offload is not None:
            trainer.offload.finish()  # nobody goes on from it
        trainer.close()
    k = experiment.batch.accumulation
    own = _middle_half(laps, spans, steps_ns[warmup:], micro_batches=k)
    gathered: list[Any] = [None] * context.num_ranks
    dist.all_gather_object(gathered, own)
    return _mean(gathered, micro_batches=k, stages=experiment.parallel.pipeline)


def _own_store(experiment: ExperimentConf) -> ExperimentConf:
    """On the same disk as the run's, which is not touched."""
    offload = experiment.offload
    path = None if offload.path is None else str(Path(offload.path) / "calibration")
    return replace(experiment, offload=replace(offload, path=path, resume=False))


def _evenly(experiment: ExperimentConf) -> ExperimentConf:
    """With equal shares of sequences, and numbers of blocks as equal as can be: what a sequence and a block take."""
    balance, parallel = experiment.balance, experiment.parallel
    if balance.name == "batch":
        return replace(experiment, balance=replace(balance, name="none"))
    if balance.name == "layers":
        blocks = list(even_split(model_spec(experiment).layers, parallel.pipeline))
        return replace(experiment, parallel=replace(parallel, stage_layers=blocks))
    return experiment


def split_root(laps: Sequence[Lap]) -> list[Lap]:
    """The root's laps by the end that each is of: "forward/embed", "forward/head", and so backward.

    Of a pass the root comes first or last. A part of a pipeline that lacks an end has an empty lap of it.
    """
    found: list[Lap] = []
    before = ""  # the last unit's lap
    for lap in laps:
        direction, _, unit = lap.name.partition("/")
        if unit == "root":
            after_blocks = before.startswith(f"{direction}/block")
            end = "head" if after_blocks == (direction == "forward") else "embed"
            found.append(replace(lap, name=f"{direction}/{end}"))
        else:
            found.append(lap)
        before = lap.name if unit else ""  # "": between passes
    return found


def _middle_half(
    laps: Sequence[Lap], spans: Sequence[Span], steps_ns: Sequence[tuple[int, int]], *, micro_batches: int
) -> tuple[dict[str, float], float, float, float]:
    """(parts of a micro-batch and "step", quantizing of a step, iteration, spread), nanoseconds.

    A lap is its unit's computation once quantizing, collectives and waits are taken out of it. Those of a plan in
    chunks are under way at the same time, and while a chunk is quantized.
    """
    ranked = sorted(steps_ns, key=lambda step: step[1] - step[0])
    quarter = len(ranked) // 4
    kept = ranked[quarter : len(ranked) - quarter]
    parts: dict[str, float] = {}
    quantize, lengths = 0.0, []
    for start, end in kept:
        inside = [span for span in spans if span.start_ns >= start and span.end_ns <= end]
        codec = [span for span in inside if span.stream == QUANTIZE_STREAM]
        quantizing = _length_ns(codec)
        quantize += quantizing / len(kept)
        lengths.append(end - start - (_length_ns(inside) - quantizing))
        for lap in laps:
            if lap.start_ns < start or lap.end_ns > end or lap.name == PIPELINE_LAP:
                continue
            other = [s for s in inside if lap.start_ns <= s.start_ns < lap.end_ns]
            took = lap.end_ns - lap.start_ns - _length_ns(other)
            share = took if lap.name == "step" else took / micro_batches
            parts[lap.name] = parts.get(lap.name, 0.0) + share / len(kept)
    mean = sum(lengths) / len(lengths)
    return parts, quantize, mean, (max(lengths) - min(lengths)) / mean


def _length_ns(spans: Iterable[Span]) -> int:
    """Time in which at least one of them was under way."""
    return length_ns(union((span.start_ns, span.end_ns) for span in spans))


def _mean(
    ranks: Sequence[tuple[dict[str, float], float, float, float]], *, micro_batches: int, stages: int
) -> Calibration:
    """Of a pipeline each part is a mean over the ranks of the stage that has it; the root's two ends are added up."""
    names = dict.fromkeys(name for parts, _, _, _ in ranks for name in parts)
    n = len(ranks)
    have = {name: n if name == "step" else n // stages for name in names}
    return Calibration(
        compute_ns={
            name: round(sum(parts.get(name, 0.0) for parts, _, _, _ in ranks) / have[name]) for name in names
        },
        quantize_ns=round(sum(quantize for _, quantize, _, _ in ranks) / n),
        iteration_ns=round(sum(iteration for _, _, iteration, _ in ranks) / n),
        micro_batches=micro_batches,
        spread=max(spread for _, _, _, spread in ranks),
    )
