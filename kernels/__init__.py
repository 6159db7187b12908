"""Arithmetic on tensors: block quantization, the messages made of it, their sums, and pruned matmuls.

Each operation is one function; behind it stand the plain-torch reference, the native CPU code and, for tensors on a
GPU, Triton.
"""

from .codec import decode, decode_segments, dequantize_blocks, encode, encode_segments, quantize_blocks
from .feedback import ErrorBuffer, encode_with_feedback, reduce_quantize_with_feedback
from .finite import BadBlock, first_bad_block, first_bad_message
from .layout import code_bytes, wire_bytes
from .native import Prepared, prepare
from .pruned import pruned_matmul
from .reduce import dequantize_reduce, dequantize_reduce_quantize
from .reorder import reorder_slices, slice_order
from .warm import prepare_gpu

__all__ = [
    "BadBlock",
    "ErrorBuffer",
    "Prepared",
    "code_bytes",
    "decode",
    "decode_segments",
    "dequantize_blocks",
    "dequantize_reduce",
    "dequantize_reduce_quantize",
    "encode",
    "encode_segments",
    "encode_with_feedback",
    "first_bad_block",
    "first_bad_message",
    "prepare",
    "prepare_gpu",
    "pruned_matmul",
    "quantize_blocks",
    "reduce_quantize_with_feedback",
    "reorder_slices",
    "slice_order",
    "wire_bytes",
]
