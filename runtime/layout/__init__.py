"""Layouts on tensors: plans of layers, and models that run them."""

from .functions import Context, register
from .interpreter import LayerInterpreter
from .layout import LaidOut, lay_out, tell_places
from .tokens import token_index

__all__ = ["Context", "LaidOut", "LayerInterpreter", "lay_out", "register", "tell_places", "token_index"]
