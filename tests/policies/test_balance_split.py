"""Units shared out: against all ways that there are, against closed forms, and what of it moves."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinbed.policies.balance import Half
from twinbed.policies.balance.split import (
    least_room_bytes,
    lend,
    lossless_ceiling,
    room_for_units,
    split_units,
)

from .balance_group import work_of

times = st.lists(st.sampled_from([1.0, 1.2, 1.7, 2.0, 3.0, 4.5, 8.0]), min_size=1, max_size=4)
MIX = (8.0, 6.0, 4.0, 2.0, 1.0, 1.0, 1.0, 1.0)


def one_of_eight(chi: float) -> tuple[float, ...]:
    return (chi, *(1.0,) * 7)


@given(unit_ns=times, total=st.integers(0, 9), data=st.data())
@settings(max_examples=150, deadline=None)
def test_no_way_to_share_units_out_ends_earlier(
    unit_ns: list[float], total: int, data: st.DataObject
) -> None:
    limit = st.integers(0, total)
    most = data.draw(st.lists(limit, min_size=len(unit_ns), max_size=len(unit_ns)))
    ways = [way for way in itertools.product(*(range(limit + 1) for limit in most)) if sum(way) == total]
    if not ways:
        with pytest.raises(ValueError, match="have room for"):
            split_units(unit_ns, total, most)
        return

    def longest(way: tuple[int, ...]) -> float:
        return max(time * units for time, units in zip(unit_ns, way, strict=True))

    found = split_units(unit_ns, total, most)
    assert found in ways
    assert longest(found) == pytest.approx(min(map(longest, ways)))


@given(unit_ns=times, total=st.integers(0, 5000))
@settings(deadline=None)
def test_many_units_are_given_one_by_one_to_who_is_done_first(unit_ns: list[float], total: int) -> None:
    given_units = [0] * len(unit_ns)
    for _ in range(total):
        first = min(range(len(unit_ns)), key=lambda i: ((given_units[i] + 1) * unit_ns[i], i))
        given_units[first] += 1
    longest = max(time * units for time, units in zip(unit_ns, given_units, strict=True))
    found = split_units(unit_ns, total)
    assert max(time * units for time, units in zip(unit_ns, found, strict=True)) == pytest.approx(longest)


def test_four_ranks_one_at_half_speed() -> None:
    slowness = (1.0, 1.0, 1.0, 2.0)
    assert split_units(slowness, 28) == (8, 8, 8, 4)
    # an even split takes twice as long as four equal ranks, the best 8/7
    assert 2 / lossless_ceiling(slowness) == pytest.approx(8 / 7)
    shares = split_units(slowness, 7_000_000)
    assert [share / 7_000_000 for share in shares] == pytest.approx([2 / 7, 2 / 7, 2 / 7, 1 / 7])


def test_four_key_heads_of_four_ranks_do_not_move_and_hidden_units_do() -> None:
    (heads,) = lend((1.0, 1.0, 1.0, 2.0), 1, (9,) * 4)
    assert not any(heads.lent)
    (units,) = lend((1.0, 1.0, 1.0, 2.0), 700, (10**6,) * 4)
    assert units.lent == (0, 0, 0, 300)
    assert units.borrowed == (100, 100, 100, 0)


@pytest.mark.parametrize(("chi", "gain"), [(2, 1.88), (4, 3.62), (6, 5.38), (8, 7.12)])
def test_closed_form_of_one_straggler_and_seven_helpers(chi: float, gain: float) -> None:
    moved = (chi - 1) / (chi + 1 / 7)  # m*
    assert lossless_ceiling(one_of_eight(chi)) == pytest.approx(1 / (1 - moved))
    assert lossless_ceiling(one_of_eight(chi)) == pytest.approx(gain, abs=0.0051)
    (found,) = lend(one_of_eight(chi), 100_000, (10**6,) * 8)
    assert found.lent[0] / 100_000 == pytest.approx(moved, abs=1e-4)


def test_ceilings_of_a_mix() -> None:
    assert lossless_ceiling(MIX) == pytest.approx(8 / 1.587, abs=2e-3)
    assert lossless_ceiling(MIX) == pytest.approx(5.04, abs=2e-3)
    # whole heads are coarser: two each make three of the fast ranks' where four rest with nobody
    work = work_of(8, heads=16)
    assert work.units[Half.attention] == 2
    integral = lossless_ceiling(MIX, work)
    assert 4 < integral < 5.04
    heads = max(slow * units for slow, units in zip(MIX, split_units(MIX, 16), strict=True)) / 2
    ffn_units = work.units[Half.ffn]
    hidden = (
        max(slow * units for slow, units in zip(MIX, split_units(MIX, 8 * ffn_units), strict=True))
        / ffn_units
    )
    one = work.units[Half.attention] * work.unit_flop[Half.attention]
    other = ffn_units * work.unit_flop[Half.ffn]
    assert integral == pytest.approx(8 * (one + other) / (heads * one + hidden * other))


@given(
    unit_ns=st.lists(st.floats(0.5, 9), min_size=2, max_size=8),
    own=st.integers(1, 600),
    share=st.floats(0, 1),
    data=st.data(),
)
@settings(deadline=None)
def test_what_is_lent(unit_ns: list[float], own: int, share: float, data: st.DataObject) -> None:
    ranks = range(len(unit_ns))
    room = data.draw(st.lists(st.integers(0, 700), min_size=len(unit_ns), max_size=len(unit_ns)))
    best, part, none = lend(unit_ns, own, room, (1.0, share, 0.0), at_least=1)
    assert not any(none.lent)
    best_ns = max(
        time * units
        for time, units in zip(
            unit_ns, split_units(unit_ns, own * len(unit_ns), [own + more for more in room]), strict=True
        )
    )
    even_ns = own * max(unit_ns)
    for found, upto_ns in ((best, best_ns), (part, even_ns - share * (even_ns - best_ns))):
        assert sum(found.lent) == sum(found.borrowed)
        assert min(found.lent) >= 0
        assert max(found.lent) < own or own == 1
        assert all(not (found.lent[rank] and found.borrowed[rank]) for rank in ranks)
        assert all(found.borrowed[rank] <= room[rank] for rank in ranks)
        counts = [own - found.lent[rank] + found.borrowed[rank] for rank in ranks]
        # that each keeps one unit can make it later
        floor_ns = max(upto_ns, *(time for time in unit_ns))
        assert max(unit_ns[rank] * counts[rank] for rank in ranks) <= floor_ns * (1 + 1e-6)
        parts = found.parts()
        assert tuple(map(sum, parts)) == found.lent
        assert tuple(map(sum, zip(*parts, strict=True))) == found.borrowed
        lenders, helpers = (sum(map(bool, each)) for each in (found.lent, found.borrowed))
        assert sum(bool(units) for row in parts for units in row) <= max(0, lenders + helpers - 1)
    assert sum(part.lent) <= sum(best.lent)


def test_few_ranks_get_a_message_where_that_is_as_good() -> None:
    (found,) = lend(one_of_eight(2.0), 2, (9,) * 8)  # one head is all that moves
    assert found.lent[0] == 1
    assert found.borrowed == (0, 1, 0, 0, 0, 0, 0, 0)
    # four units on three ranks: two of one rank in any case, so two of a second are as good
    (found,) = lend((9.0, 1.0, 1.0, 1.0), 4, (9,) * 4)
    assert found.lent == (4, 0, 0, 0)
    assert found.borrowed == (0, 2, 2, 0)


def test_memory_bounds_what_is_borrowed() -> None:
    work = work_of(4)
    literal = {half: work.blocks * work.unit_bytes(half) * 2 for half in Half}
    free = 5 * literal[Half.ffn]
    none = dict.fromkeys(Half, (0,) * 4)
    for half, rooms in room_for_units(work, (free, -1, 0, 1 << 50), none).items():
        assert rooms[0] <= free // literal[half]
        assert rooms[1:3] == (0, 0)
        assert rooms[3] > 4 * work.units[half]
    full = 2 * work.blocks * sum(work.units[half] * work.unit_bytes(half) for half in Half)
    assert room_for_units(work, (full, full // 2, 0, 0), none)[Half.ffn] == (
        work.units[Half.ffn],
        work.units[Half.ffn] // 2,
        0,
        0,
    )
    least = least_room_bytes(work)
    rooms = room_for_units(work, (least, least - 1, 0, 0), none).values()
    assert max(room[0] for room in rooms) == 1
    assert max(room[1] for room in rooms) == 0
    by_columns = replace(work, by_columns=True)  # the lent columns of a second product's input are there too
    inputs = work.blocks * sum(
        work.units[half] * work.unit_features[half] * work.tokens * work.element_bytes for half in Half
    )
    for bytes_, units in ((full + inputs, work.units[Half.ffn]), (full, None)):
        (found, *_) = room_for_units(by_columns, (bytes_, 0, 0, 0), none)[Half.ffn]
        assert found == units if units is not None else found < work.units[Half.ffn]
    has = dict.fromkeys(Half, (0, 7, 0, 0))  # that it holds now can stay
    assert room_for_units(work, (0, 0, 0, 0), has)[Half.ffn] == (0, 7, 0, 0)


@pytest.mark.parametrize("slowness", [(), (1.0, 0.0), (1.0, -2.0)])
def test_no_ceiling_without_speeds(slowness: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="slowness="):
        lossless_ceiling(slowness)
