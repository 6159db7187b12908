"""What goes wrong on a cluster: ranks and links that are slow for a while, and ones that fail. Typed and checked.

Keys of `cluster`: `slowdown` (a map {rank: factor}, or a list of {rank, factor, from_s, until_s}, or by optimizer steps
{rank, factor, from_step, until_step}), `link_slowdown`
(a list of {node | rank, factor, from_s, until_s}), `failures` (a list of {rank, at_s} or {node, at_s, until_s}, or
{mtbf_s, link_mtbf_s} to draw the first).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Slowdown:
    """From `from_ns` on, until `until_ns` if it is given, rank or node `where` takes `factor` times as long.

    `own`: of links, that it is those of rank `where` to its node, not those of node `where`.
    `from_step`: it is told by optimizer steps instead, from that one on, up to before `until_step` if it is given.
    """

    where: int
    factor: float
    from_ns: int = 0
    until_ns: int | None = None
    own: bool = False
    from_step: int | None = None
    until_step: int | None = None

    def holds_at(self, step: int, since_start_ns: int) -> bool:
        """Whether it is in force in optimizer step `step`, so long after the start."""
        if self.from_step is not None:
            return self.from_step <= step and (self.until_step is None or step < self.until_step)
        return self.from_ns <= since_start_ns and (self.until_ns is None or since_start_ns < self.until_ns)


@dataclass(frozen=True, slots=True)
class Failure:
    """At `at_ns` a rank stops, or the links of a node carry nothing until `until_ns`, or never again.

    The other one of rank and node is None.
    """

    at_ns: int
    rank: int | None = None
    node: int | None = None
    until_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Mtbf:
    """Ranks fail at random, each after `mtbf_s` on average, and the links of a node after `link_mtbf_s`."""

    mtbf_s: float | None
    link_mtbf_s: float | None = None


def rank_slowdowns(given: Any, num_ranks: int) -> tuple[Slowdown, ...]:
    """`cluster.slowdown`, in the order of ranks and times.

    Raises:
        ValueError: Naming the key, its value and what would be legal.
    """
    if isinstance(given, Mapping):
        given = [{"rank": rank, "factor": factor} for rank, factor in given.items()]
    key = "cluster.slowdown"
    found = [_rank_slowdown(entry, f"{key}[{i}]", num_ranks) for i, entry in enumerate(_entries(given, key))]
    return _sorted(found)


def link_slowdowns(given: Any, *, nodes: int, num_ranks: int) -> tuple[Slowdown, ...]:
    """`cluster.link_slowdown`, of a node's links to the others or of a rank's own to its node, both ways.

    Raises:
        ValueError: Naming the key, its value and what would be legal.
    """
    key = "cluster.link_slowdown"
    found: list[Slowdown] = []
    for i, entry in enumerate(_entries(given, key)):
        if ("rank" in entry) == ("node" in entry):
            raise ValueError(f"{key}[{i}]={dict(entry)}: must name a rank or a node, and not both")
        if "rank" in entry:
            found.append(replace(_slowdown(entry, f"{key}[{i}]", "rank", num_ranks), own=True))
        else:
            found.append(_slowdown(entry, f"{key}[{i}]", "node", nodes))
    return _sorted(found)


def failures(given: Any, *, num_ranks: int, nodes: int) -> tuple[Failure, ...] | Mtbf:
    """`cluster.failures`, in the order of times.

    Raises:
        ValueError: Naming the key, its value and what would be legal.
    """
    key = "cluster.failures"
    if isinstance(given, Mapping):
        kinds = ("mtbf_s", "link_mtbf_s")
        _only(given, kinds, key)
        if not given:
            raise ValueError(f"{key}={{}}: must name one of {list(kinds)}")
        means = (_number(given[k], f"{key}.{k}", above=0.0) if k in given else None for k in kinds)
        return Mtbf(*means)
    found = []
    for i, entry in enumerate(_entries(given, key)):
        name = f"{key}[{i}]"
        _only(entry, ("rank", "node", "at_s", "until_s"), name)
        if ("rank" in entry) == ("node" in entry):
            raise ValueError(f"{name}={dict(entry)}: must name a rank or a node, and not both")
        at_ns = round(_number(entry.get("at_s"), f"{name}.at_s") * 1e9)
        until_ns = _until_ns(entry, name, at_ns, "at_s")
        if "rank" in entry:
            if until_ns is not None:
                raise ValueError(
                    f"{name}.until_s={entry['until_s']}: a rank that failed does not come back, only links do; "
                    "goodput.* counts what a restart costs"
                )
            found.append(Failure(at_ns, rank=_place(entry["rank"], f"{name}.rank", num_ranks)))
        else:
            node = _place(entry["node"], f"{name}.node", nodes)
            found.append(Failure(at_ns, node=node, until_ns=until_ns))
    return tuple(sorted(found, key=lambda f: (f.at_ns, f.rank is None, f.rank or 0, f.node or 0)))


def link_table(given: Any) -> dict[int, float] | None:
    """`cluster.inter_node.link_table` with numbers as keys.

    Raises:
        ValueError: Naming the key, its value and what would be legal.
    """
    key = "cluster.inter_node.link_table"
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ValueError(f"{key}={given!r}: must be null, or a map from a number of links to their worth")
    table = {}
    for links, worth in given.items():
        at = _place(links, key, 1 << 16)
        table[at] = _number(worth, f"{key}[{at}]", above=0.0)
        if table[at] > at:
            raise ValueError(f"{key}[{at}]={worth}: must be at most {at}, the number of links")
    return table


def _rank_slowdown(entry: Mapping[str, Any], name: str, num_ranks: int) -> Slowdown:
    steps = {key: entry[key] for key in ("from_step", "until_step") if entry.get(key) is not None}
    timed = _slowdown(
        {key: value for key, value in entry.items() if key not in ("from_step", "until_step")},
        name,
        "rank",
        num_ranks,
    )
    if timed.factor < 1:
        raise ValueError(
            f"{name}.factor={entry['factor']}: must be >= 1: so many times as long as at full speed"
        )
    if not steps:
        return timed
    mixed = [key for key in ("from_s", "until_s") if entry.get(key) is not None]
    if mixed:
        raise ValueError(f"{name} has {sorted(steps)} and {mixed}: must be told by steps or by seconds")
    for key, value in steps.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{name}.{key}={value!r}: must be a whole number >= 0")
    first, last = steps.get("from_step", 0), steps.get("until_step")
    if last is not None and last <= first:
        raise ValueError(f"{name}.until_step={last}: must be later than from_step={first}, or null for ever")
    return replace(timed, from_step=first, until_step=last)


def _slowdown(entry: Mapping[str, Any], name: str, where: str, num_places: int) -> Slowdown:
    _only(entry, (where, "factor", "from_s", "until_s"), name)
    place = _place(entry.get(where), f"{name}.{where}", num_places)
    factor = _number(entry.get("factor"), f"{name}.factor", above=0.0)
    from_ns = round(_number(entry.get("from_s") or 0.0, f"{name}.from_s") * 1e9)
    return Slowdown(place, factor, from_ns, _until_ns(entry, name, from_ns, "from_s"))


def _until_ns(entry: Mapping[str, Any], name: str, from_ns: int, begin: str) -> int | None:
    until = entry.get("until_s")
    until_ns = None if until is None else round(_number(until, f"{name}.until_s") * 1e9)
    if until_ns is not None and until_ns <= from_ns:
        raise ValueError(f"{name}.until_s={until}: must be later than {begin}, or null for ever")
    return until_ns


def _sorted(found: list[Slowdown]) -> tuple[Slowdown, ...]:
    return tuple(
        sorted(
            found,
            key=lambda s: (s.own, s.where, s.from_step or 0, s.from_ns, s.until_ns is None, s.until_ns or 0),
        )
    )


def _entries(given: Any, key: str) -> Sequence[Mapping[str, Any]]:
    if given is None:
        return ()
    if (
        isinstance(given, str)
        or not isinstance(given, Sequence)
        or not all(isinstance(e, Mapping) for e in given)
    ):
        raise ValueError(f"{key}={given!r}: must be null, or a list of maps")
    return given


def _only(entry: Mapping[str, Any], legal: tuple[str, ...], name: str) -> None:
    unknown = sorted(set(map(str, entry)) - set(legal))
    if unknown:
        raise ValueError(f"{name} has {unknown}: must be among {list(legal)}")


def _place(value: Any, name: str, num_places: int) -> int:
    try:
        place = int(value)
    except (TypeError, ValueError) as err:
        raise ValueError(f"{name}={value!r}: must be a whole number") from err
    if not 0 <= place < num_places:
        raise ValueError(f"{name}={place}: must be in [0, {num_places}), the ones that the cluster has")
    return place


def _number(value: Any, name: str, *, above: float | None = None) -> float:
    legal = f"a number > {above:g}" if above is not None else "a number >= 0"
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name}={value!r}: must be {legal}")
    if value < 0 or (above is not None and value <= above):
        raise ValueError(f"{name}={value!r}: must be {legal}")
    return float(value)
