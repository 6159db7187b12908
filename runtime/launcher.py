"""Start the ranks of a local launch, watch them, and clean up whatever happens. Imports no torch.

Ranks are processes with torchrun's environment and not children of torchrun, which cannot start a rank inside a
namespace: a host imports torch once and forks them (`rank_host`). On a real cluster torchrun starts the same worker
(`script`).
"""

import contextlib
import json
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from ..analysis.record import RESULT, new_result, write_text
from ..conf.schema import ClusterConf, InterNodeConf
from .case import TRAIN, Case, finished_marker, write_launch
from .cluster.local import LinkShape, LocalCluster
from .failure import Cause, Heartbeat, clear_traces, find_cause, read_failures
from .ranks import RankProcesses

_POLL_S = 0.05
_GRACE_S = 2.0  # for the others to say what they saw, once a rank has failed
_STACKS_S = 0.3  # for ranks that hang to write where they are


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOutcome:
    """How a launch ended."""

    status: str  # "ok" or "failed"
    error: str | None = None
    failed_rank: int | None = None
    finished: tuple[str, ...] = ()  # names of the cases that were completed
    backend: str = "none"  # of the local cluster
    unshaped_reason: str = ""  # why links are not shaped
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        return 0 if self.status == "ok" else 1


def launch_local(
    folder: Path,
    *,
    cluster: ClusterConf,
    cases: Sequence[Case],
    timeout_s: float | None = None,
    git_commit: str = "",
    show_progress: bool = True,
) -> LaunchOutcome:
    """Run `cases` on ranks of this machine and wait for them.

    Each case writes its record; of a case that was not completed `result.json` says `failed` and why. Logs
    are `rank<k>.log` in `folder`. Whatever ends this call, no process and no namespace is left.

    Args:
        folder: Of the launch; made if absent.
        cluster: Nodes, ranks a node and the shape of the links. All cases must agree with it.
        timeout_s: For the whole launch; None: no limit. A collective has its own, `train.timeout_s`.
        git_commit: For the records.
        show_progress: Pass on what rank 0 prints.
    """
    started = time.monotonic()
    try:
        write_launch(folder, cases, git_commit=git_commit)
        clear_traces(folder)
        for index, case in enumerate(cases):
            finished_marker(folder, index).unlink(missing_ok=True)
            (folder / case.folder).mkdir(parents=True, exist_ok=True)
            (folder / case.folder / RESULT).unlink(missing_ok=True)
    except OSError as err:
        return _failed(f"the output folder {folder} cannot be written: {err.strerror or err}", started)
    try:
        nodes = LocalCluster(
            nodes=cluster.nodes,
            ranks_per_node=cluster.devices_per_node,
            link=_links(cluster),
            backend="auto" if cluster.shaped else "none",
        )
    except (ValueError, RuntimeError) as err:
        text = str(err).replace("link.", "cluster.inter_node.")
        return _failed(f"cluster={cluster.name}: {text}", started, folder, cases, git_commit)
    reason = nodes.reason if cluster.shaped else ""
    if reason:
        _say(f"links are not shaped: {reason}")
    try:
        with nodes, _terminable():
            ranks = RankProcesses(folder, nodes, cluster, show_progress=show_progress)
            cause = _Launch(folder, cases, ranks).run(timeout_s)
    except BaseException as err:
        if isinstance(err, KeyboardInterrupt | SystemExit):
            text = "interrupted"
        else:
            text = f"the launcher failed: {type(err).__name__}: {err}"
        _write_failed(folder, cases, Cause(None, text), git_commit)
        raise
    told: dict[str, Any] = {"backend": nodes.backend, "unshaped_reason": reason, "notes": nodes.notes}
    if cause is not None:
        return _failed(cause.error, started, folder, cases, git_commit, cause.rank, told)
    return LaunchOutcome(
        status="ok", finished=_finished(folder, cases), seconds=time.monotonic() - started, **told
    )


def _links(cluster: ClusterConf) -> LinkShape | list[LinkShape]:
    """Of one node all its links together; of each node, where they differ."""
    if not cluster.shaped:
        return LinkShape(bandwidth_Bps=1e9, latency_ns=0)  # nobody reads it
    if not any(part.inter_node for part in cluster.parts):
        return _link(cluster.inter_node)
    return [_link(cluster.outside(node)) for node in range(cluster.nodes)]


def _link(inter: InterNodeConf) -> LinkShape:
    try:
        return LinkShape(bandwidth_Bps=inter.node_Bps, latency_ns=inter.latency_ns)
    except ValueError as err:
        what = f"{inter.bandwidth_Bps:g} with links={inter.links} and efficiency={inter.efficiency:g}"
        raise ValueError(f"{err} (link.bandwidth_Bps={what})") from err


class _Launch:
    """The ranks of one launch."""

    def __init__(self, folder: Path, cases: Sequence[Case], ranks: RankProcesses) -> None:
        self._folder, self._cases, self._ranks = folder, cases, ranks

    def run(self, timeout_s: float | None) -> Cause | None:
        """Start all ranks and wait; None if all went well."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            self._ranks.start()
            return self._watch(deadline, timeout_s)
        finally:
            self._ranks.kill()

    def _watch(self, deadline: float | None, timeout_s: float | None) -> Cause | None:
        failed_at: float | None = None
        while True:
            codes = self._ranks.codes()
            running = [rank for rank, code in codes.items() if code is None]
            if failed_at is None and any(codes.values()):
                failed_at = time.monotonic()
            if not running or (failed_at is not None and time.monotonic() > failed_at + _GRACE_S):
                break
            if deadline is not None and time.monotonic() > deadline:
                return Cause(None, f"the launch took longer than timeout_s={timeout_s:g}")
            time.sleep(_POLL_S)
        ended = {rank: code for rank, code in codes.items() if code is not None}
        missing = len(_finished(self._folder, self._cases)) < len(self._cases)
        if failed_at is None and not missing:
            return None
        self._ask_where(running)
        self._ranks.kill()
        heartbeats = {rank: Heartbeat.read(self._folder, rank) for rank in codes}
        tails = {rank: self._ranks.tail(rank) for rank in codes}
        last_lines = {rank: tail[-1] if tail else "" for rank, tail in tails.items()}
        names = [case.name for case in self._cases]
        failures = read_failures(self._folder)
        cause = find_cause(failures, ended, heartbeats, names, last_lines, running)
        if cause.rank and tails[cause.rank]:  # what rank 0 said has been passed on already
            _say(f"the last lines of rank {cause.rank}:\n" + "\n".join(tails[cause.rank]))
        return cause

    def _ask_where(self, running: Sequence[int]) -> None:
        """Let ranks that hang write their stacks into their logs."""
        for rank in running:
            self._ranks.signal(rank, signal.SIGUSR1)
        if running:
            time.sleep(_STACKS_S)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Make SIGTERM and SIGHUP unwind the stack as Ctrl-C does; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _failed(
    error: str,
    started: float,
    folder: Path | None = None,
    cases: Sequence[Case] = (),
    git_commit: str = "",
    rank: int | None = None,
    told: Mapping[str, Any] | None = None,
) -> LaunchOutcome:
    _say(error)
    finished: tuple[str, ...] = ()
    if folder is not None:
        finished = _finished(folder, cases)
        _write_failed(folder, cases, Cause(rank, error), git_commit)
    return LaunchOutcome(
        status="failed",
        error=error,
        failed_rank=rank,
        finished=finished,
        seconds=time.monotonic() - started,
        **(told or {}),
    )


def _finished(folder: Path, cases: Sequence[Case]) -> tuple[str, ...]:
    return tuple(case.name for index, case in enumerate(cases) if finished_marker(folder, index).exists())


def _write_failed(folder: Path, cases: Sequence[Case], cause: Cause, git_commit: str) -> None:
    for index, case in enumerate(cases):
        if case.kind == TRAIN and not finished_marker(folder, index).exists():
            try:
                write_failed_result(folder / case.folder, case, cause, git_commit=git_commit)
            except OSError as err:
                _say(f"{err}")


def write_failed_result(folder: Path, case: Case, cause: Cause, *, git_commit: str) -> None:
    """A record that says no more than that the case failed, and why.

    Raises:
        OSError: The folder cannot be written.
    """
    result = new_result(
        "runtime", case.experiment, seed=int(case.experiment.get("seed", 0)), git_commit=git_commit
    )
    result |= {"error": cause.error, "failed_rank": cause.rank, "warnings": list(case.warnings)}
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / RESULT, json.dumps(result, indent=1, allow_nan=False) + "\n")


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"twinbed: {text}\n")
        sys.stderr.flush()
