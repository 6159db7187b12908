"""The links of a folded simulation: one stands for all that are loaded alike at all times.

Links of one level are alike if every use of the run loads them equally, for the same circle of classes; the
slowest of them counts. So the number of links grows with the number of different loads, not of ranks. Trees and
chains, which load nearly all nodes as a ring does, set no links apart: among alike ones the fullest counts.
"""

from collections.abc import Callable, Collection, Iterable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ..conf.schema import ClusterConf
from ..policies.mesh import Mesh
from .classes import Fold
from .conditions import Conditions
from .levels import CHAIN, MESSAGE, NIC, OWN, PAIRWISE, PCIE, RING, TREE, Level, Part, Traffic, Use
from .network import Network, Route
from .topology import Link

Index = NDArray[np.int64]

CHANGING = (OWN, PCIE, NIC)  # levels whose links can have a slowdown


class Wires:
    """Routes of folded flows.

    Args:
        uses: All that the run will ask for, but trees and chains.
        exchanges: Axes over which some ranks may send to each other before others have come.
    """

    def __init__(
        self,
        cluster: ClusterConf,
        fold: Fold,
        traffic: Traffic,
        conditions: Conditions,
        uses: Iterable[Use],
        exchanges: Collection[str] = (),
    ) -> None:
        self._fold = fold
        self._traffic = traffic
        self._conditions = conditions
        self._slots = traffic.slots
        self._uses = tuple(dict.fromkeys(uses))
        self._both_ways = any(use.pattern == MESSAGE for use in self._uses)
        self._numbers = {use: self._number_circles(use) for use in self._uses}
        self._exchanges = frozenset(exchanges)
        self._kinds = {level.name: _Kind(level, *self._group(level)) for level in traffic.levels}
        self._routes: dict[tuple[Use, int], Route] = {}
        self._parts: dict[tuple[str, tuple[int, ...], tuple[int, ...]], Route] = {}

    def ring(self, axis: str, of_class: int) -> Route:
        """Of the rings of all groups in which this class and its circle meet."""
        return self.route(Use(axis, RING), of_class)

    def part(self, axis: str, come: tuple[int, ...], here: tuple[int, ...]) -> Route:
        """Of what ranks of classes that have just come exchange among themselves, and with those that are here.

        The loads are of all that one rank sends when each sends to each, as those of the pairwise use.
        """
        key = (axis, come, here)
        known = self._parts.get(key)
        if known is None:
            masks = [np.isin(self._fold.of, classes) for classes in (come, here)]
            part = Part(*masks)
            ranks: Index = np.flatnonzero(masks[0] | masks[1])
            use = Use(axis, PAIRWISE)
            loads_of = partial(self._traffic.part, use, part=part)
            known = self._parts[key] = self._loaded(ranks, loads_of)
        return known

    def own(self, axis: str, of_class: int) -> Route:
        """The ranks' own links alone."""
        return self._at(OWN, Use(axis, RING), of_class, 1.0)

    def nics(self, axis: str, of_class: int, load: float) -> Route:
        """The NICs of the nodes of this circle alone, each loaded so often."""
        return self._at(NIC, Use(axis, RING), of_class, load)

    def message(self, axis: str, shift: int, of_class: int) -> Route:
        """From each rank of a class to the one `shift` places further: out at one end, in at the other."""
        use = Use(axis, MESSAGE, shift)
        key = (use, int(self._numbers[use][of_class]))
        known = self._routes.get(key)
        if known is None:
            ranks = self._members(use, of_class)
            slots, to = self._slots[ranks], self._slots[self._traffic.to(use)[ranks]]
            route: dict[Link, float] = {}
            for level in self._traffic.levels:
                loads = self._traffic.loads(use, level)[ranks]
                kind = self._kinds[level.name]
                kind.add(route, kind.up, slots // level.block, loads)
                if level.name != "host":  # the load of a host's memory holds both ends
                    kind.add(route, kind.down, to // level.block, loads)
            known = self._routes[key] = tuple(route.items())
        return known

    def set_changes(self, network: Network) -> None:
        """Let links change when their conditions do."""
        kinds = [self._kinds[name] for name in CHANGING if name in self._kinds]
        for at_ns in self._conditions.link_changes_ns():

            def change(_: object, now_ns: int = at_ns) -> None:
                for kind in kinds:
                    for group, capacity in enumerate(self._capacities(kind.level, kind.groups, now_ns)):
                        for link in (kind.up[group], kind.down[group]):
                            if link.capacity != capacity:
                                network.change(link, capacity)

            network.env.timeout(at_ns - network.env.now).callbacks.append(change)

    def route(self, use: Use, of_class: int) -> Route:
        """Of a use of all groups in which this class and its circle meet; not of messages."""
        of_axis = Use(use.axis, RING) if use.pattern in (TREE, CHAIN) else use
        key = (use, int(self._numbers[of_axis][of_class]))
        known = self._routes.get(key)
        if known is None:
            loads_of = partial(self._traffic.loads, use)
            known = self._routes[key] = self._loaded(self._members(use, of_class), loads_of)
        return known

    def _loaded(self, ranks: Index, loads_of: Callable[[Level], NDArray[np.float64]]) -> Route:
        route: dict[Link, float] = {}
        slots = self._slots[ranks]
        for level in self._traffic.levels:
            loads = loads_of(level)[ranks]
            kind = self._kinds[level.name]
            kind.add(route, kind.up, slots // level.block, loads)
            if self._both_ways and level.name != "host":
                kind.add(route, kind.down, slots // level.block, loads)
        return tuple(route.items())

    def _at(self, name: str, use: Use, of_class: int, load: float) -> Route:
        ranks = self._members(use, of_class)
        kind = self._kinds[name]
        groups = np.bincount(kind.groups[self._slots[ranks] // kind.level.block])
        return tuple((kind.up[group], load) for group in np.flatnonzero(groups))

    def _members(self, use: Use, of_class: int) -> Index:
        """All ranks of the circle; of a message, of the class alone."""
        fold = self._fold
        if len(fold) == 1:
            return np.arange(len(fold.of))
        chosen = np.zeros(len(fold), dtype=bool)
        chosen[[of_class] if use.pattern == MESSAGE else list(fold.circle(use.axis, of_class).classes)] = True
        return np.flatnonzero(chosen[fold.of])

    def _number_circles(self, use: Use) -> Index:
        """A number for each class: equal where they take part in the same flows of this use."""
        if use.pattern == MESSAGE:
            return np.arange(len(self._fold), dtype=np.int64)
        fold = self._fold
        return np.array([fold.circle(use.axis, c).number for c in range(len(fold))], dtype=np.int64)

    def _group(self, level: Level) -> tuple[Index, list[float]]:
        """The groups of links that are loaded alike, as a number for each block, and their capacities."""
        of = self._fold.of
        blocks = self._slots // level.block
        num_blocks = len(level.capacities)
        signature: NDArray[np.float64] = np.zeros(num_blocks)
        for place, use in enumerate(self._uses):
            # sums of loads with a random weight for each circle: equal where every circle's load is
            numbers = self._numbers[use]
            if use.pattern == PAIRWISE and use.axis in self._exchanges:  # its classes one by one
                numbers = np.arange(len(self._fold))
            weights = np.random.default_rng(place).random(int(numbers.max()) + 1)
            loads = self._traffic.loads(use, level) * weights[numbers[of]]
            signature += np.bincount(blocks, weights=loads, minlength=num_blocks)
            if use.pattern == MESSAGE:  # and what comes in
                to = blocks[self._traffic.to(use)]
                signature += np.pi * np.bincount(to, weights=loads, minlength=num_blocks)
        _, groups = np.unique(np.round(signature, 9), return_inverse=True)
        kinds, kind = np.unique(level.capacities, return_inverse=True)
        if len(kinds) > 1:  # nodes of a mixed cluster
            _, groups = np.unique(groups * len(kinds) + kind, return_inverse=True)
        groups = groups.astype(np.int64)
        return groups, self._capacities(level, groups, 0)

    def _capacities(self, level: Level, groups: Index, now_ns: int) -> list[float]:
        """Of each group of links; the slowest link of a group counts."""
        _, first = np.unique(groups, return_index=True)
        capacities = [float(capacity) for capacity in level.capacities[first]]
        sizes = np.bincount(groups)
        found: dict[int, list[float]] = {}
        for block, share in self._shares(level, now_ns):
            found.setdefault(int(groups[block]), []).append(share)
        for group, shares in found.items():
            slowest = min(shares) if len(shares) == sizes[group] else min(1.0, *shares)
            capacities[group] *= slowest
        return capacities

    def _shares(self, level: Level, now_ns: int) -> list[tuple[int, float]]:
        """What the links of blocks with a slowdown deliver of their nominal bandwidth."""
        conditions = self._conditions
        if level.name == NIC:
            return [(node, conditions.link_share(node, now_ns)) for node in conditions.changing_nodes]
        if level.name in (OWN, PCIE):
            return [(int(self._slots[r]), conditions.own_share(r, now_ns)) for r in conditions.own_links]
        return []


class _Kind:
    """The links of one level."""

    def __init__(self, level: Level, groups: Index, capacities: list[float]) -> None:
        self.level = level
        self.groups = groups
        self.up = [Link(f"{level.name}.{i}", capacity) for i, capacity in enumerate(capacities)]
        self.down = [Link(f"{level.name}.{i}.in", capacity) for i, capacity in enumerate(capacities)]

    def add(
        self, route: dict[Link, float], links: list[Link], blocks: Index, loads: NDArray[np.float64]
    ) -> None:
        """Put the loads of some ranks on the links of their blocks; in a group the fullest counts."""
        if not len(blocks):
            return
        on_blocks = np.bincount(blocks, weights=loads)
        fullest = np.zeros(len(self.up))
        np.maximum.at(fullest, self.groups[: len(on_blocks)], on_blocks)
        for group in np.flatnonzero(fullest):
            link = links[group]
            route[link] = max(float(fullest[group]), route.get(link, 0.0))


def uses_of(mesh: Mesh, transfers: Iterable[tuple[str, str, int]]) -> list[Use]:
    """The uses of (op, axis, peer) of transfers: rings and pairwise sends of an axis, or its messages."""
    found: dict[Use, None] = {}
    for op, axis, peer in dict.fromkeys(transfers):
        if mesh.size(axis) == 1:
            continue
        if op in ("send", "recv"):
            found[Use(axis, MESSAGE, peer if op == "send" else -peer)] = None
        else:
            found[Use(axis, RING)] = None
            found[Use(axis, PAIRWISE)] = None
    return list(found)
