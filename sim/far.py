"""Copies between near and far memory, and optimizer steps in the host's: which links they load, and how long alone.

Near is a GPU's memory, or a CPU rank's; far is the host's (offload=cpu) or a disk. GPUs have a way to the host in
each direction, of which `host.pcie_ranks` share one; all copies and steps of a node share its memory, its disk and
its cores. Copies from memory that is not pinned pass through a buffer of the driver: the host's memory is read,
written and read again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ..conf.schema import Backend, ClusterConf, OffloadConf
from .network import Network, Route
from .topology import Link

BOUNCES = 3  # passes over host memory of a copy that is not pinned; a pinned one is read, or written, once


class Way(Enum):
    """Where bytes go. The values name streams."""

    fetch = "fetch"  # from far memory to near
    evict = "evict"  # from near memory to far
    commit = "commit"  # a copy to disk of what stays near, for a generation that a crash leaves
    host = "host_step"  # read plus written by the host's cores


@dataclass(frozen=True, slots=True)
class Move:
    """`nbytes` of one rank."""

    way: Way
    nbytes: int


class FarMemory:
    """Moves of all ranks, as flows on links that they share.

    Args:
        per_host: Ranks on one machine.
        shares: Of each simulated rank, the share of all ranks that it stands for, where ranks are folded: each kind of
            link is then one, loaded as often as the ranks of a host load theirs. None: every rank apart.
    """

    def __init__(
        self,
        cluster: ClusterConf,
        offload: OffloadConf,
        network: Network,
        *,
        per_host: int,
        shares: Mapping[int, float] | None,
    ) -> None:
        self._cluster = cluster
        self._offload = offload
        self._network = network
        self._per_host = per_host
        self._shares = shares
        self._gpus = cluster.backend is Backend.nccl
        self._links: dict[str, Link] = {}
        self._known: dict[tuple[int, Way], tuple[Route, float, int]] = {}

    def run(self, rank: int, move: Move) -> Any:
        """Begin a move now; the event fires at its end."""
        if not move.nbytes:
            return self._network.env.timeout(0)
        known = self._known.get((rank, move.way))
        if known is None:
            known = self._known[rank, move.way] = self._way(rank, move.way)
        route, limit, after_ns = known
        return self._network.flow(move.nbytes, route, limit=limit, after_ns=after_ns)

    def _way(self, rank: int, way: Way) -> tuple[Route, float, int]:
        """Links, the highest rate of one rank in bytes a nanosecond, and what passes before the first byte."""
        host, disk = self._cluster.host, self._cluster.disk
        way = Way.evict if way is Way.commit else way
        on_disk = self._offload.name == "disk"
        if way is Way.host:
            rate = host.core_Bps * host.step_cores / self._per_host
            return ((self._shared(rank, "memory", host.memory_Bps, 1.0),), rate / 1e9, 0)
        route: list[tuple[Link, float]] = []
        limit, after_ns = float("inf"), host.copy_ns
        if on_disk:
            rate_Bps = disk.read_Bps if way is Way.fetch else disk.write_Bps
            route.append(self._shared(rank, f"disk.{way.value}", rate_Bps, 1.0))
            fixed_ns, own_Bps = (
                (disk.fetch_ns, disk.fetch_Bps) if way is Way.fetch else (disk.evict_ns, disk.evict_Bps)
            )
            after_ns = (disk.latency_ns if fixed_ns is None else fixed_ns) + (
                host.copy_ns if self._gpus else 0
            )
            if own_Bps is not None:  # checksums and page faults take the time of the same threads
                route.append((self._link(f"store.{way.value}.{rank}", own_Bps), 1.0))
        if self._gpus:
            assert host.pcie_Bps is not None, "checked before anything runs"
            pinned = self._offload.pinned
            limit = host.pcie_Bps / 1e9 if pinned else min(host.pcie_Bps, host.pageable_Bps) / 1e9
            passes = (1.0 if pinned else BOUNCES) + on_disk
            route.append(self._lane(rank, way))
            route.append(self._shared(rank, "memory", host.memory_Bps, passes))
        return tuple(route), limit, after_ns

    def _shared(self, rank: int, name: str, bandwidth_Bps: float | None, passes: float) -> tuple[Link, float]:
        """A link of the whole host."""
        assert bandwidth_Bps is not None, "checked before anything runs"
        if self._shares is None:
            return self._link(f"{name}.{rank // self._per_host}", bandwidth_Bps), passes
        return self._link(name, bandwidth_Bps), passes * self._per_host * self._share(rank)

    def _lane(self, rank: int, way: Way) -> tuple[Link, float]:
        """A GPU's way to the host, in one direction."""
        host = self._cluster.host
        assert host.pcie_Bps is not None, "checked before anything runs"
        if self._shares is not None:
            return self._link(f"pcie.{way.value}", host.pcie_Bps), host.pcie_ranks * self._share(rank)
        per_node = self._cluster.devices_per_node
        lane = f"{rank // per_node}.{rank % per_node // host.pcie_ranks}"
        return self._link(f"pcie.{way.value}.{lane}", host.pcie_Bps), 1.0

    def _share(self, rank: int) -> float:
        return (self._shares or {}).get(rank, 1.0)

    def _link(self, name: str, bandwidth_Bps: float) -> Link:
        known = self._links.get(name)
        if known is None:
            known = self._links[name] = Link(name, bandwidth_Bps / 1e9)
        return known
