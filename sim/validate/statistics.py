"""Errors of a table, and the same for the null baseline: one constant for the whole table."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .evaluated import Evaluated


@dataclass(frozen=True, slots=True)
class Errors:
    """Of relative errors, ours / paper - 1; fractions. `rank_correlation`: None where it is not defined."""

    mean: float  # of absolute errors
    largest: float  # absolute
    bias: float  # mean of signed errors
    rank_correlation: float | None


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of one table. Errors and `in_range` are of those held-out rows (verified, not fitted on) that were simulated."""

    num_rows: int
    num_held_out: int
    num_fitted: int
    num_unverified: int
    num_not_simulated: int
    ours: Errors | None  # None: no held-out row was simulated
    null: Errors | None  # None: no baseline for this kind of figure, or less than two rows
    null_model: Errors | None  # the same baseline with recomputation not counted, where that differs
    ours_with_fitted: Errors | None  # of all verified rows
    in_range: tuple[int, int] | None  # held-out rows within the range of the guessed inputs, of how many


def table_statistics(rows: Sequence[Evaluated]) -> Statistics:
    """Of the rows of one table."""
    verified = [e for e in rows if e.row.verified and e.ours is not None]
    held_out = [e for e in verified if e.row.held_out]
    ranged = [e.in_range for e in held_out if e.in_range is not None]
    return Statistics(
        num_rows=len(rows),
        num_held_out=sum(e.row.held_out for e in rows),
        num_fitted=sum(e.row.fitted for e in rows),
        num_unverified=sum(not e.row.verified for e in rows),
        num_not_simulated=sum(e.ours is None for e in rows),
        ours=_our_errors(held_out),
        null=_null_errors(held_out, null_errors(rows), [e.rank_share for e in held_out]),
        null_model=_null_model(rows, held_out),
        ours_with_fitted=_our_errors(verified),
        in_range=(sum(ranged), len(ranged)) if ranged else None,
    )


def null_errors(rows: Sequence[Evaluated]) -> dict[str, float]:
    """row_id -> relative error of the null baseline.

    The baseline knows how much each row computes and says that every GPU computes at one rate. The rate is
    fitted without the row itself: of all other verified rows' rates, the one with the least mean absolute error
    on them (fitted rows take part, which helps the baseline).
    """
    others = [e for e in rows if e.row.verified and e.paper_rate is not None]
    errors = {}
    for e in rows:
        if e.paper_rate is None:
            continue
        constant = fit_constant([other for other in others if other is not e])
        if constant is not None:
            errors[e.row.row_id] = _null_error(e, constant)
    return errors


def fit_constant(rows: Sequence[Evaluated]) -> float | None:
    """The rate, one of the rows' own, with the least mean absolute error; the lowest of several. None: no rows."""
    candidates = sorted({e.paper_rate for e in rows if e.paper_rate is not None})
    if not candidates:
        return None
    return min(candidates, key=lambda rate: sum(abs(_null_error(e, rate)) for e in rows))


def spearman(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Rank correlation; equal values share their mean rank. None if either side has one value only."""
    if len(xs) != len(ys):
        raise ValueError(f"rank correlation needs pairs, got {len(xs)} and {len(ys)} values")
    a, b = _ranks(xs), _ranks(ys)
    middle = (len(xs) + 1) / 2  # the mean of any ranking
    covariance = sum((x - middle) * (y - middle) for x, y in zip(a, b, strict=True))
    spread = sum((x - middle) ** 2 for x in a) * sum((y - middle) ** 2 for y in b)
    return covariance / spread**0.5 if spread > 0 else None


def _our_errors(rows: Sequence[Evaluated]) -> Errors | None:
    errors = [e.rel_error for e in rows if e.rel_error is not None]
    if not errors:
        return None
    return _errors(errors, _correlation(rows, [e.rank_ours for e in rows]))


def _null_model(rows: Sequence[Evaluated], held_out: Sequence[Evaluated]) -> Errors | None:
    if all(e.rank_share == 1.0 for e in rows):
        return None
    model = [replace(e, paper_rate=e.paper_rate and e.paper_rate * e.rank_share) for e in rows]
    return _null_errors(held_out, null_errors(model), [1.0] * len(held_out))


def _null_errors(
    held_out: Sequence[Evaluated], by_row: dict[str, float], ranks: Sequence[float]
) -> Errors | None:
    errors = [by_row[e.row.row_id] for e in held_out if e.row.row_id in by_row]
    if not errors:
        return None
    # the constant is common to all rows here: fitted without each row in turn, it would rank them backwards
    return _errors(errors, _correlation(held_out, ranks))


def _correlation(rows: Sequence[Evaluated], ours: Sequence[float]) -> float | None:
    if len({(e.row.quantity, e.row.unit) for e in rows}) > 1:
        return None  # figures of different kinds have no common order
    return spearman([e.rank_paper for e in rows], ours)


def _null_error(row: Evaluated, constant: float) -> float:
    assert row.paper_rate is not None
    return (row.paper_rate / constant if row.is_time else constant / row.paper_rate) - 1.0


def _errors(errors: Sequence[float], correlation: float | None) -> Errors:
    return Errors(
        mean=sum(abs(e) for e in errors) / len(errors),
        largest=max(abs(e) for e in errors),
        bias=sum(errors) / len(errors),
        rank_correlation=correlation,
    )


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=lambda i: values[i])
    ranks = [0.0] * len(values)
    at = 0
    while at < len(order):
        end = at
        while end + 1 < len(order) and values[order[end + 1]] == values[order[at]]:
            end += 1
        for i in order[at : end + 1]:
            ranks[i] = (at + end) / 2 + 1
        at = end + 1
    return ranks
