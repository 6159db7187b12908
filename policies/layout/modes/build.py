"""From a config to a mode: by its name in a table, or by the class that the user names."""

from collections.abc import Callable

from ....conf.schema import ParallelConf
from ....conf.schema.parallel import TENSOR_MODES
from ...loading import load_named
from ...mesh import divisors
from .cube import Cube
from .megatron import Megatron
from .mode import TensorMode
from .sizes import cube_side, square_side
from .summa import Summa

# What engines ask of a mode (`mode.TensorMode`)
_MODE = ("name", "dims", "outer", "cuts", "plan", "check", "vocab_parts", "by_dtensor")

MakeMode = Callable[[ParallelConf], TensorMode]


def build_mode(conf: ParallelConf) -> TensorMode:
    """The mode of `conf`.

    Raises:
        ValueError: If parallel.tensor does not fit the mode, naming both numbers; or if
            `package.module:Class` or `file.py:Class` cannot be loaded, or is no mode.
    """
    make = _MODES.get(conf.tensor_mode)
    if make is None:
        made = load_named("parallel.tensor_mode", conf.tensor_mode, conf)
        lacking = [key for key in _MODE if not hasattr(made, key)]
        if lacking:
            raise ValueError(
                f"parallel.tensor_mode={conf.tensor_mode!r} makes a {type(made).__name__}, which is no mode: it lacks "
                f"{lacking}"
            )
        mode: TensorMode = made
    else:
        mode = make(conf)
    size = 1
    for _, ranks in mode.dims:
        size *= ranks
    if size != conf.tensor:
        raise ValueError(
            f"parallel.tensor={conf.tensor}: parallel.tensor_mode={conf.tensor_mode} lays out {size} ranks"
        )
    return mode


def _megatron(conf: ParallelConf) -> TensorMode:
    return Megatron(conf.tensor, sequence=conf.sequence_mode == "megatron" and conf.sequence > 1)


def _2d(conf: ParallelConf) -> TensorMode:
    side = square_side(conf.tensor)
    if side is None:
        raise ValueError(
            f"parallel.tensor={conf.tensor} with parallel.tensor_mode=2d must be a square q * q; use one of "
            f"{[q * q for q in range(1, 11)]}"
        )
    return Summa(side)


def _2p5d(conf: ParallelConf) -> TensorMode:
    side = square_side(conf.tensor, depth=conf.depth)
    if side is None:
        depths = [d for d in divisors(conf.tensor) if square_side(conf.tensor, depth=d) is not None]
        raise ValueError(
            f"parallel.tensor={conf.tensor} with parallel.tensor_mode=2.5d must be q * q * depth, and parallel.depth="
            f"{conf.depth} leaves {conf.tensor}/{conf.depth}, which is no square; parallel.depth can be one of {depths}"
        )
    return Summa(side, conf.depth)


def _3d(conf: ParallelConf) -> TensorMode:
    side = cube_side(conf.tensor)
    if side is None:
        raise ValueError(
            f"parallel.tensor={conf.tensor} with parallel.tensor_mode=3d must be a cube q * q * q; use one of "
            f"{[q**3 for q in range(1, 9)]}"
        )
    return Cube(side)


_MODES: dict[str, MakeMode] = {"1d": _megatron, "2d": _2d, "2.5d": _2p5d, "3d": _3d}
assert tuple(_MODES) == TENSOR_MODES
