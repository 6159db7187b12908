"""A published row beside what the simulator says; each distinct experiment is simulated once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...conf.compose import compose
from ..predict import predict
from .quantities import QUANTITIES, UNITS, Outcome
from .rows import PublishedRow

OOM = "out of memory: "  # begins such a note

# A simulated iteration is like every other one; a row may say otherwise.
DEFAULTS = ("target=sim", "steps=1", "warmup_steps=0")


@dataclass(frozen=True, slots=True)
class Evaluated:
    """One row, evaluated. Figures are in the row's unit.

    Attributes:
        ours: None: not simulated, and `reason` says why.
        low, high: Over the ranges of the guessed inputs; None where nothing is guessed or time plays no part.
        paper_rate: What the null baseline holds constant: FLOP/s of a GPU as the paper has them, recomputation
            counted; of a ratio the ratio itself; None where no such baseline makes sense.
        is_time: The figure falls with `paper_rate`; else it is proportional to it.
        rank_paper, rank_ours: What rank correlation compares: FLOP/s of a GPU without recomputation, or as
            printed; of anything else the figure itself.
        rank_share: `rank_paper` over `paper_rate`.
        notes: What else the simulation said: out of memory, keys without effect.
    """

    row: PublishedRow
    ours: float | None = None
    low: float | None = None
    high: float | None = None
    paper_rate: float | None = None
    is_time: bool = False
    rank_paper: float = 0.0
    rank_ours: float = 0.0
    rank_share: float = 1.0
    reason: str = ""
    notes: tuple[str, ...] = ()
    fitted_constants: tuple[Mapping[str, Any], ...] = ()
    guessed_inputs: tuple[str, ...] = ()

    @property
    def rel_error(self) -> float | None:
        """ours / paper - 1."""
        return None if self.ours is None else self.ours / self.row.value - 1.0

    @property
    def in_range(self) -> bool | None:
        """Whether the paper's figure lies in what the guessed inputs allow; None: there is no range."""
        if self.low is None or self.high is None:
            return None
        return self.low <= self.row.value <= self.high


@dataclass(slots=True)
class Evaluator:
    """Simulates rows. `simulate` takes overrides and gives an outcome; it may raise anything."""

    simulate: Callable[[Sequence[str]], Outcome] = field(default_factory=lambda: simulate_overrides)
    _known: dict[tuple[str, ...], Outcome | str] = field(default_factory=dict)

    def evaluate(self, row: PublishedRow) -> Evaluated:
        """A row that cannot be composed or simulated is a result too: `ours` is None."""
        outcomes: list[Outcome] = []
        for overrides in (row.overrides, row.against) if row.against else (row.overrides,):
            found = self._outcome(overrides)
            if isinstance(found, str):
                return Evaluated(row, reason=found)
            outcomes.append(found)
        try:
            return _beside(row, *outcomes)
        except (ValueError, TypeError, KeyError) as err:
            # a record without the figure, such as one of an engine that counts no tokens
            return Evaluated(row, reason=f"the record has no {row.quantity}: {_told(err)}")

    def _outcome(self, overrides: tuple[str, ...]) -> Outcome | str:
        if overrides not in self._known:
            try:
                self._known[overrides] = self.simulate(overrides)
            except Exception as err:
                self._known[overrides] = _told(err)
        return self._known[overrides]


def simulate_overrides(overrides: Sequence[str]) -> Outcome:
    """Compose and simulate, as `twinbed target=sim OVERRIDES` would.

    Raises:
        ValueError: If a key, a value or a combination is not legal.
        RuntimeError: If ranks wait for each other for ever.
    """
    composed = compose([*DEFAULTS, *overrides])
    return Outcome(composed.experiment, composed.spec, predict(composed).result)


def _beside(row: PublishedRow, outcome: Outcome, against: Outcome | None = None) -> Evaluated:
    quantity, unit = QUANTITIES[row.quantity], UNITS[QUANTITIES[row.quantity].dimension][row.unit]
    ours = quantity.measure(outcome, against) / unit
    low = high = rate = None
    is_time, share = False, 1.0
    rank_paper, rank_ours = row.value, ours
    if quantity.is_timed:
        paper_s = quantity.from_seconds(row.value * unit, outcome)
        if quantity.dimension == "flop rate":
            rate = row.value * unit
        else:
            is_time = quantity.amount is None
            rate = outcome.hardware_flop / paper_s
            rank_paper, rank_ours = outcome.model_flop / paper_s, outcome.model_flop / outcome.seconds
            share = round(outcome.model_flop / outcome.hardware_flop, 9)  # equal shares must tie
        if outcome.range_s is not None:
            ends = [quantity.from_seconds(seconds, outcome) / unit for seconds in outcome.range_s]
            low, high = min(ends), max(ends)
    elif quantity.dimension == "one" and quantity.read is not None and row.quantity == "speedup":
        rate = row.value
    outcomes = [outcome] if against is None else [outcome, against]
    return Evaluated(
        row,
        ours,
        low,
        high,
        paper_rate=rate,
        is_time=is_time,
        rank_paper=rank_paper,
        rank_ours=rank_ours,
        rank_share=share,
        notes=tuple(dict.fromkeys(note for o in outcomes for note in _notes(o))),
        fitted_constants=tuple(c for o in outcomes for c in o.result.get("fitted_constants") or ()),
        guessed_inputs=tuple(
            dict.fromkeys(g["key"] for o in outcomes for g in o.result.get("guessed_inputs") or ())
        ),
    )


def _notes(outcome: Outcome) -> list[str]:
    notes = list(outcome.result.get("warnings") or ())
    if outcome.result["status"] == "oom":
        notes.insert(0, OOM + str(outcome.result["error"]).removeprefix(OOM))
    return notes


def _told(err: Exception) -> str:
    told = " ".join(str(err).split())
    return told if isinstance(err, ValueError | RuntimeError) and told else f"{type(err).__name__}: {told}"
