"""Run a command inside a node: python enter.py KEEPER_PID USER_FD NET_FD UTS_FD NET_INODE COMMAND...

A script of its own, started with -I -S: no shell and no waiting parent stays between the caller and the
command, so signals and the exit status are the command's. The descriptors are the keeper's; USER_FD is -1
where the cluster lives in the user namespace of its owner.
"""

import ctypes
import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> None:
    enter(*(int(argument) for argument in arguments[:5]))
    try:
        os.execvp(arguments[5], list(arguments[5:]))
    except OSError as err:
        sys.exit(f"cannot run {arguments[5]!r} in the node: {err}")


def enter(keeper: int, user: int, net: int, uts: int, net_inode: int) -> None:
    """Bring this process, of one thread, inside a node; it ends, saying why, if it cannot be."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        # All are opened first: once inside the user namespace, the keeper's descriptors may be out of reach.
        opened = [
            os.open(f"/proc/{keeper}/fd/{number}", os.O_RDONLY) for number in (user, net, uts) if number >= 0
        ]
        # The pid may have been given to another process since.
        if os.fstat(opened[-2]).st_ino != net_inode:
            raise ProcessLookupError(f"process {keeper} is another one by now")
        for number in opened:
            if libc.setns(number, 0) != 0:
                raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")
    except OSError as err:
        sys.exit(f"cannot enter the node of a local cluster: {err}; is the cluster still open?")
    for number in opened:
        os.close(number)


if __name__ == "__main__":
    main(sys.argv[1:])
