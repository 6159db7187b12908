"""What the simulator must reach on the published rows; `twinbed-validate` fails if one of these is missed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from .evaluated import Evaluated
from .statistics import table_statistics


class Measure(Enum):
    """What a gate looks at, over the held-out rows of its tables together (`least_ours`: the verified rows)."""

    mean_error = "mean error"
    largest_error = "largest error"
    mean_over_null = "mean error over the null baseline's"
    least_ours = "least simulated figure"


@dataclass(frozen=True, slots=True)
class Gate:
    tables: tuple[str, ...]
    measure: Measure
    bound: float  # at most; of `least_ours`: at least


@dataclass(frozen=True, slots=True)
class Verdict:
    gate: Gate
    found: float | None
    missed: bool
    why: str = ""  # rows that could not be simulated

    @property
    def sentence(self) -> str:
        at_least = self.gate.measure is Measure.least_ours
        form = "{:.3f}" if at_least or self.gate.measure is Measure.mean_over_null else "{:.1%}"
        found = "nothing" if self.found is None else form.format(self.found)
        bound = f"{'at least' if at_least else 'at most'} {form.format(self.gate.bound)}"
        told = f"{' + '.join(self.gate.tables)}: {self.gate.measure.value} {found}, {bound}"
        return f"{told}; {self.why}" if self.why else told


GATES = (
    Gate(("zeropp",), Measure.mean_error, 0.06),
    Gate(("zeropp",), Measure.largest_error, 0.15),
    Gate(("zeropp",), Measure.mean_over_null, 1.0),
    Gate(("zeropp_speedup",), Measure.mean_error, 0.05),
    Gate(("zeropp_equality",), Measure.least_ours, 0.94),
    Gate(("megatron", "torchtitan"), Measure.mean_error, 0.08),
    Gate(("megatron",), Measure.mean_over_null, 1.0),
    Gate(("torchtitan",), Measure.mean_over_null, 1.0),
)


def judge(tables: Mapping[str, Sequence[Evaluated]], gates: Sequence[Gate] = GATES) -> list[Verdict]:
    """One verdict a gate; a gate on a table that is not there is not judged."""
    return [_judge(gate, tables) for gate in gates if all(name in tables for name in gate.tables)]


def _judge(gate: Gate, tables: Mapping[str, Sequence[Evaluated]]) -> Verdict:
    rows = [e for name in gate.tables for e in tables[name] if e.row.verified]
    lacking = [e.row.row_id for e in rows if e.ours is None]
    found = _find(gate.measure, rows)
    why = f"{len(lacking)} of {len(rows)} verified rows not simulated, {lacking[0]} first" if lacking else ""
    if found is None:
        return Verdict(gate, None, True, why or "no held-out row")
    within = found >= gate.bound if gate.measure is Measure.least_ours else found <= gate.bound
    return Verdict(gate, found, bool(lacking) or not within, why)


def _find(measure: Measure, rows: Sequence[Evaluated]) -> float | None:
    if measure is Measure.least_ours:
        return min((e.ours for e in rows if e.row.verified and e.ours is not None), default=None)
    found = table_statistics(rows)
    if found.ours is None:
        return None
    if measure is Measure.mean_over_null:
        return found.ours.mean / found.null.mean if found.null is not None and found.null.mean else None
    return found.ours.mean if measure is Measure.mean_error else found.ours.largest
