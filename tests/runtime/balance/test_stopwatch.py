"""What a stopwatch makes of the marks of a block: products, what is between them, what is around them."""

import pytest
import torch

from twinbed.policies.balance import Half
from twinbed.runtime.balance import stopwatch as module
from twinbed.runtime.balance.stopwatch import Stopwatch

A, F = Half.attention, Half.ffn


class Clock:
    """Stands still until it is told."""

    def __init__(self) -> None:
        self.now = 0

    def monotonic_ns(self) -> int:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def product(watch: Stopwatch, clock: Clock, half: Half, ns: int, *, backward: bool = False) -> None:
    since = watch.begins(half, backward=backward)
    clock.now += ns
    watch.ends(half, since, backward=backward)


def forward(watch: Stopwatch, clock: Clock, half: Half) -> None:
    """Reached 7 ns after the sum; waits 1,000 ns; 10 and 20 ns of products, 5 between; 100 ns of a sum."""
    clock.now += 7
    watch.reaches(half)
    clock.now += 1_000
    product(watch, clock, half, 10)
    clock.now += 5
    watch.reaches(half)
    clock.now += 1_000
    product(watch, clock, half, 20)
    clock.now += 100
    watch.sum_arrives(half, backward=False)


def backward(watch: Stopwatch, clock: Clock, half: Half) -> None:
    clock.now += 11
    product(watch, clock, half, 40, backward=True)
    clock.now += 9
    product(watch, clock, half, 20, backward=True)
    clock.now += 100
    watch.sum_arrives(half, backward=True)


def test_waiting_and_sums_are_left_out(clock: Clock) -> None:
    """Of two blocks; what follows the sum at a block's end may be another rank's, and is taken for as long."""
    watch = Stopwatch(torch.device("cpu"))
    for _ in range(2):
        forward(watch, clock, A)
        forward(watch, clock, F)
    for _ in range(2):
        backward(watch, clock, F)
        backward(watch, clock, A)
    took = watch.read()
    assert took.products == {A: 2 * (30 + 60), F: 2 * (30 + 60)}
    assert took.between == {A: 2 * (5 + 9), F: 2 * (5 + 9)}
    assert took.around == 2 * 2 * (7 + 11)


def test_it_begins_anew(clock: Clock) -> None:
    watch = Stopwatch(torch.device("cpu"))
    forward(watch, clock, A)
    watch.read()
    clock.now += 10**6  # validation, or the optimizer
    forward(watch, clock, F)
    took = watch.read()
    assert (took.products[A], took.between[A], took.around) == (0, 0, 0)
    assert (took.products[F], took.between[F]) == (30, 5)


def test_matrices_that_share_an_input_are_one_product(clock: Clock) -> None:
    """Little lies between them, and it goes with units."""
    watch = Stopwatch(torch.device("cpu"))
    for _ in range(3):
        product(watch, clock, A, 10)
        clock.now += 1
    took = watch.read()
    assert (took.products[A], took.between[A]) == (30, 2)


def test_forward_again_for_backward_ends_with_no_sum(clock: Clock) -> None:
    """Recomputing stops at the last product; loss and backward of that product are not between products."""
    watch = Stopwatch(torch.device("cpu"))
    product(watch, clock, F, 10)
    clock.now += 500
    product(watch, clock, F, 20, backward=True)
    assert watch.read().between[F] == 0
