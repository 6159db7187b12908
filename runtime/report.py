"""What one rank has to tell of a run: collected step by step, put together at its end."""

import hashlib
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..analysis.record import Decision, LedgerRow, Span
from ..policies.balance import is_balance_event
from ..policies.mesh import PIPELINE, TENSOR
from .balance.balancer import BalanceReport
from .held import HeldMemory
from .interfaces import InterfaceBytes
from .laps import Lap
from .ledger import LIBRARY_STREAM, Ledger
from .loss_scale import LossScale
from .metrics import StepMetrics
from .offload.disk import DiskOffload
from .worker import WorkerContext


@dataclass(slots=True)
class Progress:
    """What a run collects step by step."""

    metrics: list[StepMetrics] = field(default_factory=list)
    steps_ns: list[tuple[int, int]] = field(default_factory=list)  # start and end of each
    loss_weights: list[float] = field(default_factory=list)  # of each step's loss in the mean over ranks
    checkpoints: list[str] = field(default_factory=list)  # within the run's folder


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """One rank's measurements of a run. Times are of its machine's monotonic clock."""

    rank: int
    node: int
    clock: str  # machines whose clocks are the same have the same
    steps_ns: list[tuple[int, int]]  # start and end of each step
    metrics: list[StepMetrics]
    loss_weights: list[
        float
    ]  # of each step's loss in the mean over ranks; 1 where all have as many sequences
    laps: list[Lap]
    rows: list[LedgerRow]
    spans: list[Span]
    # rank 0's, and what the other tensor groups' balancing policies decided; ranks with the same units decide alike, so
    # the others send the digest
    decisions: list[Decision]
    decision_digest: str
    memory_bytes: dict[str, int]  # activations are left out where no step was measured
    interface: InterfaceBytes | None  # bytes during the steps and validations; one rank of each node
    checkpoints: list[str]
    skipped_steps: int
    saved_bytes: dict[str, int] | None = None  # by unit (`saved.SavedTensors`); None: no step was measured
    units_of: str = ""  # ranks with the same have the same units
    far_bytes: dict[str, int] | None = None  # in far memory, by class; None: nothing is offloaded
    moved_bytes: dict[str, int] | None = None  # to and from it in the last step
    balance: BalanceReport | None = None

    @property
    def comm_streams(self) -> set[str]:
        """Those that plans name, and that of libraries."""
        return {LIBRARY_STREAM, *(row.stream for row in self.rows)}


def rank_report(
    context: WorkerContext,
    progress: Progress,
    *,
    laps: list[Lap],
    ledger: Ledger,
    held: HeldMemory,
    peak_bytes: int,
    interface: InterfaceBytes | None,
    loss_scale: LossScale | None,
    balance: BalanceReport | None,
    offload: DiskOffload | None,
) -> RankReport:
    """Of a run that has ended.

    Args:
        interface: What it has sent and received since the run began.
    """
    saved = held.saved
    memory_bytes = held.num_bytes | {"peak": peak_bytes}
    if saved is not None:
        memory_bytes["activations"] = saved.peak_bytes
    return RankReport(
        rank=context.rank,
        node=context.node,
        clock=_clock_name(),
        steps_ns=progress.steps_ns,
        metrics=progress.metrics,
        loss_weights=progress.loss_weights,
        laps=laps,
        rows=ledger.rows,
        spans=ledger.spans,
        decisions=_own_decisions(ledger, balance),
        decision_digest=_digest(ledger.decisions),
        memory_bytes=memory_bytes,
        saved_bytes=None if saved is None else saved.unit_bytes,
        interface=interface,
        checkpoints=progress.checkpoints,
        skipped_steps=loss_scale.skipped_steps if loss_scale is not None else 0,
        units_of=_units_of(ledger, balance),
        balance=balance,
        far_bytes=offload.far_bytes() if offload is not None else None,
        moved_bytes=offload.residency.moved_bytes("train") if offload is not None else None,
    )


def _own_decisions(ledger: Ledger, balance: BalanceReport | None) -> list[Decision]:
    """Rank 0's; of the first rank of another tensor group what its balancing policy decided."""
    if ledger.rank == 0:
        return ledger.decisions
    if balance is None or balance.ranks[0] != ledger.rank:
        return []
    return [decision for decision in ledger.decisions if is_balance_event(decision.event)]


def _units_of(ledger: Ledger, balance: BalanceReport | None) -> str:
    """Equal for ranks that are asked for the same units, and of balanced ones are told the same times."""
    mesh, rank = ledger.mesh, ledger.rank
    stage = f"{PIPELINE}{mesh.index(PIPELINE, rank)}"
    return stage if balance is None else f"{stage}.{TENSOR}{mesh.group(TENSOR, rank)[0]}"


def _digest(decisions: Sequence[Decision]) -> str:
    """Equal for ranks that decided alike."""
    log = "\n".join(f"{d.iteration} {d.event} -> {d.action}" for d in decisions)
    return hashlib.sha256(log.encode()).hexdigest()


def _clock_name() -> str:
    """Processes of one boot of one kernel share the monotonic clock, whatever their host names say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()
