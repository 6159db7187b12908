"""Static shares, and chunks that come and go by Belady's rule: two answers to what lies near."""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from math import ceil, inf

from ...conf.schema.offload import OffloadConf
from .chunks import spread_far
from .policy import (
    Chunk,
    ChunkNeeded,
    ChunkOutdated,
    ChunkReleased,
    ChunkStep,
    Evict,
    Fetch,
    IterationBegins,
    Kind,
    OffloadAction,
    OffloadEvent,
    Place,
    Prefetch,
    Step,
)


class _Pager(ABC):
    """What both policies share: what is near and in use, and the recorded orders of use.

    Subclasses say what happens to a chunk that is not in use any more, and which chunks may be evicted.
    """

    def __init__(self, conf: OffloadConf, chunks: Sequence[Chunk], *, memory_bytes: float) -> None:
        self._conf = conf
        self._memory_bytes = memory_bytes
        self._chunks = {chunk.name: chunk for chunk in chunks}
        self._index = {name: i for i, name in enumerate(self._chunks)}
        if len(self._chunks) != len(chunks):
            raise ValueError("two chunks have the same name")
        self._steps_far = conf.name == "cpu"  # a host has cores, a disk has none
        far = self._far_at_first()
        self._stays = frozenset(name for name in self._chunks if name not in far)
        self._near = {name: None for name in self._chunks if name in self._stays}  # the last used last
        self._held = sum(self._chunks[name].nbytes for name in self._near)
        self._uses: dict[str, int] = {}
        self._changed: dict[str, None] = {}
        self._orders: dict[str, list[str]] = {}
        self._places: dict[str, dict[str, list[int]]] = {}  # of each chunk in each order
        self._kind: str | None = None
        self._records = False
        self._at = 0  # uses of this iteration so far
        self._check_fits()

    @property
    def chunks(self) -> Mapping[str, Chunk]:
        return self._chunks

    @property
    def near_bytes(self) -> int:
        return self._held

    @property
    def budget_bytes(self) -> float:
        """That chunks may take: near memory without what is kept for activations."""
        return self._memory_bytes * (1.0 - self._conf.activations) if self._memory_bytes < inf else inf

    def place(self, chunk: str) -> Place:
        return Place.near if self._find(chunk).name in self._near else Place.far

    def stays(self, chunk: str) -> bool:
        return self._find(chunk).name in self._stays

    @property
    def changed(self) -> tuple[str, ...]:
        return tuple(self._changed)

    def state(self) -> tuple[object, ...]:
        orders = tuple((kind, tuple(order)) for kind, order in self._orders.items())
        uses = tuple(sorted(self._uses.items()))
        return (tuple(self._near), tuple(self._changed), uses, orders, self._kind, self._records, self._at)

    def decide(self, event: OffloadEvent) -> tuple[OffloadAction, ...]:
        match event:
            case IterationBegins():
                self._begin(event.kind)
                return ()
            case ChunkNeeded():
                return tuple(self._use(self._find(event.chunk)))
            case ChunkStep():
                chunk = self._find(event.chunk)
                if self._steps_far and chunk.name not in self._near:
                    return (Step(chunk.name, Place.far),)
                return (*self._use(chunk), Step(chunk.name, Place.near))
            case ChunkReleased():
                return tuple(self._release(self._find(event.chunk), event.changed))
            case ChunkOutdated():
                return tuple(self._outdated(self._find(event.chunk)))
        raise ValueError(f"{event!r} is no offload event")

    @abstractmethod
    def _far_at_first(self) -> frozenset[str]:
        """Chunks that begin outside."""

    @abstractmethod
    def _victims(self, before: int | None) -> list[str]:
        """Chunks that may go, the first to go first; `before`: only those used later than at this place."""

    @abstractmethod
    def _unused(self, chunk: Chunk) -> list[OffloadAction]:
        """What to do with a chunk that nobody uses any more."""

    def _find(self, name: str) -> Chunk:
        if name not in self._chunks:
            raise ValueError(f"chunk={name!r}: there is no such chunk; use one of {list(self._chunks)[:8]}")
        return self._chunks[name]

    def _begin(self, kind: str) -> None:
        if self._records and self._kind is not None:
            places: dict[str, list[int]] = {}
            for at, name in enumerate(self._orders[self._kind]):
                places.setdefault(name, []).append(at)
            self._places[self._kind] = places
        self._kind, self._at = kind, 0
        self._records = kind not in self._orders
        if self._records:
            self._orders[kind] = []

    def _use(self, chunk: Chunk) -> list[OffloadAction]:
        name = chunk.name
        self._advance(name)
        actions: list[OffloadAction] = []
        self._uses[name] = self._uses.get(name, 0) + 1
        if name in self._near:
            self._near[name] = self._near.pop(name)
        else:
            room = self._room(chunk, None)
            if room is None:
                # What stays or is in use cannot go
                kept = sum(self._chunks[n].nbytes for n in self._near if n in self._stays or n in self._uses)
                what = f"chunk {name!r} of {chunk.nbytes / 1e6:.3f} MB"
                raise ValueError(self._short(what, enough=kept + chunk.nbytes))
            actions += [*room, Fetch(name)]
            self._enter(chunk)
        return actions + self._ahead()

    def _advance(self, name: str) -> None:
        """Note a use, and find the place in the recorded order again if this use came unexpectedly."""
        if self._kind is None:
            self._begin("train")
        assert self._kind is not None
        if self._records:
            self._orders[self._kind].append(name)
            self._at += 1
            return
        known = self._places[self._kind].get(name, [])
        later = known[bisect_left(known, self._at) :]
        self._at = (later[0] if later else known[0] if known else self._at) + 1

    def _next_use(self, name: str) -> int:
        """Uses until this chunk's next one; after all others if none is known."""
        assert self._kind is not None
        length = len(self._orders[self._kind])
        known = self._places.get(self._kind, {}).get(name, [])
        at = bisect_left(known, self._at)
        if at < len(known):
            return known[at] - self._at
        return known[0] + length - self._at if known else 2 * length

    def _ahead(self) -> list[OffloadAction]:
        """Prefetches of the next uses in this iteration, as far as they fit."""
        if self._records or self._kind is None or not self._conf.prefetch:
            return []
        actions: list[OffloadAction] = []
        order, left = self._orders[self._kind], self._conf.prefetch
        for place, name in enumerate(order[self._at : self._at + left]):
            if name in self._near:
                continue
            chunk = self._chunks[name]
            room = self._room(chunk, place)
            if room is None:
                break
            actions += [*room, Prefetch(name)]
            self._enter(chunk)
        return actions

    def _room(self, chunk: Chunk, before: int | None) -> list[OffloadAction] | None:
        """Evictions that make room for the chunk; None: it does not fit.

        Args:
            before: The chunk's own next use: nothing goes that is used earlier. None: it is needed now.
        """
        wanted, limit = self._soft_limit(), self.budget_bytes
        free, gone = self._held + chunk.nbytes, []
        if free > wanted:
            for name in self._victims(before):
                gone.append(name)
                free -= self._chunks[name].nbytes
                if free <= wanted:
                    break
        if free > (limit if before is None else wanted):
            return None
        return [self._evict(name) for name in gone]

    def _soft_limit(self) -> float:
        return self.budget_bytes

    def _enter(self, chunk: Chunk) -> None:
        self._near[chunk.name] = None
        self._held += chunk.nbytes

    def _evict(self, name: str, *, write_back: bool = True) -> Evict:
        self._near.pop(name)
        self._held -= self._chunks[name].nbytes
        changed = name in self._changed
        self._changed.pop(name, None)
        return Evict(name, write_back and changed)

    def _release(self, chunk: Chunk, changed: bool) -> list[OffloadAction]:
        uses = self._uses.get(chunk.name, 0)
        if not uses:
            raise RuntimeError(f"chunk {chunk.name!r} is released, but it is not in use")
        if changed:
            self._changed[chunk.name] = None
        if uses > 1:
            self._uses[chunk.name] = uses - 1
            return []
        del self._uses[chunk.name]
        return [] if chunk.name in self._stays else self._unused(chunk)

    def _outdated(self, chunk: Chunk) -> list[OffloadAction]:
        if chunk.name in self._uses:
            raise RuntimeError(f"chunk {chunk.name!r} is changed in far memory while it is in use near")
        if chunk.name not in self._near:
            return []
        if chunk.name in self._stays:
            return [Fetch(chunk.name)]
        return [self._evict(chunk.name, write_back=False)]

    def _check_fits(self) -> None:
        """A unit's parameters are needed together, in a step beside one chunk of its states."""
        parameters: dict[str, int] = {}
        others: dict[str, Chunk] = {}
        for chunk in self._chunks.values():
            if not self._comes_near(chunk):
                continue
            if chunk.kind is Kind.parameters:
                parameters[chunk.unit] = parameters.get(chunk.unit, 0) + chunk.nbytes
            elif chunk.nbytes > (others[chunk.unit].nbytes if chunk.unit in others else -1):
                others[chunk.unit] = chunk
        needed = {
            unit: parameters.get(unit, 0) + (others[unit].nbytes if unit in others else 0)
            for unit in dict.fromkeys((*parameters, *others))
        }
        largest = max(needed, key=lambda unit: needed[unit], default="")
        most = needed.get(largest, 0)
        if self._held + most > self.budget_bytes:
            what = (
                f"unit {largest!r}, which needs {most / 1e6:.3f} MB at once"
                if most
                else "what always lies near"
            )
            raise ValueError(self._short(what, enough=self._held + most))

    def _comes_near(self, chunk: Chunk) -> bool:
        """Whether a chunk that begins far is ever fetched."""
        return chunk.name not in self._stays and not (self._steps_far and chunk.kind is not Kind.parameters)

    def _short(self, what: str, *, enough: int) -> str:
        """What is too small, and what would do: room for `enough` bytes of chunks at once."""
        conf = self._conf
        in_use = sum(self._chunks[name].nbytes for name in self._uses if name in self._near)
        stays = sum(self._chunks[name].nbytes for name in self._stays)
        least = ceil(enough / (1.0 - conf.activations))
        ways = [f"offload.memory_bytes={least}"]
        if stays:
            shares = [key for key in ("parameters", "optimizer") if getattr(conf, key) < 1]
            ways += [f"a larger share outside (offload.{key}={getattr(conf, key):g})" for key in shares]
        if any(chunk.kind is not Kind.parameters for chunk in self._chunks.values()):
            now = "null" if conf.chunk_bytes is None else conf.chunk_bytes
            ways.append(f"smaller chunks (offload.chunk_bytes, now {now}; simulated only)")
        return (
            f"offload.memory_bytes={self._memory_bytes:.0f} is too small for {what}: offload.activations="
            f"{conf.activations:g} leaves {self.budget_bytes / 1e6:.3f} MB of it, of which {stays / 1e6:.3f} MB always "
            f"lie near and {in_use / 1e6:.3f} MB are in use; give {', or '.join(ways)}"
        )


class StaticOffload(_Pager):
    """Stated shares of parameters and optimizer states lie far: fetched when needed, evicted when released.

    A released chunk that is among the next `offload.prefetch` uses stays.
    """

    name = "static"

    def _far_at_first(self) -> frozenset[str]:
        far: frozenset[str] = frozenset()
        for kind in Kind:
            share = self._conf.parameters if kind is Kind.parameters else self._conf.optimizer
            far |= spread_far([chunk for chunk in self._chunks.values() if chunk.kind is kind], share)
        return far

    def _victims(self, before: int | None) -> list[str]:
        """A chunk that was fetched ahead or kept, if what is needed now has no room."""
        if before is not None:
            return []
        return [name for name in self._near if name not in self._uses and name not in self._stays]

    def _unused(self, chunk: Chunk) -> list[OffloadAction]:
        if self._kind is not None and not self._records:
            order = self._orders[self._kind]
            if chunk.name in order[self._at : self._at + self._conf.prefetch]:
                return []
        return [self._evict(chunk.name)]


class AutoOffload(_Pager):
    """Chunks come near when needed and stay until room is needed: the one whose next use is the farthest goes.

    Belady's rule, on the order of use that the first iteration of each kind recorded; while it records, the least
    recently used goes (Gemini's chunk manager: its placement policy "auto"). Optimizer states that lie far and can
    be stepped there (offload=cpu) never come near.
    """

    name = "auto"

    def _far_at_first(self) -> frozenset[str]:
        chunks = list(self._chunks.values())
        far = frozenset(chunk.name for chunk in chunks if chunk.kind is Kind.parameters)
        for kind in (Kind.gradients, Kind.optimizer):
            far |= spread_far([chunk for chunk in chunks if chunk.kind is kind], self._conf.optimizer)
        return far

    def _soft_limit(self) -> float:
        if not self._records or self._memory_bytes == inf:
            return self.budget_bytes
        return self._memory_bytes * (1.0 - self._conf.warmup_activations)

    def _victims(self, before: int | None) -> list[str]:
        free = [name for name in self._near if name not in self._uses and name not in self._stays]
        if self._records:
            return free
        later = [(self._next_use(name), self._index[name], name) for name in free]
        return [name for use, _, name in sorted(later, reverse=True) if before is None or use > before]

    def _unused(self, chunk: Chunk) -> list[OffloadAction]:
        return []
