"""Messages between two ranks that leave when both ends have come."""

from collections.abc import Callable, Sequence
from typing import Any

from .machine import Tag


class Pairs:
    """Both ends of a message go on when all of it is there.

    Args:
        move: Puts bytes on the way from source to target; gives the event of their end.
    """

    def __init__(self, env: Any, move: Callable[[int, int, int], Any]) -> None:
        self._env = env
        self._move = move
        # what one end waits for, and whether it sends
        self._posted: dict[tuple[Tag, int, int], tuple[Any, bool]] = {}

    def post(self, tag: Tag, source: int, target: int, nbytes: int, *, sends: bool) -> Any:
        """One end of a message; the event fires when it is over."""
        key = (tag, source, target)
        other = self._posted.pop(key, None)
        if other is None:
            over = self._env.event()
            self._posted[key] = (over, sends)
            return over
        over, sent = other
        assert sent is not sends, f"message {tag} from {source} to {target} has two equal ends"
        self._move(source, target, nbytes).callbacks.append(lambda _: over.succeed())
        return over

    def missing(self) -> list[tuple[int, int]]:
        """(A waiting rank, a rank that it waits for)."""
        return [
            (source, target) if sends else (target, source)
            for (_, source, target), (_, sends) in self._posted.items()
        ]


def ends_of(
    rank: int, group: Sequence[int], parts: Sequence[int], *, root: int, scatters: bool
) -> list[tuple[int, int, int]]:
    """(source, target, bytes) of each message of a scatter or gather of which `rank` is an end: all of the root's, or
    the one with the root.

    Args:
        parts: Bytes of each place of the group; the root's own is 0.
        root: A place.
    """
    at = group[root]
    found = [(at, peer, nbytes) for peer, nbytes in zip(group, parts, strict=True) if nbytes]
    if rank != at:
        found = [message for message in found if message[1] == rank]
    return found if scatters else [(peer, at, nbytes) for at, peer, nbytes in found]
