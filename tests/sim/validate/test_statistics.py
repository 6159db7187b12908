"""Errors, null baseline, rank correlation and gates against tables counted by hand."""

from dataclasses import replace

import pytest

from twinbed.sim.validate.evaluated import Evaluated
from twinbed.sim.validate.gates import Gate, Measure, judge
from twinbed.sim.validate.rows import PublishedRow
from twinbed.sim.validate.statistics import fit_constant, null_errors, spearman, table_statistics


def row(row_id: str, value: float, *, verified: bool = True, fitted: bool = False) -> PublishedRow:
    return PublishedRow(
        row_id, "t", "tflops_8pt", "TFLOP/s", value, verified, fitted, "a paper", ("comm=zero3",)
    )


def rate(row_id: str, paper: float, ours: float | None, **flags: bool) -> Evaluated:
    published = row(row_id, paper, **flags)
    if ours is None:
        return Evaluated(published, reason="cannot be composed")
    return Evaluated(published, ours, paper_rate=paper, rank_paper=paper, rank_ours=ours)


TABLE = [rate("a", 10, 11), rate("b", 20, 18), rate("c", 40, 40)]  # +10 %, -10 %, 0


def test_errors_by_hand() -> None:
    found = table_statistics(TABLE)
    assert found.ours is not None
    assert found.ours.mean == pytest.approx(0.2 / 3)
    assert found.ours.largest == pytest.approx(0.1)
    assert found.ours.bias == pytest.approx(0.0)
    assert found.ours.rank_correlation == pytest.approx(1.0)
    assert (found.num_rows, found.num_held_out, found.num_not_simulated) == (3, 3, 0)


def test_the_null_baseline_is_fitted_without_the_row() -> None:
    # a: of 20 and 40, 20 errs by 0 and 1/2, 40 by 1 and 0: 20, which is +100 % of 10
    # b: of 10 and 40, 10 errs by 0 and 3/4, 40 by 3 and 0: 10, -50 % of 20
    # c: of 10 and 20, 10 errs by 0 and 1/2, 20 by 1 and 0: 10, -75 % of 40
    assert null_errors(TABLE) == pytest.approx({"a": 1.0, "b": -0.5, "c": -0.75})
    null = table_statistics(TABLE).null
    assert null is not None
    assert (null.mean, null.largest, null.bias) == pytest.approx((0.75, 1.0, -0.25 / 3))
    assert null.rank_correlation is None  # one constant ranks nothing


def test_the_null_baseline_of_times() -> None:
    # times are in proportion to 1 / rate: rate / constant - 1
    # a (10): of 20 and 40, 20 errs by 0 and 1, 40 by -1/2 and 0: 40, -75 %
    # b (20): of 10 and 40, 40 errs by -3/4 and 0: 40, -50 %
    # c (40): of 10 and 20, 20 errs by -1/2 and 0: 20, +100 %
    times = [replace(e, is_time=True) for e in TABLE]
    assert null_errors(times) == pytest.approx({"a": -0.75, "b": -0.5, "c": 1.0})


def test_the_null_baseline_ranks_rows_by_what_they_recompute() -> None:
    shares = (0.75, 0.8, 1.0)
    rows = [replace(e, is_time=True, rank_share=share) for e, share in zip(TABLE, shares, strict=True)]
    null = table_statistics(rows).null
    assert null is not None
    assert null.rank_correlation == pytest.approx(1.0)


def test_the_null_baseline_without_recomputation() -> None:
    # half of what c computes is recomputed: without it all rates are 10, 20 and 20
    rows = [*TABLE[:2], replace(TABLE[2], rank_share=0.5)]
    found = table_statistics(rows)
    assert found.null_model is not None
    # a: 20 of 20 and 20, +100 %; b: of 10 and 20, 10 errs by 0 and 1/2, 20 by 1 and 0: 10, -50 %; c as b
    assert found.null_model.mean == pytest.approx((1 + 0.5 + 0.5) / 3)
    assert found.null_model.rank_correlation is None
    assert table_statistics(TABLE).null_model is None


def test_a_baseline_needs_another_row() -> None:
    assert null_errors(TABLE[:1]) == {}
    assert table_statistics(TABLE[:1]).null is None
    assert fit_constant([]) is None


def test_fitted_and_unverified_rows_are_left_out() -> None:
    rows = [
        *TABLE,
        rate("f", 10, 15, fitted=True),
        rate("u", 10, 99, verified=False),
        rate("n", 10, None),
    ]
    found = table_statistics(rows)
    assert found.ours is not None
    assert found.ours_with_fitted is not None
    assert found.ours.mean == pytest.approx(0.2 / 3)
    assert found.ours_with_fitted.mean == pytest.approx((0.2 + 0.5) / 4)
    counts = (found.num_rows, found.num_held_out, found.num_fitted, found.num_unverified)
    assert counts == (6, 4, 1, 1)
    assert found.num_not_simulated == 1


def test_fitted_rows_help_the_baseline_unverified_ones_do_not() -> None:
    # of 20, 40 and the fitted 10 for a: 10 errs by 1/2, 3/4 and 0, 20 by 0, 1/2 and 1
    assert null_errors([*TABLE, rate("f", 10, 15, fitted=True)])["a"] == pytest.approx(0.0)
    # two more of 40 would make 40 the constant of a
    unverified = [rate(name, 40, 40, verified=False) for name in ("u", "v")]
    assert null_errors([*TABLE, *unverified])["a"] == pytest.approx(1.0)
    verified = [rate(name, 40, 40) for name in ("u", "v")]
    assert null_errors([*TABLE, *verified])["a"] == pytest.approx(3.0)


def test_rows_in_the_range_of_guesses() -> None:
    rows = [replace(TABLE[0], low=9, high=12), replace(TABLE[1], low=10, high=19), TABLE[2]]
    assert table_statistics(rows).in_range == (1, 2)
    assert table_statistics(TABLE).in_range is None


def test_figures_of_different_kinds_have_no_rank() -> None:
    other = replace(TABLE[2], row=replace(TABLE[2].row, quantity="peak_bytes", unit="GB"))
    found = table_statistics([*TABLE[:2], other])
    assert found.ours is not None
    assert found.ours.rank_correlation is None


def test_rank_correlation_by_hand() -> None:
    assert spearman([1, 2, 3], [10, 20, 30]) == pytest.approx(1.0)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    # ranks 1, 2.5, 2.5, 4 and 1, 3, 2, 4: 4.5 / sqrt(4.5 * 5)
    assert spearman([1, 2, 2, 3], [1, 3, 2, 4]) == pytest.approx(4.5 / 22.5**0.5)
    assert spearman([1, 2], [5, 5]) is None
    assert spearman([], []) is None
    with pytest.raises(ValueError, match="needs pairs"):
        spearman([1, 2], [1])


def test_gates_by_hand() -> None:
    tables = {"t": TABLE}

    def missed(measure: Measure, bound: float) -> bool:
        (verdict,) = judge(tables, [Gate(("t",), measure, bound)])
        return verdict.missed

    assert not missed(Measure.mean_error, 0.07)
    assert missed(Measure.mean_error, 0.06)
    assert not missed(Measure.largest_error, 0.11)
    assert missed(Measure.largest_error, 0.09)
    assert not missed(Measure.mean_over_null, 0.09)  # 0.0667 / 0.75 = 0.0889
    assert missed(Measure.mean_over_null, 0.08)
    assert not missed(Measure.least_ours, 11)
    assert missed(Measure.least_ours, 12)


def test_a_gate_over_two_tables_takes_their_rows_together() -> None:
    gate = Gate(("t", "s"), Measure.mean_error, 0.051)
    (verdict,) = judge({"t": TABLE, "s": [rate("d", 10, 10)]}, [gate])
    assert verdict.found == pytest.approx(0.05)
    assert not verdict.missed
    assert judge({"t": TABLE}, [gate]) == []


def test_a_row_that_is_not_simulated_misses_its_gate() -> None:
    gate = Gate(("t",), Measure.mean_error, 1.0)
    (verdict,) = judge({"t": [*TABLE, rate("n", 10, None)]}, [gate])
    assert verdict.missed
    assert "1 of 4 verified rows not simulated, n first" in verdict.sentence
    (verdict,) = judge({"t": [rate("n", 10, None)]}, [gate])
    assert verdict.missed
    assert verdict.found is None
    (verdict,) = judge({"t": [*TABLE, rate("n", 10, None, verified=False)]}, [gate])
    assert not verdict.missed
