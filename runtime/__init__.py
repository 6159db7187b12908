"""Carries plans out on real processes. `attach` gives a policy to a model in a loop of your own; `parallelize` shares a
model out over ranks, in a script that was written for one process.

Importing this package loads no torch: names are looked up when they are used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attach import Attached, attach
    from .parallel import ParallelModel, parallelize

__all__ = ["Attached", "ParallelModel", "attach", "parallelize"]

_FILES = {
    "Attached": ".attach",
    "attach": ".attach",
    "ParallelModel": ".parallel",
    "parallelize": ".parallel",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_FILES[name], __name__), name)
    globals()[name] = value
    return value
