"""What `nvidia-smi topo -m` prints: the matrix of GPUs and NICs, and its legend."""

import re
from collections.abc import Sequence

from . import node as nodes
from .findings import Base, Imported
from .node import NEAR, Gpu, Nic, Node
from .source import Source

FORMAT = "nvidia-smi topo -m"

# The terminal's underlining of the header
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_GPU = re.compile(r"GPU\d+")
_CELL = re.compile(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS|SOC")  # SOC: SYS, before driver 384
_LEGEND = re.compile(r"\s*(NIC\d+):\s*(\S+)")


def is_matrix(source: Source) -> bool:
    return _header_line(source) is not None


def read_matrix(source: Source, base: Base) -> Imported:
    """The node in a matrix.

    Raises:
        ValueError: Naming file and line: a row or a cell that is missing, unknown, or not equal to its mirror.
    """
    header = _header_line(source)
    if header is None:
        raise source.error(1, "no header with GPU0: this is not what nvidia-smi topo -m prints")
    names = _names(_plain(source.lines[header - 1]).split())
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise source.error(header, f"the header names {', '.join(repeated)} twice")
    rows, lines = _rows(source, header, names)
    _check_mirror(source, names, rows, lines)
    num_gpus = sum(_GPU.fullmatch(name) is not None for name in names)
    if any(_GPU.fullmatch(name) is None for name in names[:num_gpus]):
        raise source.error(header, "NICs stand between GPUs in the header")
    node = _node(names, rows, lines, num_gpus, _legend(source, header))
    found, notes = nodes.findings(node, base, source.name)
    return Imported(
        source=source.path,
        format=FORMAT,
        summary=f"{nodes.counted(num_gpus, 'GPU')}, {nodes.counted(len(names) - num_gpus, 'NIC')}",
        findings=tuple(found),
        notes=tuple(notes),
    )


def _node(
    names: Sequence[str],
    rows: Sequence[Sequence[str]],
    lines: Sequence[int],
    num_gpus: int,
    legend: dict[str, str],
) -> Node:
    counts = [[_num_nvlinks(cell) for cell in row[:num_gpus]] for row in rows[:num_gpus]]
    links = nodes.direct_or_switch(counts)
    gpus = [Gpu(name=names[i], line=lines[i], nvlinks=tuple(links[i])) for i in range(num_gpus)]
    nics = [
        Nic(
            name=f"{names[i]} ({legend[names[i]]})" if names[i] in legend else names[i],
            line=lines[i],
            near=any(cell in NEAR for cell in rows[i][:num_gpus]),
        )
        for i in range(num_gpus, len(names))
    ]
    far = {
        (i, j)
        for i in range(num_gpus)
        for j in range(i + 1, num_gpus)
        if rows[i][j] not in NEAR and not counts[i][j]
    }
    return Node(gpus=gpus, nics=nics, links_told=True, far=far)


def _rows(source: Source, header: int, names: Sequence[str]) -> tuple[list[list[str]], list[int]]:
    """Cells and lines of the rows, in the order of the header."""
    found: dict[str, tuple[list[str], int]] = {}
    last = header
    for number, text in enumerate(source.lines[header:], start=header + 1):
        words = _plain(text).split()
        if not words or words[0] not in names:
            if words and not text.startswith((" ", "\t")) and _GPU.match(words[0]):
                raise source.error(number, f"row {words[0]} is not in the header")
            if words and words[0].startswith("Legend"):
                break
            continue
        if words[0] in found:
            raise source.error(number, f"row {words[0]} stands there twice")
        cells = words[1 : len(names) + 1]
        for name, cell in zip(names, cells, strict=False):
            if _CELL.fullmatch(cell) is None:
                raise source.error(
                    number,
                    f"{words[0]} to {name} is {cell!r}: must be X, NV#, PIX, PXB, PHB, NODE or SYS",
                )
        if len(cells) < len(names):
            raise source.error(
                number, f"row {words[0]} has {len(cells)} of {len(names)} cells: the file is cut off here"
            )
        found[words[0]] = (cells, number)
        last = number
    missing = [name for name in names if name not in found]
    if missing:
        raise source.error(last, f"the matrix ends without row {missing[0]}: the file is cut off")
    return [found[name][0] for name in names], [found[name][1] for name in names]


def _check_mirror(
    source: Source, names: Sequence[str], rows: Sequence[Sequence[str]], lines: Sequence[int]
) -> None:
    for i, row in enumerate(rows):
        for j, cell in enumerate(row):
            if (cell == "X") != (i == j):
                raise source.error(
                    lines[i], f"{names[i]} to {names[j]} is {cell}: X is for a device and itself"
                )
            if cell != rows[j][i]:
                raise source.error(
                    lines[i],
                    f"{names[i]} to {names[j]} is {cell}, but line {lines[j]} has {rows[j][i]} for the way back",
                )


def _header_line(source: Source) -> int | None:
    for number, text in enumerate(source.lines, start=1):
        words = _plain(text).split()
        if words[:1] == ["GPU0"] and (len(words) < 2 or words[1] != "X"):
            return number
    return None


def _names(words: Sequence[str]) -> list[str]:
    """Devices of the header; behind them stand "CPU Affinity", "NUMA Affinity" and the like."""
    names = []
    for word in words:
        if word in ("CPU", "NUMA", "GPU"):
            break
        names.append(word)
    return names


def _legend(source: Source, header: int) -> dict[str, str]:
    matches = (_LEGEND.match(_plain(text)) for text in source.lines[header:])
    return {match.group(1): match.group(2) for match in matches if match}


def _num_nvlinks(cell: str) -> int:
    return int(cell[2:]) if cell.startswith("NV") else 0


def _plain(text: str) -> str:
    return _ESCAPE.sub("", text)
