"""Tensor-parallel modes: one file each, and the table by which a config names them."""

from .build import build_mode
from .cube import Cube
from .megatron import Megatron
from .mode import Cuts, Sizes, TensorMode
from .sizes import cube_side, legal_1d, square_side
from .summa import Summa

__all__ = [
    "Cube",
    "Cuts",
    "Megatron",
    "Sizes",
    "Summa",
    "TensorMode",
    "build_mode",
    "cube_side",
    "legal_1d",
    "square_side",
]
