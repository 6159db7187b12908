"""Tables that nccl-tests print (all_reduce_perf and others): rows, ranks and the bandwidths as it defines them.

Columns and factors: NVIDIA/nccl-tests, doc/PERFORMANCE.md and src/. `size` is the whole buffer (what an all-gather
leaves on each rank, what a reduce-scatter takes from each); `count` of those two is the part of one rank.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from .source import Source

FORMAT = "nccl-tests"

_OPS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "alltoall": "all_to_all",
}
_NAMED = re.compile(r"\b(all_reduce|all_gather|reduce_scatter|broadcast|reduce|alltoall)_perf")
_DIVIDED = ("all_gather", "reduce_scatter", "all_to_all")  # `count` is one rank's part
# "0: " and "[1,0]<stdout>:" are what srun --label and mpirun --tag-output put before each line
_LABEL = re.compile(r"^\s*(?:\d+:\s|\[\d+,\d+\]<std(?:out|err)>:\s?)")
_RANK = re.compile(
    r"#?\s*Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s*(.*)"
)
_LOG = re.compile(r"\bNCCL (INFO|WARN|TRACE)\b")
_TYPE_BYTES = {
    **dict.fromkeys(("int8", "uint8", "char", "f8e4m3", "f8e5m2"), 1),
    **dict.fromkeys(("half", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "int", "float"), 4),
    **dict.fromkeys(("int64", "uint64", "double"), 8),
}


def bus_factor(op: str, num_ranks: int) -> float:
    """Bus bandwidth for each unit of algorithm bandwidth: what one rank sends for each byte of `size`.

    Args:
        op: all_reduce 2 (n - 1) / n; all_gather, reduce_scatter and all_to_all (n - 1) / n; broadcast and reduce 1.
        num_ranks: n >= 2.
    """
    if num_ranks < 2:
        raise ValueError(f"num_ranks={num_ranks}: must be at least 2; a single rank sends nothing")
    share = (num_ranks - 1) / num_ranks
    if op in ("all_gather", "reduce_scatter", "all_to_all"):
        return share
    if op == "all_reduce":
        return 2 * share
    if op in ("broadcast", "reduce"):
        return 1.0
    raise ValueError(f"op={op!r}: must be one of {sorted(_OPS.values())}")


@dataclass(frozen=True, slots=True)
class Row:
    """One measured time of one size: out of place or in place."""

    line: int
    size_bytes: int
    time_ns: float

    @property
    def algorithm_Bps(self) -> float:
        return self.size_bytes / self.time_ns * 1e9


@dataclass(frozen=True, slots=True)
class Table:
    """`hosts`: on how many machines the ranks are. `notes`: what was guessed or left out."""

    source: Source
    op: str
    num_ranks: int
    hosts: int
    gpu: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    def bus_Bps(self, row: Row) -> float:
        return row.algorithm_Bps * bus_factor(self.op, self.num_ranks)


@dataclass(frozen=True, slots=True)
class _Line:
    """One line of the table as it is printed, cells by name; those that stand twice are out of place, in place."""

    number: int
    size_bytes: int
    count: int
    element_bytes: int
    redop: str
    root: int
    halves: tuple[dict[str, str], ...]


def is_table(source: Source) -> bool:
    return any(_columns(text) for text in source.lines)


def read_table(source: Source, *, op: str | None = None, num_ranks: int | None = None) -> Table:
    """The table of a file.

    Args:
        op: The collective, where the file does not name it.
        num_ranks: Where the file has no list of ranks; all are then taken to be on one host.

    Raises:
        ValueError: Naming file and line: no table or two, a cell that is no number, one rank, or counts that
            contradict the ranks.
    """
    texts = [_LABEL.sub("", text) for text in source.lines]
    headers = [(number, columns) for number, text in enumerate(texts, 1) if (columns := _columns(text))]
    if not headers:
        raise source.error(1, "no header with size, count, type and time: this is no table of nccl-tests")
    if len(headers) > 1:
        raise source.error(
            headers[1][0],
            f"a second table (the first is at line {headers[0][0]}); give each a file, or start all processes under "
            "one MPI",
        )
    number, columns = headers[0]
    for key in ("algbw", "busbw"):
        if columns.count(key) != columns.count("time"):
            raise source.error(
                number, f"the header has time {columns.count('time')} times, {key} {columns.count(key)}"
            )
    lines = _lines(source, texts, number, columns)
    notes: list[str] = []
    ranks, hosts, gpu = _ranks(source, texts, number, num_ranks, notes)
    found = _op(source, texts, number, lines, op, ranks, notes)
    _check_counts(source, lines, found, ranks)
    rows = _rows(source, lines, notes)
    if not any("Avg bus bandwidth" in text for text in texts[number:]):
        notes.append("no '# Avg bus bandwidth' below the table: it is taken to be whole all the same")
    if not rows:
        raise source.error(number, "the table has no row of at least one byte")
    return Table(source, found, ranks, hosts, gpu, tuple(rows), tuple(notes))


def _columns(text: str) -> list[str]:
    """Names of the columns, if this is the header of a table."""
    words = _LABEL.sub("", text).lstrip().removeprefix("#").split()
    return words if words[:3] == ["size", "count", "type"] and "time" in words else []


def _lines(source: Source, texts: Sequence[str], header: int, columns: list[str]) -> list[_Line]:
    found = []
    for number, text in enumerate(texts[header:], start=header + 1):
        words = text.split()
        if not words or text.lstrip().startswith("#") or _LOG.search(text):
            continue
        if len(words) != len(columns):
            if not words[0].isdigit():
                continue  # what mpirun or a shell says
            raise source.error(
                number,
                f"has {len(words)} of {len(columns)} columns: the table is cut off or has been edited here",
            )
        found.append(_line(source, number, columns, words))
    if not found:
        raise source.error(header, "no rows below the header: the table is cut off")
    return found


def _line(source: Source, number: int, columns: list[str], words: list[str]) -> _Line:
    first = columns.index("time")
    head = dict(zip(columns[:first], words[:first], strict=True))
    width = [*columns, "time"].index("time", first + 1) - first
    halves = tuple(
        dict(zip(columns[i : i + width], words[i : i + width], strict=True))
        for i in range(first, len(columns), width)
    )
    element_bytes = _TYPE_BYTES.get(head["type"])
    if element_bytes is None:
        raise source.error(number, f"type is {head['type']!r}: must be one of {', '.join(_TYPE_BYTES)}")
    return _Line(
        number=number,
        size_bytes=_whole(source, number, "size", head["size"]),
        count=_whole(source, number, "count", head["count"]),
        element_bytes=element_bytes,
        redop=head.get("redop", "none"),
        root=_whole(source, number, "root", head.get("root", "-1"), least=-1),
        halves=halves,
    )


def _rows(source: Source, lines: Sequence[_Line], notes: list[str]) -> list[Row]:
    found = []
    for line in lines:
        for half in line.halves:
            for key in ("algbw", "busbw"):
                _number(source, line.number, key, half[key])
            time_us = _number(source, line.number, "time", half["time"])
            wrong = half.get("#wrong", "0")
            if wrong.isdigit() and int(wrong):
                notes.append(f"line {line.number}: {wrong} wrong values, left out")
            elif line.size_bytes:
                if time_us <= 0:
                    raise source.error(line.number, f"time is {half['time']}: must be > 0")
                found.append(Row(line.number, line.size_bytes, time_us * 1e3))
    return found


def _ranks(
    source: Source, texts: Sequence[str], header: int, given: int | None, notes: list[str]
) -> tuple[int, int, str]:
    """How many ranks on how many hosts, and their GPU."""
    matches = [match for text in texts if (match := _RANK.search(text))]
    if matches:
        ranks = len({(match.group(2), match.group(1)) for match in matches})
        hosts = len({match.group(3) for match in matches})
        if given not in (None, ranks):
            raise source.error(header, f"--ranks {given} contradicts the file's own list of {ranks}")
    elif given is None:
        raise source.error(header, "the file has no list of ranks (# Rank 0 ...); say how many with --ranks")
    else:
        ranks, hosts = given, 1
        notes.append("the file does not name hosts: all ranks are taken to be on one")
    if ranks < 2:
        raise source.error(
            header,
            "the table is of one rank, which sends nothing: it says nothing about a network (several processes that "
            "each print rank 0 were started without MPI)",
        )
    if ranks % hosts:
        raise source.error(header, f"{ranks} ranks on {hosts} hosts: must be equally many on each")
    return ranks, hosts, matches[0].group(4).strip() if matches else ""


def _op(
    source: Source,
    texts: Sequence[str],
    header: int,
    lines: Sequence[_Line],
    given: str | None,
    ranks: int,
    notes: list[str],
) -> str:
    """The collective: as given or named, else by the printed bandwidths, which must fit in any case."""
    names = [_OPS[match.group(1)] for text in texts if (match := _NAMED.search(text))]
    named = given or (names[0] if names else None)
    ratio = _printed_ratio(source, lines)
    if named is None:
        fits = [op for op in _likely(lines[0]) if ratio is None or _fits(op, ranks, ratio)]
        if not fits:
            raise source.error(header, "cannot tell which collective this is; say it with --op")
        notes.append(f"the file does not name the collective: {fits[0]} by its columns and bandwidths")
        return fits[0]
    if ratio is not None and not _fits(named, ranks, ratio):
        raise source.error(
            header,
            f"busbw / algbw is {ratio:.3f}, but {bus_factor(named, ranks):.3f} for {named} over {ranks} ranks",
        )
    return named


def _likely(line: _Line) -> tuple[str, ...]:
    """By the columns; an all-to-all prints what an all-gather prints, and is rarer."""
    if line.redop == "none":
        return ("broadcast",) if line.root >= 0 else ("all_gather", "all_to_all", "broadcast")
    return ("reduce",) if line.root >= 0 else ("all_reduce", "reduce_scatter", "reduce")


def _fits(op: str, ranks: int, ratio: float) -> bool:
    if abs(ratio - bus_factor(op, ranks)) < 0.02 * ratio:
        return True
    # until June 2020 algbw of these two held the factor itself (nccl-tests issue 45)
    return op in ("all_gather", "reduce_scatter") and abs(ratio - 1) < 0.005


def _printed_ratio(source: Source, lines: Sequence[_Line]) -> float | None:
    """The median of busbw / algbw where two decimals tell it."""
    ratios = []
    for line in lines:
        for half in line.halves:
            algorithm = _number(source, line.number, "algbw", half["algbw"])
            if algorithm >= 1.0:
                ratios.append(_number(source, line.number, "busbw", half["busbw"]) / algorithm)
    return sorted(ratios)[len(ratios) // 2] if ratios else None


def _check_counts(source: Source, lines: Sequence[_Line], op: str, ranks: int) -> None:
    parts = ranks if op in _DIVIDED else 1
    for line in lines:
        nbytes = line.count * line.element_bytes * parts
        if nbytes != line.size_bytes:
            raise source.error(
                line.number,
                f"size is {line.size_bytes}, but count {line.count} of {line.element_bytes} bytes"
                + (f" on each of {parts} ranks" if parts > 1 else "")
                + f" is {nbytes} for {op}",
            )


def _whole(source: Source, number: int, key: str, text: str, *, least: int = 0) -> int:
    try:
        value = int(text)
    except ValueError as err:
        raise source.error(number, f"{key} is {text!r}: must be a whole number") from err
    if not least <= value < 1 << 63:
        raise source.error(number, f"{key} is {value}: must be >= {least}, and no more than a size can be")
    return value


def _number(source: Source, number: int, key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError as err:
        raise source.error(number, f"{key} is {text!r}: must be a number") from err
    if not math.isfinite(value) or value < 0:
        raise source.error(number, f"{key} is {text}: must be a number >= 0")
    return value
