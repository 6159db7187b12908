"""What a step of the optimizer takes of a rank: states and buffers, bytes moved, and norms summed over the ranks.

Bytes a parameter are those of its fp32 weight's optimizer; the trainer's tensors are fp32.
"""

from collections.abc import Iterable

from ..conf.model_spec import Unit
from ..conf.schema import LambCorrection, OptimizerConf

# A fused kernel reads gradient, weight and two moments, and writes weight and moments
ADAMW_PASS_BYTES = 28
# torch's foreach SGD: weights 3 tensors; momentum: scaled 2, gradient added 3; decay: added to a copy of the gradient 3
SGD_PASS_BYTES = 12
MOMENTUM_PASS_BYTES = 20
DECAY_PASS_BYTES = 12

_ELEMENT_BYTES = 4
# Tensors that the passes of `runtime.optim` read and write, one pass a line of it (`torch._foreach_*`). LAMB: first
# moment 3, second 2 + 3, root 2, eps 2, quotient 3, both norms 2, rate 2, weights 3
_LAMB_PASSES = 22
_LAMB_CORRECTION_PASSES = 2  # of the moments: their denominator
_LAMB_DECAY_PASSES = {True: 3, False: 2}  # by `decay_in_ratio`: of the direction, or of the weights alone
_LARS_PASSES = 12  # both norms 2, decay 2, gradient 3, rate 2, weights 3
_LARS_MOMENTUM_PASSES = 5


def pass_bytes(optimizer: OptimizerConf) -> int:
    """Bytes that a step reads and writes for each parameter that a rank steps; clipping is not among them."""
    if optimizer.name == "adamw":
        return ADAMW_PASS_BYTES
    if optimizer.name == "sgd":
        momentum = MOMENTUM_PASS_BYTES if optimizer.momentum else 0
        return SGD_PASS_BYTES + momentum + (DECAY_PASS_BYTES if optimizer.weight_decay else 0)
    if optimizer.name == "lars":
        return _ELEMENT_BYTES * (_LARS_PASSES + (_LARS_MOMENTUM_PASSES if optimizer.momentum else 0))
    passes = _LAMB_PASSES
    if optimizer.bias_correction and optimizer.correction is LambCorrection.moments:
        passes += _LAMB_CORRECTION_PASSES
    if optimizer.weight_decay:
        passes += _LAMB_DECAY_PASSES[optimizer.decay_in_ratio]
    return _ELEMENT_BYTES * passes


def moment_bytes(optimizer: OptimizerConf) -> int:
    """States of each parameter, besides a master copy of its weight."""
    if optimizer.name in ("adamw", "lamb"):
        return 2 * _ELEMENT_BYTES
    return _ELEMENT_BYTES if optimizer.momentum else 0


def buffer_bytes(optimizer: OptimizerConf) -> int:
    """What a step holds for each parameter while it runs: LAMB direction and denominator, LARS the move, SGD a decayed
    gradient.
    """
    if optimizer.name == "lamb":
        return 2 * _ELEMENT_BYTES
    if optimizer.name == "sgd":
        return _ELEMENT_BYTES if optimizer.weight_decay else 0
    return _ELEMENT_BYTES if optimizer.name == "lars" else 0


def num_norms(optimizer: OptimizerConf, units: Iterable[Unit]) -> int:
    """fp32 numbers that ranks add up in a step where they share parameters: two for each trust ratio."""
    if optimizer.name not in ("lamb", "lars"):
        return 0
    least = 2 if optimizer.exclude_1d else 0
    return 2 * sum(len(tensor.shape) >= least for unit in units for tensor in unit.tensors)
