"""A process that gets a share of the time: another one stops and continues it in turns, as cpulimit does.

The watcher is `python -m twinbed.runtime.balance.quota PID`. It reads the share in force from its input, a line each
time, and ends with it, whatever state the process is in then: of a process that has died nothing is left, and one that
goes on is not stopped any more. A turn is short against a collective's timeout and a launcher's patience. Imports no
torch.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

_TURN_S = 0.1  # one stop and one run together


class Quota:
    """Of this process."""

    def __init__(self) -> None:
        self._share = 1.0
        self._watcher: subprocess.Popen[bytes] | None = None

    def set(self, share: float) -> None:
        """From now on this process gets this share of the time, in (0, 1]."""
        if not 0 < share <= 1:
            raise ValueError(f"share={share}: must be in (0, 1]")
        if share == self._share:
            return
        if self._watcher is None:
            self._watcher = subprocess.Popen(
                [sys.executable, "-m", "twinbed.runtime.balance.quota", str(os.getpid())],
                stdin=subprocess.PIPE,
            )
        assert self._watcher.stdin is not None
        self._watcher.stdin.write(f"{share!r}\n".encode())
        self._watcher.stdin.flush()
        self._share = share

    def close(self) -> None:
        """The process runs on at full speed."""
        if self._watcher is not None and self._watcher.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._watcher.stdin.close()
            self._watcher.wait()
            self._watcher = None
            self._share = 1.0


def watch(pid: int, shares: int) -> None:
    """Stop and continue a process until the pipe `shares` ends or the process does.

    Args:
        shares: What can be read from: lines with one share each.
    """
    with contextlib.suppress(ProcessLookupError):
        process = os.pidfd_open(pid)  # the number may be another's once it has ended
        try:
            _turns(process, shares)
        finally:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGCONT)


def _turns(process: int, shares: int) -> None:
    share, rest = 1.0, b""
    while True:
        if share < 1:
            signal.pidfd_send_signal(process, signal.SIGSTOP)
            time.sleep(_TURN_S * (1 - share))
            signal.pidfd_send_signal(process, signal.SIGCONT)
        readable, _, _ = select.select([shares, process], [], [], _TURN_S * share if share < 1 else None)
        if process in readable:
            return
        if shares in readable:
            told = os.read(shares, 1 << 12)
            if not told:
                return
            *lines, rest = (rest + told).split(b"\n")
            if lines:
                share = float(lines[-1])


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watch(int(sys.argv[1]), sys.stdin.fileno())
