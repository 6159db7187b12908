"""Ranks that are made slow are slower by about the factor, while it holds, and by what they still compute."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from twinbed.conf.conditions import Slowdown
from twinbed.conf.schema import SlowdownBy
from twinbed.runtime.balance.quota import Quota
from twinbed.runtime.balance.straggle import Straggler

Launch = Callable[..., list[Any]]
WIDE = 0.5


def least(found: Sequence[Sequence[float]], steps: Iterable[int]) -> float:
    """Of both halves; the least of some steps, for other processes of the machine run meanwhile."""
    return sum(min(found[step][half] for step in steps) for half in (0, 1))


@pytest.mark.distributed
@pytest.mark.timeout(400)
def test_slow_ranks_take_about_the_factor(launch: Launch) -> None:
    found = launch("ranks_straggle", "slept", 2, timeout_s=300.0)
    told = found[1]
    for how in ("device", "repeat"):
        check_slow_steps(told[how], how)
    # attention is as slow, and lies between products: 4 B H T T E flop of 2 blocks, backward twice as much
    core_ns = 2 * 3 * 4 * 2 * 4 * 32 * 32 * 8 / 5e8 * 1e9
    between, around = ([step[which] for step in told["device"]] for which in (2, 3))
    assert core_ns <= min(between[10:]) < 2 * core_ns
    assert min(between[4:10]) / min(between[10:]) == pytest.approx(3, rel=WIDE), between
    assert 0 < min(around) < core_ns
    pruned = told["pruned"]
    alone = least(pruned, range(1, 4))
    for steps, factor in (
        (range(4, 7), 3),
        (range(7, 10), 3 * 0.5),
        (range(10, 13), 3),  # it computes everything again
        (range(13, 16), 3 * 0.5),
    ):
        assert least(pruned, steps) / alone == pytest.approx(factor, rel=0.4), (steps, pruned)

    check_units(*(found[rank]["units"] for rank in (0, 1)))


@pytest.mark.distributed
@pytest.mark.long
@pytest.mark.timeout(400)
def test_measured_work_takes_about_the_factor(launch: Launch) -> None:
    found = launch("ranks_straggle", "measured", 2, timeout_s=300.0)
    told = found[1]
    for how in ("sleep", "repeat"):
        check_slow_steps(told[how], how)
    half = told["2.5 times"]
    assert least(half, range(8, 16)) / least(half, range(1, 8)) == pytest.approx(2.5, rel=WIDE), half
    check_units(*(found[rank]["units"] for rank in (0, 1)))


def check_slow_steps(told: Sequence[Sequence[float]], how: str) -> None:
    slow, else_ = least(told, range(4, 10)), least(told, (1, 2, 3, *range(10, 16)))
    assert slow / else_ == pytest.approx(3, rel=WIDE), (how, told)


def check_units(fast: Sequence[float], slow: Sequence[float]) -> None:
    assert min(slow[8:]) / min(slow[1:8]) == pytest.approx(4, rel=WIDE), slow
    assert min(fast[8:]) / min(fast[1:8]) < 2, fast


def test_seconds_count_from_the_first_step_and_factors_multiply() -> None:
    now = [5_000_000_000]
    straggler = Straggler(
        [
            Slowdown(0, 2.0, from_ns=1_000_000_000, until_ns=3_000_000_000),
            Slowdown(0, 3.0, from_step=7, until_step=8),
        ],
        SlowdownBy.sleep,
        now_ns=lambda: now[0],
    )
    assert straggler.factor == 1
    straggler.step_begins(4)
    assert straggler.stretch == 1
    now[0] += 1_000_000_000
    assert straggler.stretch == 2
    straggler.step_begins(7)
    assert straggler.stretch == 6
    assert straggler.repeats == 0
    now[0] += 2_000_000_000
    assert straggler.stretch == 3
    straggler.step_begins(8)
    assert straggler.stretch == 1


def test_repeats_are_what_comes_on_top() -> None:
    straggler = Straggler([Slowdown(0, 2.5)], SlowdownBy.repeat)
    straggler.step_begins(0)
    assert (straggler.repeats, straggler.stretch) == (1.5, 1.0)


@pytest.mark.distributed
@pytest.mark.timeout(60)
@pytest.mark.parametrize("share", [0.25])
def test_a_quota_stops_a_process_in_turns(share: float) -> None:
    script = (
        "import sys\n"
        "from twinbed.runtime.balance.quota import Quota\n"
        "quota = Quota()\n"
        "for line in sys.stdin:\n"
        "    quota.set(float(line))\n"
        "    print(quota._watcher.pid, flush=True)\n"
        "quota.close()\n"
        "print(quota._watcher, flush=True)\n"
    )
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", script], **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def told(share: float) -> int:
            print(share, file=process.stdin, flush=True)
            return int(process.stdout.readline())

        watcher = told(share)
        time.sleep(0.5)
        # Whether it is stopped, not how fast it is: other processes may want the processor too
        assert 1 - _stopped(process.pid, during_s=2) == pytest.approx(share, rel=0.4)
        assert told(1.0) == watcher
        time.sleep(0.3)
        assert _stopped(process.pid, during_s=1) == 0
        process.stdin.close()
        assert process.stdout.read() == "None\n"
        assert process.wait(10) == 0
    assert not _runs(watcher)


def _stopped(pid: int, *, during_s: float) -> float:
    """Share of the time."""
    states = []
    until = time.monotonic() + during_s
    while time.monotonic() < until:
        states.append(_state(pid))
        time.sleep(0.002)
    return states.count("T") / len(states)


@pytest.mark.distributed
@pytest.mark.timeout(60)
@pytest.mark.parametrize("end", ["kill", "leave"])
def test_a_watcher_ends_with_its_process(end: str) -> None:
    script = (
        "import os, sys, time\n"
        "from twinbed.runtime.balance.quota import Quota\n"
        "quota = Quota()\n"
        "quota.set(0.1)\n"
        "print(quota._watcher.pid, flush=True)\n"
        "time.sleep(0.3)\n"
        f"{'time.sleep(60)' if end == 'kill' else 'os._exit(7)'}\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    watcher = int(process.stdout.readline())
    if end == "kill":
        time.sleep(0.5)
        process.kill()
    assert process.wait(10) == (-9 if end == "kill" else 7)
    process.stdout.read()  # until the watcher too has let go of it
    process.stdout.close()
    deadline = time.monotonic() + 5
    while _runs(watcher):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    return _state(pid) not in (None, "Z")


def _state(pid: int) -> str | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
            return stat.read().rpartition(")")[2].split()[0]
    except OSError:
        return None


@pytest.mark.parametrize("share", [0.0, 1.5, -1.0])
def test_a_share_is_between_nothing_and_all(share: float) -> None:
    with pytest.raises(ValueError, match="share"):
        Quota().set(share)
