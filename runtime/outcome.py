"""From what each rank measured to the record of the run. Everything is gathered once, at the end."""

import platform
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ..analysis.record import (
    Record,
    Span,
    comm_means,
    iteration_stats,
    new_result,
    write_record,
)
from ..conf.balance_check import guessed_by_balance
from ..conf.model_flop import train_flop_per_token
from ..conf.model_spec import ModelSpec
from ..conf.schema import ExperimentConf
from .balance.balancer import BalanceReport
from .case import Case
from .metrics import StepMetrics, write_metrics
from .phases import compute_spans, mean_phases, step_phases
from .report import RankReport
from .worker import WorkerContext


def write_outcome(
    case: Case,
    context: WorkerContext,
    experiment: ExperimentConf,
    spec: ModelSpec,
    report: RankReport,
) -> None:
    """Gather all ranks' reports at rank 0, which writes the record.

    Raises:
        RuntimeError: Ranks decided differently.
        OSError: The folder cannot be written.
    """
    gathered: list[Any] | None = [None] * context.num_ranks if context.rank == 0 else None
    dist.gather_object(report, gathered, dst=0)
    if gathered is None:
        return
    reports: list[RankReport] = gathered
    first: dict[str, RankReport] = {}  # of each stage: others are asked for other units
    for other in reports:
        alike = first.setdefault(other.units_of, other)
        if other.decision_digest != alike.decision_digest:
            raise RuntimeError(
                f"rank {other.rank} took other decisions than rank {alike.rank}: a policy "
                f"(comm={experiment.comm.name}, balance={experiment.balance.name}) depends on more than its events"
            )
    metrics = _mean_metrics(reports)
    folder = context.case_folder(case)
    write_metrics(folder, metrics)
    write_record(folder, _record(case, context, experiment, spec, reports, metrics))


def _mean_metrics(reports: Sequence[RankReport]) -> list[StepMetrics]:
    """Losses are means over ranks; a step takes as long as its slowest rank."""
    means = []
    weights_of = zip(*(report.loss_weights for report in reports), strict=True)
    for steps, weights in zip(
        zip(*(report.metrics for report in reports), strict=True), weights_of, strict=True
    ):
        slowest_s = max(step.iteration_s for step in steps)
        tokens = steps[0].tokens_per_s * steps[0].iteration_s
        mean = sum(step.loss * weight for step, weight in zip(steps, weights, strict=True)) / len(steps)
        means.append(replace(steps[0], loss=mean, iteration_s=slowest_s, tokens_per_s=tokens / slowest_s))
    return means


def _record(
    case: Case,
    context: WorkerContext,
    experiment: ExperimentConf,
    spec: ModelSpec,
    reports: Sequence[RankReport],
    metrics: Sequence[StepMetrics],
) -> Record:
    result = new_result("runtime", case.experiment, seed=experiment.seed, git_commit=context.git_commit)
    times_s = [step.iteration_s for step in metrics]
    warmup = experiment.warmup_steps
    rows = [row for report in reports for row in report.rows]
    result |= {
        "status": "ok",
        "warnings": list(case.warnings),
        "guessed_inputs": guessed_by_balance(experiment),
        "iteration_s": iteration_stats(times_s, warmup),
        "iterations_s": times_s,
        "loss": [step.loss for step in metrics],
        "validation_loss": [
            [step.step, step.validation_loss] for step in metrics if step.validation_loss is not None
        ],
        **_accuracy(metrics),
        "first_step": metrics[0].step,
        "skipped_steps": max(report.skipped_steps for report in reports),
        "checkpoints": reports[0].checkpoints,
        "interfaces": _interfaces(reports),
        "comm": comm_means(
            (row for row in rows if row.phase != "eval"),
            num_ranks=len(reports),
            num_iterations=len(metrics),
        ),
        "memory_bytes": _memory(result["memory_bytes"], reports),
        "saved_bytes": _saved(reports),
        "notes": [
            "memory_bytes: parameters, gradients, optimizer and secondary_shard are measured between steps; "
            + (
                "peak is the device's allocator"
                if context.device.type == "cuda"
                else "peak is the process's resident set, Python and torch included"
            )
            + (
                "; activations are what autograd keeps at most in the first step (recomputed blocks: what they begin "
                "with); buffers are not measured"
                if reports[0].saved_bytes is not None
                else "; activations are measured in a first step that is warm-up (warmup_steps >= 1); buffers are not "
                "measured"
            )
        ],
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        **_kernels(context),
    }
    slowest_ns = [round(t * 1e9) for t in times_s]
    phases = [
        step_phases(report.steps_ns, report.spans, slowest_ns, report.comm_streams) for report in reports
    ]
    result["ranks"] = [
        {"rank": report.rank, "count": 1, **mean_phases(own[warmup:])}
        for report, own in zip(reports, phases, strict=True)
    ]
    result |= _outside(reports) | _balance(reports)
    result["phases_s"] = mean_phases([step for own in phases for step in own[warmup:]])
    _add_rates(result, experiment, spec, replicas_of_model(experiment, context.num_ranks), context.num_ranks)
    spans = _on_one_clock(reports)
    decisions = [decision for report in reports for decision in report.decisions]
    return Record(result, ledger=rows, decisions=decisions, spans=spans)


def _kernels(context: WorkerContext) -> dict[str, Any]:
    """What quantized, and how long rank 0 took at the start to build it or to find it built."""
    ready = context.kernels
    if ready is None:
        return {}
    return {"kernels": {"backend": ready.backend, "reason": ready.reason, "prepare_s": ready.seconds}}


def _accuracy(metrics: Sequence[StepMetrics]) -> dict[str, Any]:
    """(step, share told right) of each validation of a classifier."""
    told = [[step.step, step.validation_accuracy] for step in metrics if step.validation_accuracy is not None]
    return {"validation_accuracy": told} if told else {}


def _outside(reports: Sequence[RankReport]) -> dict[str, Any]:
    """What offload adds: bytes of one node in far memory, and moved by rank 0 in the last step."""
    first = reports[0]
    if first.far_bytes is None:
        return {}
    here = [report.far_bytes for report in reports if report.node == first.node and report.far_bytes]
    return {
        "far_memory_bytes": {name: sum(far[name] for far in here) for name in first.far_bytes},
        "moved_bytes": first.moved_bytes,
    }


def _balance(reports: Sequence[RankReport]) -> dict[str, Any]:
    """Of each tensor group what was measured and put in force, and what that took: of telling all ranks the times, the
    least that a rank took, for the others waited for it; of deciding, the most.
    """
    groups: dict[tuple[int, ...], list[BalanceReport]] = {}
    for report in reports:
        if report.balance is not None:
            groups.setdefault(report.balance.ranks, []).append(report.balance)
    found = []
    for ranks, of_group in groups.items():
        gathers = zip(*(each.gather_s for each in of_group), strict=True)
        decides = zip(*(each.decide_s for each in of_group), strict=True)
        took_s = [min(gather) + max(decide) for gather, decide in zip(gathers, decides, strict=True)]
        first = of_group[0]
        found.append(
            {
                "ranks": list(ranks),
                "periods": [
                    {**period, "overhead_s": s} for period, s in zip(first.periods, took_s, strict=True)
                ],
                "overhead_s": sum(took_s),
                "least_room_bytes": first.least_room_bytes,
            }
        )
    policy = next((report.balance.policy for report in reports if report.balance is not None), "")
    return {"balance": {"policy": policy, "groups": found}} if found else {}


def replicas_of_model(experiment: ExperimentConf, num_ranks: int) -> int:
    """That are trained side by side, each on micro-batches of its own."""
    return num_ranks // experiment.parallel.ranks_a_replica


def _add_rates(
    result: dict[str, Any], experiment: ExperimentConf, spec: ModelSpec, replicas: int, num_ranks: int
) -> None:
    mean_s = result["iteration_s"]["mean"]
    if mean_s is None:
        return
    batch = experiment.batch
    sequence = batch.sequence or spec.sequence
    tokens_per_s = replicas * batch.micro * batch.accumulation * sequence / mean_s
    rank_tokens_per_s = tokens_per_s / num_ranks
    flop_per_s = rank_tokens_per_s * train_flop_per_token(spec, sequence)
    hardware = rank_tokens_per_s * train_flop_per_token(spec, sequence, experiment.recompute.value)
    device = experiment.cluster.device
    element = experiment.precision.element_bytes
    peak = experiment.cluster.emulated_flops_per_s or device.peak_flop_per_s(element)
    result |= {
        "tokens_per_s": tokens_per_s,
        "tflops_per_gpu": flop_per_s / 1e12,
        "tflops_per_gpu_hardware": hardware / 1e12,
        "mfu": flop_per_s / peak,
    }
    if experiment.train.tokens is not None:
        seconds = experiment.train.tokens / tokens_per_s
        hours = seconds * num_ranks / 3600
        price = device.price_per_hour
        result |= {
            "time_to_train_s": seconds,
            "gpu_hours": hours,
            "cost": hours * price if price is not None else None,
        }


def _memory(keys: dict[str, Any], reports: Sequence[RankReport]) -> dict[str, int | None]:
    """The most that any rank holds of each class; None for what is not measured."""
    measured = reports[0].memory_bytes
    return {
        key: max(report.memory_bytes[key] for report in reports) if key in measured else None for key in keys
    }


def _saved(reports: Sequence[RankReport]) -> dict[str, int] | None:
    """The most that any rank keeps of each unit for one backward."""
    if any(report.saved_bytes is None for report in reports):
        return None
    found: dict[str, int] = {}
    for report in reports:
        for unit, nbytes in (report.saved_bytes or {}).items():
            found[unit] = max(found.get(unit, 0), nbytes)
    return found


def _interfaces(reports: Sequence[RankReport]) -> list[dict[str, Any]]:
    first = {report.node: report for report in reversed(reports)}
    return [
        {
            "node": node,
            "interface": report.interface.name,
            "sent_bytes": report.interface.sent_bytes,
            "received_bytes": report.interface.received_bytes,
        }
        for node, report in sorted(first.items())
        if report.interface is not None
    ]


def _on_one_clock(reports: Sequence[RankReport]) -> list[Span]:
    """All ranks' spans from 0 on. Ranks of other machines are lined up by the start of their first step."""
    starts: dict[str, int] = {}
    for report in reports:
        begin = report.steps_ns[0][0]
        starts[report.clock] = min(starts.get(report.clock, begin), begin)
    spans = []
    for report in reports:
        origin = starts[report.clock]
        computed = compute_spans(report.rank, report.laps, report.spans, report.comm_streams)
        for span in [*report.spans, *computed]:
            spans.append(replace(span, start_ns=span.start_ns - origin, end_ns=span.end_ns - origin))
    return [span for span in spans if span.start_ns >= 0]
