"""What the models that are trained here share: blocks as units, a clock and a pace for each, and first weights.

Shapes: B sequences, T tokens, D hidden.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..conf.model_flop import block_matmuls, root_matmuls
from ..conf.model_spec import ModelSpec
from .laps import Clock, Pace, boundary


class Stack(nn.Module, ABC):
    """Blocks of `conf.model_spec`, and a root around them. A model returns the loss, so that its head and the
    cross-entropy lie within the root unit.

    A part of one (`layout.stages.keep_part`) has some of the blocks, and of the root what lies before or behind them:
    it takes activations where it is not the first, and returns activations where it is not the last.

    Args:
        spec: Of the model.
        recompute: Every block repeats its forward in backward. The checkpoint lies outside the block's
            module, and so outside FSDP's hooks: gathers keep their number and order.

    Attributes:
        is_first, is_last: Whether the root's layers before the blocks, and those behind them, are here.
    """

    clock: Clock | None = None  # told when computation passes from unit to unit
    is_first = True
    is_last = True

    def __init__(self, spec: ModelSpec, *, recompute: bool = False) -> None:
        super().__init__()
        self.spec, self.recompute = spec, recompute
        self._pace: Pace | None = None

    @abstractmethod
    def stack(self) -> nn.ModuleList:
        """The blocks, in the order of forward."""

    @abstractmethod
    def before_blocks(self, inputs: Tensor) -> Tensor:
        """What goes into the first block."""

    @abstractmethod
    def behind_blocks(self, x_BTD: Tensor, targets: Tensor) -> Tensor:
        """The loss, from what the last block gave."""

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """The loss in fp32, as the family says; of a part that is not the last, [B, T, D] for the next one.

        Args:
            inputs: Of a part that is not the first, what the one before it returned.
            targets: Read by the last part alone.
        """
        x_BTD = self.through_blocks(self.before_blocks(inputs) if self.is_first else inputs)
        if not self.is_last:
            return x_BTD
        if targets is None:
            raise ValueError(f"{type(self).__name__} returns a loss: give it targets")
        loss = self.behind_blocks(x_BTD if self._pace is None else self._pace.enter(x_BTD), targets)
        return loss if self._pace is None else self._pace.leave(loss)

    @abstractmethod
    def first_deviation(self, name: str, weight: Tensor) -> float:
        """Of the first values of a matrix."""

    def units(self) -> Mapping[str, nn.Module]:
        """The modules whose weights move together, as `conf.model_spec.parameters` names them; "root" also where a
        part has nothing of it."""
        return {"root": self} | {f"block.{i}": block for i, block in self.stack().named_children()}

    def through_blocks(self, x_BTD: Tensor) -> Tensor:
        """From what the root embedded to what its head takes, or through the blocks of a part."""
        border = "root"
        for i, block in self.stack().named_children():
            x_BTD = boundary(x_BTD, self.clock, forward=f"forward/{border}", backward=f"backward/block.{i}")
            if self.recompute and torch.is_grad_enabled():
                x_BTD = checkpoint(block, x_BTD, use_reentrant=False, preserve_rng_state=False)
            else:
                x_BTD = block(x_BTD)
            border = f"block.{i}"
        return boundary(x_BTD, self.clock, forward=f"forward/{border}", backward="backward/root")

    def emulate(self, flop_per_s: float, *, sequence: int, micro: int) -> None:
        """Make every unit take the time that its matmuls take at this rate (backward: twice that).

        All of the root's time is taken where its head is.
        """
        block = sum(product.flop for product in block_matmuls(self.spec, sequence=sequence, micro=micro))
        root = sum(product.flop for product in root_matmuls(self.spec, sequence=sequence, micro=micro))
        self._pace = Pace(round(root / flop_per_s * 1e9), recompute=False)
        for each in self.stack():
            assert isinstance(each, PacedBlock)
            each.pace = Pace(round(block / flop_per_s * 1e9), recompute=self.recompute)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Matrices are normal, biases 0, weights of norms 1."""
        random = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, self.first_deviation(name, parameter), generator=random)


class PacedBlock(nn.Module):
    """A block that can be made to take its time."""

    def __init__(self) -> None:
        super().__init__()
        self.pace: Pace | None = None


def build_model(spec: ModelSpec, *, seed: int | None, recompute: bool = False) -> Stack:
    """The model of the spec's family.

    Args:
        seed: Of the first weights; None: they come from elsewhere.

    Raises:
        ValueError: The family is not trained here.
    """
    from .model import GPT
    from .vit import ViT

    kind = ViT if spec.family == "vit" else GPT
    return kind(spec, seed=seed, recompute=recompute)
