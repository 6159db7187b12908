"""One experiment in simulated time: from its config to its record."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any

import numpy as np

from ..analysis.record import Decision, Record, iteration_stats, means_of, new_result
from ..conf.balance_check import guessed_by_balance
from ..conf.model_spec import ModelSpec
from ..conf.offload_check import check_offload
from ..conf.schema import Backend, ClusterConf, Engine, ExperimentConf, Target
from ..policies.balance import BalancePolicy, BlockWork
from ..policies.comm import CommPolicy
from ..policies.offload import OffloadPolicy
from .costs import Costs, with_value
from .energy import energy_j
from .engines import EngineModel, Fsdp2, Setup
from .far import Way
from .goodput import goodput_of
from .ledger import RankClass, rank_classes
from .machine import ARRIVAL_SKEW_NS
from .memory import (
    at_most,
    convention,
    out_of_far_memory,
    out_of_memory,
    over_budget,
    peak,
    saved_bytes,
)
from .memory_clock import MemoryClock
from .record import SimulatedRecord, collector_paused
from .run import Run, Simulated
from .timeline import phases
from .topology import TCP_LATENCY_NS

# Begin keys of a cluster that only moves between near and far memory read
_FAR_KEYS = (
    "disk.",
    *(f"host.{key}" for key in ("memory_", "step_cores", "core_", "pcie_", "pageable_", "copy_")),
)


def make_engine(setup: Setup) -> EngineModel:
    """The model of `experiment.engine`; those that are not asked for are not imported."""
    makers: dict[Engine, Callable[[Setup], EngineModel]] = {
        Engine.fsdp2: _fsdp2,
        Engine.deepspeed_2023: _deepspeed,
        Engine.deepspeed: _deepspeed,
        Engine.megatron: _megatron,
    }
    check_offload(setup.experiment)
    if setup.experiment.balance.name == "batch":
        from .balance.batch_engine import UnevenBatches

        return UnevenBatches(setup, _fsdp2)
    which = setup.experiment.engine
    if which not in makers:
        raise ValueError(f"engine={which.value} is not simulated; use one of {[e.value for e in makers]}")
    return makers[which](setup)


def _fsdp2(setup: Setup) -> EngineModel:
    if setup.costs.laid is None:
        return Fsdp2(setup)
    from .layout.engine import LayoutEngine

    return LayoutEngine(setup)


def _deepspeed(setup: Setup) -> EngineModel:
    from .deepspeed.engine import DeepSpeed

    return DeepSpeed(setup)


def _megatron(setup: Setup) -> EngineModel:
    from .megatron.engine import Megatron

    return Megatron(setup)


def simulate(
    experiment: ExperimentConf,
    *,
    spec: ModelSpec,
    policy: CommPolicy | None = None,
    resolved: Mapping[str, Any] | None = None,
    git_commit: str = "",
    fold: bool | None = None,
    make_balance: Callable[[BlockWork], BalancePolicy] | None = None,
    balance_events: Sequence[Decision] | None = None,
) -> Record:
    """Simulate `experiment.steps` training steps.

    Args:
        spec: The model's sizes.
        policy: Used instead of the one that `experiment.comm` describes.
        resolved: What the record keeps as the experiment; by default `experiment` as plain values.
        fold: Simulate ranks that behave alike once. None: on NCCL, and on gloo above 64 ranks. False: every rank apart,
            and up to 64 of them every message.
        make_balance: Makes the balancing policy of a tensor group, in place of the one that `experiment.balance`
            describes.
        balance_events: Decisions of a run's record, whose events balancing policies are told in place of what is
            measured here. A tensor group that it has no events of is told what is measured.

    Returns:
        The record. Out of memory is a result: status `oom`, the reason in `error`, all figures given. So is a rank
        or link that fails (`cluster.failures`): status `failed`, who waits for whom in `error`, and the figures of
        the steps before it.

    Raises:
        ValueError: If the policy's plans cannot be carried out, or a key does not fit.
        RuntimeError: If ranks wait for each other for ever, naming the collective and the ranks.
    """
    try:
        with collector_paused():
            run = _run(experiment, spec, policy, fold, make_balance, balance_events)
            return _simulated(run, resolved, git_commit)
    except OverflowError as err:
        raise ValueError(
            "a step would take longer than can be counted: a bandwidth, rate or efficiency of the cluster is too "
            f"small, {_smallest(experiment.cluster)}"
        ) from err


def _run(
    experiment: ExperimentConf,
    spec: ModelSpec,
    policy: CommPolicy | None,
    fold: bool | None,
    make_balance: Callable[[BlockWork], BalancePolicy] | None,
    balance_events: Sequence[Decision] | None,
) -> Run:
    """Those that balance ranks are not imported where nothing is balanced."""
    if experiment.balance.of_tensor_ranks:
        from .balance.run import BalancedRun

        return BalancedRun(
            experiment, spec, policy, fold, make_engine, make_policy=make_balance, decisions=balance_events
        )
    if experiment.balance.name == "batch":
        from .balance.batch import BatchRun

        return BatchRun(experiment, spec, policy, fold, make_engine, balance_events or ())
    if experiment.balance.name == "layers":
        from .balance.stages import LayersRun

        return LayersRun(experiment, spec, policy, fold, make_engine, balance_events or ())
    return Run(experiment, spec, policy, fold, make_engine)


def _simulated(run: Run, resolved: Mapping[str, Any] | None, git_commit: str) -> Record:
    cluster = run.experiment.cluster
    nominal = run.simulate(cluster)
    bounds = []
    guesses = _guesses(run.experiment)
    if guesses and nominal.error is None:
        bounds = [run.iteration_s(run.simulate(_guess(cluster, guesses, i))) for i in (0, 1)]
    return _record(run, nominal, bounds, resolved, git_commit)


def _smallest(cluster: ClusterConf) -> str:
    """The rate that is the furthest below one a second, as `key=value`."""
    rates = {
        f"cluster.{group}{key}": found
        for group, owner in (
            ("inter_node.", cluster.inter_node),
            ("intra_node.", cluster.intra_node),
            ("device.", cluster.device),
            ("", cluster),
        )
        for key, found in vars(owner).items()
        if isinstance(found, float) and found > 0 and (key.endswith(("Bps", "per_s")) or "efficiency" in key)
    }
    key = min(rates, key=lambda key: rates[key])
    return f"as {key}={rates[key]:g}"


def check_plans(experiment: ExperimentConf, *, spec: ModelSpec, policy: CommPolicy) -> None:
    """Refuse a policy whose plans cannot be carried out, without simulating anything.

    Raises:
        ValueError: Naming the plan and its step; or, with target=both, that the ledger would be too long.
    """
    train = replace(experiment.train, eval_every=min(experiment.train.eval_every, 1))
    few = replace(experiment, train=train, steps=2)  # programs repeat themselves from the second step on
    run = Run(few, spec, policy, None, make_engine)
    if experiment.target is Target.both:
        run.check_size(run.segments[0].programs, experiment.steps)


def new_offload_policy(
    experiment: ExperimentConf, *, spec: ModelSpec, policy: CommPolicy
) -> OffloadPolicy | None:
    """What decides which states lie far, as before its first event: to replay a run's log; None with offload=none."""
    offload = make_engine(Setup(experiment, spec, policy, Costs(experiment, spec, policy))).offload
    return offload.policy if offload is not None else None


def _guesses(experiment: ExperimentConf) -> dict[str, Any]:
    """Guessed inputs, without those that only offload reads where nothing is offloaded."""
    guesses = experiment.cluster.guesses
    if experiment.offload.active:
        return guesses
    return {key: span for key, span in guesses.items() if not key.startswith(_FAR_KEYS)}


def _guess(cluster: ClusterConf, guesses: Mapping[str, Any], which: int) -> ClusterConf:
    """All guessed inputs at their worst (0) or best (1)."""
    for key, (worst, best) in guesses.items():
        cluster = with_value(cluster, key, (worst, best)[which])
    return cluster


def _record(
    run: Run,
    nominal: Simulated,
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
    times = run.iteration_s(nominal)
    begun = len(next(iter(nominal.timings.values())))  # segments that all ranks have ended
    sent = run.ledger.trained(run.segments[:begun], classes)
    stats = iteration_stats(times, experiment.warmup_steps)
    if bounds and stats["n"]:
        means = [iteration_stats(b, experiment.warmup_steps)["mean"] for b in (times, *bounds)]
        stats["high"], stats["low"] = max(means), min(means)
    kinds = run.memory_points()
    _, _, points = kinds[0]
    held, memory = at_most(points), MemoryClock(experiment.engine, points, nominal.fold)
    errors = (
        out_of_memory(at_most(own), nbytes, own, key=f"cluster.{key}.memory_bytes")
        for key, nbytes, own in kinds
    )
    error = next((error for error in errors if error is not None), None)
    outside = _outside(run)
    if error is None and outside:
        error = out_of_far_memory(experiment, outside["far_memory_bytes"]["total"])
    result |= {
        "status": "failed" if nominal.error else "ok" if error is None else "oom",
        "error": nominal.error or error,
        "warnings": [*run.warnings, *over_budget(experiment, held)],
        "iteration_s": stats,
        "comm": means_of(sent, num_ranks=run.mesh.num_ranks, num_iterations=len(times)),
        "memory_bytes": held,
        "saved_bytes": saved_bytes(experiment, run.spec),
        "memory_peak": peak(points).reason(),
        "memory_convention": convention(experiment, run.policy).value,
        "memory_over_time": _memory_over_time(run, nominal, memory),
        "folded": run.folded,
        "classes": [{"rank": c.rank, "count": c.count, "ranks": [list(r) for r in c.ranks]} for c in classes],
        "guessed_inputs": _guessed_inputs(experiment),
        "fitted_constants": _fitted_constants(experiment.cluster),
        **_rates(run, nominal.costs, stats["mean"]),
        **_phases(run, nominal, classes),
        **outside,
        **run.beside(),
    }
    if stats["mean"]:
        comm, num_ranks = result["comm"], run.mesh.num_ranks
        result["energy_j"] = energy_j(
            [experiment.cluster.device_of(rank["rank"]) for rank in result["ranks"]],
            seconds=stats["mean"],
            ranks=result["ranks"],
            intra_node_bytes=comm["intra_node_bytes"] * num_ranks,
            inter_node_bytes=comm["inter_node_bytes"] * num_ranks,
        )
    good = goodput_of(experiment.goodput, num_nodes=experiment.cluster.nodes)
    if good is not None:
        result["goodput"] = good.plain()
    return SimulatedRecord(result, run, nominal, classes, memory)


def _outside(run: Run) -> dict[str, Any]:
    """What offload adds to a record: bytes of one node in far memory, and moved by one rank in the last step."""
    offload = run.engine.offload
    if offload is None:
        return {}
    host = run.mesh.ranks_per_node
    other = Way.host if run.experiment.offload.name == "disk" else Way.commit
    steps = [segment for segment in run.segments if not segment.validation]
    moved = {way: 0 for way in Way if way is not other}
    for item in steps[-1].program(0).items:
        if item.move is not None:
            moved[item.move.way] += item.move.nbytes
    return {
        "far_memory_bytes": {name: host * nbytes for name, nbytes in offload.far_bytes().items()},
        "moved_bytes": {way.value: nbytes for way, nbytes in moved.items()},
    }


def _classes(run: Run) -> tuple[RankClass, ...]:
    if run.apart or not run.folded:
        return tuple(RankClass(r, 1, ((r, r + 1, 1),)) for r in range(run.mesh.num_ranks))
    return rank_classes(run.mesh, [segment.programs for segment in run.segments])


def _rates(run: Run, costs: Costs, mean_s: float | None) -> dict[str, Any]:
    """Throughput and what a training would take; nulls where no step was timed."""
    experiment, cluster = run.experiment, run.experiment.cluster
    keys = ("tokens_per_s", "tflops_per_gpu", "tflops_per_gpu_hardware", "mfu")
    if not mean_s:
        return dict.fromkeys(keys)
    batch = experiment.batch
    sequence = batch.sequence or run.spec.sequence
    replicas = cluster.num_ranks // experiment.parallel.ranks_a_replica
    tokens_per_s = replicas * batch.micro * batch.accumulation * sequence / mean_s
    flop_per_s = costs.model_flop() / mean_s
    rates: dict[str, Any] = {
        "tokens_per_s": tokens_per_s,
        "tflops_per_gpu": flop_per_s / 1e12,
        "tflops_per_gpu_hardware": costs.hardware_flop() / mean_s / 1e12,
        "mfu": flop_per_s / (cluster.emulated_flops_per_s or _peak_flop_per_s(experiment)),
    }
    if experiment.train.tokens:
        rates["time_to_train_s"] = experiment.train.tokens / tokens_per_s
        rates["gpu_hours"] = rates["time_to_train_s"] / 3600 * cluster.num_ranks
        priced = all(device.price_per_hour is not None for _, device, _ in cluster.kinds)
        rates["cost"] = rates["gpu_hours"] * _mean(cluster, "price_per_hour") if priced else None
    return rates


def _peak_flop_per_s(experiment: ExperimentConf) -> float:
    """Of the devices at the run's precision, mean over all ranks."""
    cluster, element = experiment.cluster, experiment.precision.element_bytes
    total = sum(device.peak_flop_per_s(element) * count for _, device, count in cluster.kinds)
    return total / cluster.num_ranks


def _mean(cluster: ClusterConf, name: str) -> float:
    """Of a key of the devices, over all ranks."""
    total: float = sum(getattr(device, name) * count for _, device, count in cluster.kinds)
    return total / cluster.num_ranks


def _fitted_constants(cluster: ClusterConf) -> list[dict[str, Any]]:
    """Constants that were chosen to agree with measurements, and on which ones; probed costs are not among them."""
    if cluster.backend is not Backend.gloo:
        return [
            {"name": f"cluster.{key}", "value": _value(cluster, key), "rows": rows}
            for key, rows in sorted(cluster.fitted.items())
        ]
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


def _shown_step(run: Run, nominal: Simulated) -> int | None:
    """The last training step whose items were kept; None: there is none."""
    done = len(next(iter(nominal.timings.values())))
    steps = [i for i, s in enumerate(run.segments[:done]) if not s.validation]
    whole = [i for i in steps if all(timings[i].starts_ns for timings in nominal.timings.values())]
    return whole[-1] if whole else None


def _memory_over_time(run: Run, nominal: Simulated, memory: MemoryClock) -> list[dict[str, Any]]:
    """Of the step that `phases_s` is of."""
    at = _shown_step(run, nominal)
    if at is None:
        return []
    return memory.plain(run.segments[at], {rank: own[at] for rank, own in nominal.timings.items()})


def _phases(run: Run, nominal: Simulated, classes: Sequence[RankClass]) -> dict[str, Any]:
    """Of the last training step whose items were kept."""
    at = _shown_step(run, nominal)
    if at is None:
        return {}
    end = max(timings[at].end_ns for timings in nominal.timings.values())
    by_rank = {
        rank: phases(rank, run.segments[at], timings[at], until_ns=end).seconds()
        for rank, timings in nominal.timings.items()
    }
    ranks = [
        {"rank": rank, "count": count, **by_rank[representative]}
        for rank, count, representative in _alike(run, nominal, classes)
    ]
    total = run.mesh.num_ranks
    mean = {key: sum(r[key] * r["count"] for r in ranks) / total for key in next(iter(by_rank.values()))}
    return {"phases_s": mean, "ranks": ranks}


def _alike(run: Run, nominal: Simulated, classes: Sequence[RankClass]) -> list[tuple[int, int, int]]:
    """Ranks that send the same and take the same time: (the lowest, their number, the one simulated for them)."""
    if not run.folded:
        return [(c.rank, c.count, c.rank) for c in classes]
    fold = nominal.fold
    if len(fold) == 1:
        return [(c.rank, c.count, 0) for c in classes]
    found = []
    for each in classes:
        members = np.array(each.members())
        own, first, counts = np.unique(fold.of[members], return_index=True, return_counts=True)
        found += [
            (int(members[at]), int(n), fold.ranks[c]) for c, at, n in zip(own, first, counts, strict=True)
        ]
    return sorted(found)


def _guessed_inputs(experiment: ExperimentConf) -> list[dict[str, Any]]:
    guessed, cluster = guessed_by_balance(experiment), experiment.cluster
    for key, (worst, best) in sorted(_guesses(experiment).items()):
        value = _value(cluster, key)
        guessed.append({"key": f"cluster.{key}", "value": value, "worst": worst, "best": best})
    return guessed


def _value(cluster: ClusterConf, key: str) -> Any:
    value: Any = cluster
    for name in key.split("."):
        value = value[int(name)] if isinstance(value, list) else getattr(value, name)
    return value


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
