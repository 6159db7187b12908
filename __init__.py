"""twinbed: one policy object, carried out by a simulator and by real training."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .sim.predict import predict

__all__ = ["predict"]


def __getattr__(name: str) -> Any:
    if name == "predict":  # imported when asked for: `import twinbed` costs nothing
        from .sim.predict import predict

        return predict
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
