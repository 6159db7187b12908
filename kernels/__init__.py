"""Arithmetic on tensors: block quantization, the messages made of it, and their sums.

Each operation is one function; behind it stand the plain-torch reference and the native CPU code.
"""

from .codec import decode, decode_segments, dequantize_blocks, encode, encode_segments, quantize_blocks
from .layout import code_bytes, wire_bytes
from .native import Prepared, prepare
from .reduce import dequantize_reduce, dequantize_reduce_quantize
from .reorder import reorder_slices, slice_order

__all__ = [
    "Prepared",
    "code_bytes",
    "decode",
    "decode_segments",
    "dequantize_blocks",
    "dequantize_reduce",
    "dequantize_reduce_quantize",
    "encode",
    "encode_segments",
    "prepare",
    "quantize_blocks",
    "reorder_slices",
    "slice_order",
    "wire_bytes",
]
