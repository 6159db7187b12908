"""What zigzag is worth, and what sends beside the attention are: causal ring attention, forward and backward, measured.

Run: python benchmarks/zigzag.py [OUTPUT] [REPEATS]. Each line is one launch, in which settings take turns, so that a
ratio is between neighbours in time; shown are the median of the ratios and their range.

The first part compares contiguous pieces with zigzag on links that cost little, with torch's kernels on 2 ranks (one a
core) and with computation that is slept (any number of ranks, for 4 share 2 cores here): a kernel takes as long as the
scores that it was asked for would at a fixed rate. The second part compares the plan with one whose messages are not
beside anything, on nodes of one rank with shaped links.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from twinbed.conf.compose import compose
from twinbed.policies.layout import Border, Direction, Kind, LayerRuns
from twinbed.policies.layout.sequence import AttentionPlans
from twinbed.policies.layout.tokens import causal_work
from twinbed.policies.mesh import SEQUENCE, Mesh
from twinbed.policies.plan import Plan
from twinbed.runtime.case import Case
from twinbed.runtime.collectives import backend_of, build_collectives
from twinbed.runtime.launcher import launch_local
from twinbed.runtime.layout import attention
from twinbed.runtime.layout.functions import Context
from twinbed.runtime.layout.interpreter import LayerInterpreter
from twinbed.runtime.ledger import Ledger
from twinbed.runtime.machine import BusyWatch
from twinbed.runtime.worker import WorkerContext

BATCH, HEADS, FEATURES = 1, 8, 64
FORWARD_S, BACKWARD_S = 0.06, 0.15  # slept for a full block: two products of matrices, and five
ZIGZAG, CONTIGUOUS, SERIAL = "zigzag", "contiguous", "zigzag, not beside"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One launch. `slower` is compared with zigzag as the plan is.

    Args:
        tokens: Of one rank.
        mbit: Of a node's link; 0: not shaped.
        slept: Computation is.
    """

    slower: str
    ranks: int
    tokens: int
    mbit: int = 0
    slept: bool = True


LINES = (
    Line(slower=CONTIGUOUS, ranks=2, tokens=2048, slept=False),
    Line(slower=CONTIGUOUS, ranks=2, tokens=256),
    Line(slower=CONTIGUOUS, ranks=4, tokens=256),
    Line(slower=SERIAL, ranks=2, tokens=1024, mbit=500, slept=False),
    Line(slower=SERIAL, ranks=2, tokens=256, mbit=200),
    Line(slower=SERIAL, ranks=4, tokens=256, mbit=200),
)


# ---- on each rank


def measure(case: Case, context: WorkerContext) -> None:
    """Writes the seconds of each setting, the slowest rank's, in the order of repeats."""
    line = Line(**case.options["line"])
    if line.slept:
        _sleep_in_place_of_kernels(line.tokens)
    ring = Ring(context, line)
    seconds: dict[str, list[float]] = {ZIGZAG: [], line.slower: []}
    for repeat in range(-1, case.options["repeats"]):  # the first one warms up
        for name in seconds if repeat % 2 else reversed(seconds):
            context.beat(repeat)
            took = ring.run(name)
            if repeat >= 0:
                seconds[name].append(took)
    if context.rank == 0:
        (context.case_folder(case) / "seconds.json").write_text(json.dumps(seconds))


def _sleep_in_place_of_kernels(tokens: int) -> None:
    """A kernel's results have its shapes and no meaning; it takes its share of a full block of scores."""

    def share(q: Tensor, k: Tensor, causal: bool) -> float:
        return q.shape[2] * k.shape[2] / tokens**2 * (0.5 if causal else 1.0)

    def forward(q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
        time.sleep(FORWARD_S * share(q_BHTE, k_BKSE, causal))
        return torch.zeros_like(q_BHTE), q_BHTE.new_zeros(q_BHTE.shape[:3])

    def backward(
        dy_BHTE: Tensor,
        q_BHTE: Tensor,
        k_BKSE: Tensor,
        v_BKSE: Tensor,
        y_BHTE: Tensor,
        log_sums_BHT: Tensor,
        *,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        time.sleep(BACKWARD_S * share(q_BHTE, k_BKSE, causal))
        return torch.zeros_like(q_BHTE), torch.zeros_like(k_BKSE), torch.zeros_like(v_BKSE)

    attention.attention = forward
    attention.attention_gradient = backward


class Ring:
    """Attention of one layer, by the runtime's interpreter on plans of each setting."""

    def __init__(self, context: WorkerContext, line: Line) -> None:
        self._line = line
        mesh = Mesh(line.ranks, 1, dims=((SEQUENCE, line.ranks),))
        ledger = Ledger(rank=context.rank, mesh=mesh)
        self._interpreter = LayerInterpreter(
            context.groups(mesh), ledger, build_collectives(backend_of(context.device))
        )
        self._context = Context(mesh=mesh, rank=context.rank)
        self._plans = {name: plans(name, line.ranks) for name in (ZIGZAG, line.slower)}
        random = torch.Generator().manual_seed(context.rank)
        self._given = {
            name: torch.randn(BATCH, HEADS, line.tokens, FEATURES, generator=random)
            for name in ("q", "k", "v", "dy")
        }

    def run(self, name: str) -> float:
        """Seconds of forward and backward, of the rank that took longest."""
        forward, backward = self._plans[name]
        kept = [operand for operand in backward.operands if operand != "dy"]
        dist.barrier()
        began = time.perf_counter()
        made = self._run(forward, self._given, keep=kept)
        made = self._run(backward, self._given | made, keep=("dq", "dk", "dv"))
        took = torch.tensor(time.perf_counter() - began)
        assert len(made) == 3
        dist.all_reduce(took, dist.ReduceOp.MAX)
        return took.item()

    def _run(self, plan: Plan, operands: dict[str, Tensor], *, keep: Sequence[str]) -> dict[str, Tensor]:
        given = {name: operands[name] for name in plan.operands}
        made = self._interpreter.run(plan, given, label="attention", context=self._context, keep=keep)
        return made


def plans(name: str, ranks: int) -> tuple[Plan, Plan]:
    """(forward, backward)."""
    made = []
    for direction in (Direction.forward, Direction.backward):
        event = LayerRuns(Kind.attention, direction, Border(), number=1)
        plan = AttentionPlans("ring", size=ranks, zigzag=name != CONTIGUOUS).plan(event)
        assert plan is not None
        if name == SERIAL:  # on the plan's own stream each message blocks
            steps = [replace(step, stream="", after=None) for step in plan.steps]
            plan = Plan.of_operands(steps, plan.stream)
        made.append(plan)
    return made[0], made[1]


# ---- here


@dataclass(frozen=True)
class Row:
    """Of one line. `ratios`: seconds of the slower setting over zigzag's, repeat by repeat."""

    line: Line
    seconds: dict[str, list[float]]
    backend: str
    void: str | None

    @property
    def ratios(self) -> list[float]:
        pairs = zip(self.seconds[self.line.slower], self.seconds[ZIGZAG], strict=True)
        return [slow / fast for slow, fast in pairs]

    @property
    def ideal(self) -> str:
        """If computation were all."""
        if self.line.slower != CONTIGUOUS:
            return ""
        work = causal_work(self.line.ranks, zigzag=False)
        return f"{max(work) * len(work) / sum(work):.2f}"


def launch(line: Line, folder: Path, repeats: int) -> Row:
    one = compose(
        [
            "target=runtime",
            "cluster=local_2x2",
            f"cluster.nodes={line.ranks}",
            "cluster.devices_per_node=1",
            f"cluster.shaped={bool(line.mbit)}",
            f"cluster.inter_node.bandwidth_Bps={(line.mbit or 10_000) * 1e6 / 8}",
            "model=gpt_tiny",
        ]
    )
    kind = f"{Path(__file__).resolve()}:measure"
    options = {"line": asdict(line), "repeats": repeats}
    case = Case(name="ring", folder="ring", experiment=one.resolved, kind=kind, options=options)
    watch = BusyWatch()
    outcome = launch_local(
        folder, cluster=one.experiment.cluster, cases=[case], timeout_s=300.0, show_progress=False
    )
    void = watch.reason()
    if outcome.status != "ok":
        sys.exit(outcome.error)
    if line.mbit and outcome.unshaped_reason:
        sys.exit(f"this part needs shaped links: {outcome.unshaped_reason}")
    seconds = json.loads((folder / "ring" / "seconds.json").read_text())
    return Row(line, seconds, outcome.backend, void)


def report(rows: Sequence[Row]) -> None:
    print(f"causal ring attention, forward + backward, {os.cpu_count()} cores; ratio: median (least to most)")
    columns = ("ranks", "tokens", "Mbit/s", "compute", "zigzag ms", "ratio", "range", "ideal")
    widths = (6, 8, 8, 9, 11, 7, 16, 7)
    print(" " * 30 + "".join(f"{name:>{width}}" for name, width in zip(columns, widths, strict=True)))
    for row in rows:
        line, ratios = row.line, row.ratios
        spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
        print(
            f"{line.slower + ' / zigzag':30}{line.ranks:6}{line.tokens:8}{line.mbit or '-':>8}"
            f"{'slept' if line.slept else 'torch':>9}{statistics.median(row.seconds[ZIGZAG]) * 1e3:11.1f}"
            f"{statistics.median(ratios):7.2f}{spread:>16}{row.ideal:>7}"
            f"{f'  void: {row.void}' if row.void else ''}"
        )


def main(argv: Sequence[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if argv is None else argv)
    folder = Path(arguments[0] if arguments else "outputs/bench/zigzag")
    repeats = int(arguments[1]) if len(arguments) > 1 else 9
    rows: list[Row] = []
    for number, line in enumerate(LINES):
        for attempt in range(3):
            row = launch(line, folder / f"{number}_{attempt}", repeats)
            if row.void is None:
                break
            print(
                f"line {number}: void, {row.void}; {'again' if attempt < 2 else 'shown as such'}",
                file=sys.stderr,
            )
        rows.append(row)
    (folder / "rows.json").write_text(json.dumps([asdict(row) for row in rows], indent=1))
    report(rows)


if __name__ == "__main__":
    main()
