"""One experiment in simulated time: from its config to its record."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from typing import Any

import simpy

from ..analysis.record import Decision, LedgerRow, Record, Span, comm_means, iteration_stats, new_result
from ..conf.model_spec import ModelSpec, parameters
from ..conf.schema import Backend, ClusterConf, ExperimentConf, Precision
from ..policies.comm import CommPolicy, Placement, build_comm
from ..policies.mesh import Mesh
from .collectives import Collectives, PerStep
from .constants import with_fixed_costs
from .costs import Costs, with_value
from .engine import Decisions, Engine, Weights
from .executor import Executor, Segment, Timing
from .folded import Folded
from .ledger import Ledger, RankClass, rank_classes
from .machine import ARRIVAL_SKEW_NS, Machine
from .memory import memory_bytes, out_of_memory
from .program import Program, Writer
from .rules import Blocking, CommThread, Streams
from .timeline import phases, spans
from .topology import TCP_LATENCY_NS, Topology

MAX_STEPWISE_RANKS = 64  # gloo: above, ranks that behave alike are simulated once
TIMELINE_STEPS = 3  # the timeline shows the first steps: two to warm up and one more


def simulate(
    experiment: ExperimentConf,
    *,
    spec: ModelSpec,
    policy: CommPolicy | None = None,
    resolved: Mapping[str, Any] | None = None,
    git_commit: str = "",
    fold: bool | None = None,
) -> Record:
    """Simulate `experiment.steps` training steps.

    Args:
        spec: The model's sizes.
        policy: Used instead of the one that `experiment.comm` describes.
        resolved: What the record keeps as the experiment; by default `experiment` as plain values.
        fold: Simulate ranks that behave alike once. None: on NCCL, and on gloo above 64 ranks.

    Returns:
        The record. Out of memory is a result: status `oom`, the reason in `error`, all figures given.

    Raises:
        ValueError: If the policy's plans cannot be carried out, or a key does not fit.
        RuntimeError: If ranks wait for each other for ever, naming the collective and the ranks.
    """
    run = _Run(experiment, spec, policy, fold)
    cluster = run.experiment.cluster
    nominal = run.simulate(cluster)
    bounds = [run.iteration_s(run.simulate(_guess(cluster, i))) for i in (0, 1)] if cluster.guesses else []
    return _record(run, nominal, bounds, resolved, git_commit)


def check_plans(experiment: ExperimentConf, *, spec: ModelSpec, policy: CommPolicy) -> None:
    """Refuse a policy whose plans cannot be carried out, without simulating anything.

    Raises:
        ValueError: Naming the plan and its step.
    """
    _Run(experiment, spec, policy, True)


def _guess(cluster: ClusterConf, which: int) -> ClusterConf:
    """All guessed inputs at their worst (0) or best (1)."""
    for key, (worst, best) in cluster.guesses.items():
        cluster = with_value(cluster, key, (worst, best)[which])
    return cluster


@dataclass(frozen=True, slots=True)
class _Simulated:
    costs: Costs
    machine: Machine
    timings: dict[int, list[Timing]]  # rank -> one for each segment


class _Run:
    """What is the same for every choice of guessed inputs: policy, programs, classes of ranks."""

    def __init__(
        self, experiment: ExperimentConf, spec: ModelSpec, policy: CommPolicy | None, fold: bool | None
    ) -> None:
        cluster = experiment.cluster
        self.warnings: tuple[str, ...] = ()
        if policy is None:
            policy, self.warnings = build_comm(
                experiment.comm, num_ranks=cluster.num_ranks, ranks_per_node=cluster.devices_per_node
            )
        self.policy = policy
        experiment = with_fixed_costs(experiment, spec, policy)
        self.experiment, self.spec = experiment, spec
        self.mesh = Mesh(cluster.num_ranks, cluster.devices_per_node, policy.hpz_size)
        nccl = cluster.backend is Backend.nccl
        self.folded = fold if fold is not None else nccl or cluster.num_ranks > MAX_STEPWISE_RANKS
        if nccl and experiment.comm.overlap:
            self.warnings += (
                "comm.overlap has no effect with cluster.backend=nccl, which overlaps by itself",
            )
        self._sharded = policy.placement is Placement.sharded
        self.decisions = Decisions(policy)
        train = experiment.train
        self.engine = Engine(
            decisions=self.decisions,
            mesh=self.mesh,
            units=parameters(spec),
            precision=experiment.precision,
            num_micro_batches=experiment.batch.accumulation,
            eval_batches=train.eval_batches,
            clip=self._sharded and (train.gradient_clipping > 0 or experiment.precision is Precision.fp16),
        )
        # bytes of each unit when it is gathered, as it goes on the wire
        parts = cluster.num_ranks if self._sharded else 1
        element = experiment.precision.element_bytes
        self.unit_bytes = {u.name: parts * sum(self.engine.segments(u)) * element for u in parameters(spec)}
        self.decided: list[list[tuple[str, str]]] = []  # for each segment
        self.segments = self._segments()
        self.codec_scale = self._codec_scale()

    def simulate(self, cluster: ClusterConf) -> _Simulated:
        """All segments on `cluster`.

        Folded, nothing is in flight between two segments and all streams are empty, so a segment takes the
        same time whenever it comes: each distinct program is simulated once and its timing shifted.
        """
        experiment = replace(self.experiment, cluster=cluster)
        costs = Costs(experiment, self.spec, self.policy)
        costs.codec_scale = self.codec_scale
        if not self.folded:
            machine, executor = self._executor(costs, range(cluster.num_ranks))
            return _Simulated(costs, machine, executor.run(self.segments))
        known: dict[int, Timing] = {}
        timings: list[Timing] = []
        now = 0
        for segment in self.segments:
            timing = known.get(id(segment.program))
            if timing is None:
                machine, executor = self._executor(costs, [0])
                timing = known[id(segment.program)] = executor.run([segment])[0][0]
            timings.append(timing.shifted(now) if len(timings) < TIMELINE_STEPS else _border(timing, now))
            now += timing.end_ns
        return _Simulated(costs, machine, {0: timings})

    def iteration_s(self, simulated: _Simulated) -> list[float]:
        """Time of each training step: from the last rank's end of what came before to its own last end."""
        times, before = [], 0
        for i, segment in enumerate(self.segments):
            end = max(timings[i].end_ns for timings in simulated.timings.values())
            if not segment.validation:
                times.append((end - before) / 1e9)
            before = end
        return times

    def _codec_scale(self) -> float:
        """What brings the probed cost of all codec work of a step to the one that was measured in its place."""
        measured_ns = self.experiment.cluster.host.codec_step_ns
        if not measured_ns:
            return 1.0
        costs = Costs(self.experiment, self.spec, self.policy)
        works = [part.work for item in self.segments[0].program.items for part in item.parts]
        probed_ns = sum(costs.ns(work) for work in works if work.kind in ("encode", "decode"))
        return measured_ns / probed_ns if probed_ns else 1.0

    def _executor(self, costs: Costs, ranks: Sequence[int]) -> tuple[Machine, Executor]:
        env = simpy.Environment()
        topology = Topology(costs.cluster, [0] if self.folded else None)
        machine = Machine(env, costs, topology, folded=self.folded)
        make: type[Folded] | type[PerStep] = Folded if self.folded else PerStep
        collectives: Collectives = make(machine, self.mesh)
        return machine, Executor(machine, collectives, ranks)

    def _segments(self) -> list[Segment]:
        """Programs are written once for each state of the weights that a segment can begin with."""
        written: dict[tuple[bool, tuple[str, ...]], tuple[Program, list[tuple[str, str]], Weights]] = {}
        segments = []
        weights = Weights()
        every = self.experiment.train.eval_every
        for iteration in range(self.experiment.steps):
            validates = every > 0 and (iteration + 1) % every == 0
            for validation in (False, True) if validates else (False,):
                key = (validation, weights.key())
                if key not in written:
                    written[key] = self._write(validation, weights)
                program, decided, after = written[key]
                weights = Weights(after.copies)
                segments.append(Segment(iteration, validation, program))
                self.decided.append(decided)
        return segments

    def _write(self, validation: bool, weights: Weights) -> tuple[Program, list[tuple[str, str]], Weights]:
        self.decisions.log = []
        after = Weights(weights.copies)
        write = self.engine.validation if validation else self.engine.training_step
        program = write(self._rules(), after)
        return program, self.decisions.log, after

    def _rules(self) -> Blocking:
        experiment = self.experiment
        costs = Costs(experiment, self.spec, self.policy)
        copies = self.unit_bytes if self._sharded and costs.engine_copies else {}
        writer = Writer(merge=not experiment.cluster.host.cores)
        if experiment.cluster.backend is Backend.nccl:
            return Streams(writer, copies, sharded=self._sharded)
        return (CommThread if experiment.comm.overlap else Blocking)(writer, copies)


def _border(timing: Timing, now: int) -> Timing:
    """`timing` shifted, without its items: enough for what comes after the timeline's steps."""
    return Timing(timing.start_ns + now, timing.end_ns + now, [], [])


def _record(
    run: _Run,
    nominal: _Simulated,
    bounds: Sequence[list[float]],
    resolved: Mapping[str, Any] | None,
    git_commit: str,
) -> Record:
    experiment = run.experiment
    result = new_result(
        "sim",
        resolved if resolved is not None else _plain(experiment),
        seed=experiment.seed,
        git_commit=git_commit,
    )
    classes = _classes(run)
    rows = Ledger(run.mesh).rows(run.segments, classes)
    times = run.iteration_s(nominal)
    stats = iteration_stats(times, experiment.warmup_steps)
    if bounds and stats["n"]:
        means = [iteration_stats(b, experiment.warmup_steps)["mean"] for b in bounds]
        stats["high"], stats["low"] = max(means), min(means)
    held = memory_bytes(experiment, run.spec, run.policy, list(run.unit_bytes.values()))
    error = out_of_memory(held, experiment.cluster.device.memory_bytes)
    result |= {
        "status": "ok" if error is None else "oom",
        "error": error,
        "warnings": list(run.warnings),
        "iteration_s": stats,
        "comm": comm_means(_training(rows), num_ranks=run.mesh.num_ranks, num_iterations=experiment.steps),
        "memory_bytes": held,
        "folded": run.folded,
        "classes": [{"rank": c.rank, "count": c.count, "ranks": [list(r) for r in c.ranks]} for c in classes],
        "guessed_inputs": _guessed_inputs(experiment.cluster),
        "fitted_constants": _fitted_constants(experiment.cluster),
        **_rates(run, nominal.costs, stats["mean"]),
        **_phases(run, nominal, classes),
    }
    return Record(result, rows, _decisions(run), _spans(run, nominal))


def _training(rows: Sequence[LedgerRow]) -> list[LedgerRow]:
    return [row for row in rows if row.phase != "eval"]


def _classes(run: _Run) -> tuple[RankClass, ...]:
    if not run.folded:
        return tuple(RankClass(r, 1, ((r, r + 1, 1),)) for r in range(run.mesh.num_ranks))
    programs = {id(s.program): s.program for s in run.segments}
    transfers = {id(i.transfer): i.transfer for p in programs.values() for i in p.items if i.transfer}
    return rank_classes(run.mesh, list(transfers.values()))


def _rates(run: _Run, costs: Costs, mean_s: float | None) -> dict[str, Any]:
    """Throughput and what a training would take; nulls where no step was timed."""
    experiment, cluster = run.experiment, run.experiment.cluster
    keys = ("tokens_per_s", "tflops_per_gpu", "tflops_per_gpu_hardware", "mfu")
    if not mean_s:
        return dict.fromkeys(keys)
    batch = experiment.batch
    sequence = batch.sequence or run.spec.sequence
    tokens_per_s = cluster.num_ranks * batch.micro * batch.accumulation * sequence / mean_s
    flop_per_s = costs.model_flop() / mean_s
    rates: dict[str, Any] = {
        "tokens_per_s": tokens_per_s,
        "tflops_per_gpu": flop_per_s / 1e12,
        "tflops_per_gpu_hardware": costs.hardware_flop() / mean_s / 1e12,
        "mfu": flop_per_s / (cluster.emulated_flops_per_s or cluster.device.flop_per_s),
    }
    if experiment.train.tokens:
        rates["time_to_train_s"] = experiment.train.tokens / tokens_per_s
        rates["gpu_hours"] = rates["time_to_train_s"] / 3600 * cluster.num_ranks
        price = cluster.device.price_per_hour
        rates["cost"] = rates["gpu_hours"] * price if price is not None else None
    return rates


def _fitted_constants(cluster: ClusterConf) -> list[dict[str, Any]]:
    """Constants that were chosen to agree with measurements, and on which ones; probed costs are not among them."""
    if cluster.backend is not Backend.gloo:
        return []
    return [
        {
            "name": "sim.topology.TCP_LATENCY_NS",
            "value": TCP_LATENCY_NS,
            "rows": "gloo's collectives of 4-16 MiB, 4 and 8 ranks, 100-500 Mbit/s, on a shaped local cluster",
        },
        {
            "name": "sim.machine.ARRIVAL_SKEW_NS",
            "value": ARRIVAL_SKEW_NS,
            "rows": "gloo's all-gather of 800 kB between 2 ranks at 100 Mbit/s",
        },
    ]


def _phases(run: _Run, nominal: _Simulated, classes: Sequence[RankClass]) -> dict[str, Any]:
    """Of the last training step whose items were kept."""
    steps = [i for i, s in enumerate(run.segments) if not s.validation]
    whole = [i for i in steps if all(timings[i].starts_ns for timings in nominal.timings.values())]
    at = whole[-1]
    end = max(timings[at].end_ns for timings in nominal.timings.values())
    by_rank = {
        rank: phases(run.segments[at], timings[at], until_ns=end).seconds()
        for rank, timings in nominal.timings.items()
    }
    ranks = [{"rank": c.rank, "count": c.count, **by_rank.get(c.rank, by_rank[0])} for c in classes]
    total = run.mesh.num_ranks
    mean = {key: sum(r[key] * r["count"] for r in ranks) / total for key in next(iter(by_rank.values()))}
    return {"phases_s": mean, "ranks": ranks}


def _decisions(run: _Run) -> list[Decision]:
    """Of rank 0: all ranks run one program, so they decide alike."""
    return [
        Decision(0, segment.iteration, event, action)
        for segment, decided in zip(run.segments, run.decided, strict=True)
        for event, action in decided
    ]


def _spans(run: _Run, nominal: _Simulated) -> list[Span]:
    shares = nominal.machine.shares_cores
    return [
        span
        for rank, timings in nominal.timings.items()
        for segment, timing in zip(run.segments[:TIMELINE_STEPS], timings, strict=False)
        for span in spans(rank, segment, timing, nominal.costs, shares_cores=shares)
    ]


def _guessed_inputs(cluster: ClusterConf) -> list[dict[str, Any]]:
    guessed = []
    for key, (worst, best) in sorted(cluster.guesses.items()):
        value: Any = cluster
        for name in key.split("."):
            value = getattr(value, name)
        guessed.append({"key": f"cluster.{key}", "value": value, "worst": worst, "best": best})
    return guessed


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
