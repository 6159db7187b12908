"""What a rank's blocks took, by half: between a clock's marks on a CPU, between events of a stream on a GPU.

Products are timed, and what lies between marks that are there anyway: between a half's two products is attention, or
the activation; between a half's sum, once it has arrived, and the other half's product is a norm, within a block.
"""

import time
from dataclasses import dataclass

import torch

from ...policies.balance import Half

Mark = int | torch.cuda.Event
_Place = tuple[str, Half | None]  # what is added up: of a half, or of both

_BEFORE = {False: Half.attention, True: Half.ffn}  # the half that is first within a block: forward, backward


@dataclass(frozen=True, slots=True)
class Took:
    """Nanoseconds.

    Attributes:
        products, between: By half: its products; between them.
        around: Around them, of both halves.
    """

    products: dict[Half, int]
    between: dict[Half, int]
    around: int


@dataclass(frozen=True, slots=True)
class _Open:
    """What a product that begins next is behind: a product's end, or the arrival of a half's sum."""

    half: Half
    backward: bool
    is_sum: bool
    since: Mark

    def place(self, half: Half, *, backward: bool) -> _Place | None:
        """Of what has passed until a product of `half` begins; None: it is of no block, or of several."""
        if backward != self.backward:
            return None
        if not self.is_sum:
            return ("between", half) if half is self.half else None
        return ("around", None) if half is not self.half is _BEFORE[backward] else None


class Stopwatch:
    """Adds up until it is read.

    A GPU's events are only looked at then: nothing waits for the device in between.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._ns: dict[_Place, int] = {}
        self._events: list[tuple[_Place, torch.cuda.Event, torch.cuda.Event]] = []
        self._open: _Open | None = None

    def begins(self, half: Half, *, backward: bool = False) -> Mark:
        """A product does."""
        now = self.mark()
        if self._open is not None:
            place = self._open.place(half, backward=backward)
            if place is not None:
                self._add(place, self._open.since, now)
        self._open = None
        return now

    def reaches(self, half: Half) -> None:
        """Forward has come to a product that does not begin yet: it may have to wait, or its columns are chosen."""
        self.begins(half)

    def ends(self, half: Half, since: Mark, *, backward: bool = False) -> None:
        """A product does, that began then."""
        now = self.mark()
        self._add(("products", half), since, now)
        self._open = _Open(half, backward, is_sum=False, since=now)

    def sum_arrives(self, half: Half, *, backward: bool) -> None:
        """The sum of a half's outputs is there, or of its inputs' gradients."""
        self._open = _Open(half, backward, is_sum=True, since=self.mark())

    def mark(self) -> Mark:
        """Now: on the current stream, of a GPU."""
        if not self._on_gpu:
            return time.monotonic_ns()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def add(self, half: Half, since: Mark) -> None:
        """What has passed since a mark was of a product of `half`; what lies between is not asked for."""
        self._add(("products", half), since, self.mark())

    def _add(self, place: _Place, since: Mark, until: Mark) -> None:
        if isinstance(since, int):
            assert isinstance(until, int)
            self._ns[place] = self._ns.get(place, 0) + until - since
            return
        assert isinstance(until, torch.cuda.Event)
        self._events.append((place, since, until))

    def read(self) -> Took:
        """Since the last time; begins anew."""
        for place, since, until in self._events:
            until.synchronize()
            self._ns[place] = self._ns.get(place, 0) + round(since.elapsed_time(until) * 1e6)
        self._events.clear()
        found, self._ns, self._open = self._ns, {}, None
        products, between = (
            {half: found.get((what, half), 0) for half in Half} for what in ("products", "between")
        )
        # Of the two norms of a block one follows a sum within it. What the other follows may have come from a
        # neighbour, or waited for weights; it takes as long.
        return Took(products, between, 2 * found.get(("around", None), 0))
