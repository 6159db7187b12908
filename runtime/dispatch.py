"""Watches what reaches torch.distributed, beneath all Python wrappers: our own calls, and those of libraries.

The operators of `torch.ops.c10d` are wrapped once a process; each call is reported to the ledger of the model
whose plan is being carried out, else to the active one, sized by the tensors really passed, and then goes on to
torch's own kernel. So functional collectives (DTensor, gradient clipping) are seen as well, under inference mode
too and on any thread; other operators pay nothing.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from ..policies import wire
from ..policies.wire import Sent
from .ledger import Ledger, open_ledger

# What a handler returns: the name of the collective, its payload in bytes, and what this rank sends.
_Seen = tuple[str, int, Sent]
_Handler = Callable[[Ledger, tuple[int, ...], tuple[Any, ...]], _Seen]

# The lowest key above the backends. It is on in every thread and mode, also where autograd's keys are off,
# and torch has no kernel of its own there for these operators.
_KEY: Final = "BackendSelect"
_BELOW: Final = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

_active: Ledger | None = None
_library: torch.library.Library | None = None  # kept: the wrappers go with it


def activate(ledger: Ledger | None) -> None:
    """From now on collectives that belong to no plan are reported to `ledger` (None: to nobody).

    Where a process trains several models, each says so when it computes: what a library then sends is taken to be
    of the model that computed last.
    """
    global _active
    _install()
    _active = ledger


def _install() -> None:
    global _library
    if _library is not None:
        return
    library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    for name, (group_at, handler) in _HANDLERS.items():
        _wrap(library, name, group_at, handler)
    _library = library


def _wrap(library: torch.library.Library, name: str, group_at: int, handler: _Handler) -> None:
    """Watch one operator.

    At the key BackendSelect, which comes before the backends and is on in inference mode too; what comes
    after it is torch's own. The backend's kernel itself must not be replaced: it would be called with the
    interpreter lock held, and gloo's worker threads need that lock while they hold the queue's.
    """
    operator = getattr(torch.ops.c10d, name).default

    def watched(keys: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        ledger = open_ledger() or _active
        if ledger is not None:
            group = _ranks(dist.ProcessGroup.unbox(args[group_at]))
            ledger.observe(group, *handler(ledger, group, args))
        return operator.redispatch(keys & _BELOW, *args, **kwargs)

    library.impl(name, watched, _KEY, with_keyset=True)  # type: ignore[no-untyped-call]


@lru_cache(maxsize=256)
def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _all_reduce(ledger: Ledger, group: tuple[int, ...], args: tuple[Any, ...]) -> _Seen:
    (x,) = args[0]
    sent = wire.all_reduce(ledger.mesh, ledger.rank, group, x.numel(), x.element_size())
    return "all_reduce", _bytes(x), sent


def _all_gather_base(ledger: Ledger, group: tuple[int, ...], args: tuple[Any, ...]) -> _Seen:
    return _gathered(ledger, group, _bytes(args[1]))


def _all_gather(ledger: Ledger, group: tuple[int, ...], args: tuple[Any, ...]) -> _Seen:
    return _gathered(ledger, group, _bytes(args[1][0]))


def _gathered(ledger: Ledger, group: tuple[int, ...], shard_bytes: int) -> _Seen:
    sent = wire.all_gather(ledger.mesh, ledger.rank, group, shard_bytes)
    return "all_gather", len(group) * shard_bytes, sent


def _reduce_scatter_base(ledger: Ledger, group: tuple[int, ...], args: tuple[Any, ...]) -> _Seen:
    return _scattered(ledger, group, args[0])


def _reduce_scatter(ledger: Ledger, group: tuple[int, ...], args: tuple[Any, ...]) -> _Seen:
    return _scattered(ledger, group, args[0][0])


def _scattered(ledger: Ledger, group: tuple[int, ...], out: Tensor) -> _Seen:
    """gloo's reduce-scatter is an all-reduce of which each rank keeps a part, and moves its bytes."""
    whole = len(group) * out.numel()
    if out.device.type == "cpu":
        sent = wire.all_reduce(ledger.mesh, ledger.rank, group, whole, out.element_size())
    else:
        sent = wire.reduce_scatter(ledger.mesh, ledger.rank, group, _bytes(out))
    return "reduce_scatter", whole * out.element_size(), sent


def _all_to_all_base(ledger: Ledger, group: tuple[int, ...], args: tuple[Any, ...]) -> _Seen:
    x, splits = args[1], args[4]
    row_bytes = _bytes(x) // len(x) if len(x) else 0
    sizes = [rows * row_bytes for rows in splits] if splits else [_bytes(x) // len(group)] * len(group)
    return _exchanged(ledger, group, sizes)


def _all_to_all(ledger: Ledger, group: tuple[int, ...], args: tuple[Any, ...]) -> _Seen:
    return _exchanged(ledger, group, [_bytes(x) for x in args[1]])


def _exchanged(ledger: Ledger, group: tuple[int, ...], sizes_bytes: Sequence[int]) -> _Seen:
    messages = [(peer, n) for peer, n in zip(group, sizes_bytes, strict=True) if peer != ledger.rank]
    return "all_to_all", sum(sizes_bytes), wire.to_peers(ledger.mesh, ledger.rank, messages)


def _broadcast(ledger: Ledger, group: tuple[int, ...], args: tuple[Any, ...]) -> _Seen:
    x, root = args[0][0], group[args[2]]
    return "broadcast", _bytes(x), wire.broadcast(ledger.mesh, ledger.rank, group, root, _bytes(x))


def _reduce(ledger: Ledger, group: tuple[int, ...], args: tuple[Any, ...]) -> _Seen:
    x, root = args[0][0], group[args[3]]
    sent = wire.reduce_to(ledger.mesh, ledger.rank, group, root, x.numel(), x.element_size())
    return "reduce", _bytes(x), sent


def _send(ledger: Ledger, group: tuple[int, ...], args: tuple[Any, ...]) -> _Seen:
    nbytes = _bytes(args[0][0])
    return "send", nbytes, wire.to_peers(ledger.mesh, ledger.rank, [(group[args[2]], nbytes)])


# Operator: place of the process group among its arguments, and who sizes it.
_HANDLERS: Final[dict[str, tuple[int, _Handler]]] = {
    "allreduce_": (1, _all_reduce),
    "_allgather_base_": (2, _all_gather_base),
    "allgather_": (2, _all_gather),
    "_reduce_scatter_base_": (2, _reduce_scatter_base),
    "reduce_scatter_": (2, _reduce_scatter),
    "alltoall_base_": (2, _all_to_all_base),
    "alltoall_": (2, _all_to_all),
    "broadcast_": (1, _broadcast),
    "reduce_": (1, _reduce),
    "send": (1, _send),
}
