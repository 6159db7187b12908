"""How a failing rank says what happened, and which rank failed first. Imports no torch."""

import contextlib
import json
import mmap
import os
import re
import signal
import struct
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path

from ..analysis.record import write_text


class Kind(IntEnum):
    """What a failure says about its cause; lower is nearer to it."""

    error = 0  # the rank's own
    elsewhere = 1  # the rank learned from a figure that something is wrong on another
    timeout = 2  # it waited in vain
    disconnected = 3  # its peer is gone


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One rank's account of its end."""

    rank: int
    case: str
    step: int  # -1: before the first
    kind: Kind
    error: str  # one line
    trace: str
    time_ns: int


class ElsewhereError(RuntimeError):
    """Another rank has the cause; this one only sees that it cannot go on."""


# What gloo, NCCL and the store say, torch 2.13
_TIMEOUT = re.compile(r"timed? ?out|timeout", re.IGNORECASE)
_DISCONNECTED = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|connectfullmesh failed|remote process|"
    r"socket (closed|error)|unexpected eof|failed to (recv|send)",
    re.IGNORECASE,
)


def describe_failure(error: BaseException, *, rank: int, case: str, step: int) -> Failure:
    """The account of `error`, with a guess at its kind."""
    text = " ".join(str(error).split()) or type(error).__name__
    kind = Kind.error
    if isinstance(error, ElsewhereError):
        kind = Kind.elsewhere
    elif isinstance(error, (RuntimeError, ConnectionError)):  # torch's DistBackendError is a RuntimeError
        if _TIMEOUT.search(text):
            kind = Kind.timeout
        elif _DISCONNECTED.search(text):
            kind = Kind.disconnected
    trace = "".join(traceback.format_exception(error))
    return Failure(
        rank=rank,
        case=case,
        step=step,
        kind=kind,
        error=text if isinstance(error, (ValueError, RuntimeError)) else f"{type(error).__name__}: {text}",
        trace=trace,
        time_ns=time.time_ns(),
    )


def write_failure(folder: Path, failure: Failure) -> None:
    """Write failure.<rank>.json; where that is impossible, the rank's log has to serve."""
    with contextlib.suppress(OSError):
        write_text(folder / f"failure.{failure.rank}.json", json.dumps(asdict(failure), indent=1) + "\n")


def read_failures(folder: Path) -> dict[int, Failure]:
    """The accounts that ranks have left, by rank."""
    found = {}
    for path in sorted(folder.glob("failure.*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError):
            values = json.loads(path.read_text(encoding="utf-8"))
            failure = Failure(**{**values, "kind": Kind(values["kind"])})
            found[failure.rank] = failure
    return found


@dataclass(frozen=True, slots=True)
class Cause:
    """The rank that failed first, and one line that says so."""

    rank: int | None
    error: str


def find_cause(
    failures: Mapping[int, Failure],
    exit_codes: Mapping[int, int],
    heartbeats: Mapping[int, tuple[int, int]],
    cases: list[str],
    last_lines: Mapping[int, str],
    silent: list[int],
) -> Cause:
    """Which rank failed first, of those that ended.

    A rank that a signal killed comes before all: the others only saw its connections close. Then accounts by
    kind, then by time.

    Args:
        failures: What ranks wrote before they ended.
        exit_codes: Of the ranks that ended by themselves; negative is the signal.
        heartbeats: (case, step) that each rank had reached, -1 before the first.
        cases: Their names.
        last_lines: The last line of each rank's log.
        silent: Ranks that were still running when the others gave up.
    """

    def where(rank: int) -> str:
        case, step = heartbeats.get(rank, (-1, -1))
        if not 0 <= case < len(cases):
            return "while starting"
        return f"in step {step} of {cases[case]}" if step >= 0 else f"before the first step of {cases[case]}"

    def told(rank: int, how: str) -> str:
        line = last_lines.get(rank, "").strip()
        if line.startswith(f"rank {rank} failed"):  # its own account, which it could not write to a file
            return line
        return f"rank {rank} {how} {where(rank)}: {line or 'it said nothing'}"

    killed = sorted(rank for rank, code in exit_codes.items() if code < 0 and rank not in failures)
    if killed:
        rank = killed[0]
        name = signal.Signals(-exit_codes[rank]).name
        hint = " (out of memory, or killed by someone)" if name == "SIGKILL" else ""
        return Cause(rank, f"rank {rank} was killed by {name} {where(rank)}{hint}")
    unexplained = sorted(rank for rank, code in exit_codes.items() if code > 0 and rank not in failures)
    if failures:
        first = min(failures.values(), key=lambda f: (f.kind, f.time_ns))
        if first.kind >= Kind.timeout and unexplained:
            rank = unexplained[0]
            return Cause(rank, told(rank, "ended"))
        text = f"rank {first.rank} failed {where(first.rank)}: {first.error}"
        if first.kind is Kind.timeout and silent:  # the others waited for it in vain
            rank = silent[0]
            return Cause(rank, f"rank {rank} did not answer any more, last seen {where(rank)}; {text}")
        return Cause(first.rank, text)
    if unexplained:
        rank = unexplained[0]
        return Cause(rank, told(rank, "failed"))
    ended = sorted(exit_codes)
    if ended:
        return Cause(ended[0], f"rank {ended[0]} ended early {where(ended[0])}")
    return Cause(None, "no rank failed")


class Heartbeat:
    """Where a rank has got to, in a mapped file: the launcher can read it after the rank was killed."""

    _LAYOUT = struct.Struct("<qq")

    def __init__(self, folder: Path, rank: int) -> None:
        path = folder / f".heartbeat.{rank}"
        path.write_bytes(self._LAYOUT.pack(-1, -1))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), self._LAYOUT.size)
        self.case, self.step = -1, -1

    def beat(self, *, case: int, step: int) -> None:
        self.case, self.step = case, step
        self._LAYOUT.pack_into(self._memory, 0, case, step)

    @classmethod
    def read(cls, folder: Path, rank: int) -> tuple[int, int]:
        """(case, step); (-1, -1) if the rank has not begun."""
        try:
            case, step = cls._LAYOUT.unpack((folder / f".heartbeat.{rank}").read_bytes())
        except (OSError, struct.error):
            return -1, -1
        return case, step


def clear_traces(folder: Path) -> None:
    """Remove what an earlier launch in this folder left of failures and heartbeats.

    Raises:
        OSError: The folder cannot be written.
    """
    for pattern in ("failure.*.json", ".heartbeat.*"):
        for path in folder.glob(pattern):
            os.unlink(path)
