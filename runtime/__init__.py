"""Carries plans out on real processes. `attach` gives a policy to a model in a loop of your own.

Importing this package loads no torch: names are looked up when they are used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attach import Attached, attach

__all__ = ["Attached", "attach"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(".attach", __name__), name)
    globals()[name] = value
    return value
