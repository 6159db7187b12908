"""Layouts on tensors: plans of layers, and models that run them."""

from .functions import Context, register
from .interpreter import LayerInterpreter
from .layout import LaidOut, lay_out
from .tokens import token_index

__all__ = ["Context", "LaidOut", "LayerInterpreter", "lay_out", "register", "token_index"]
