"""What the models that are trained here share: blocks as units, a clock and a pace for each, and first weights.

Shapes: B sequences, T tokens, D hidden.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..conf.model_flop import block_matmuls, root_matmuls
from ..conf.model_spec import ModelSpec
from .dropout import Dropout, DropoutClock
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
        dropout: Chance by which each number of what goes into the blocks, and of what a sublayer adds to the
            residual, is zeroed in training; attention's probabilities are left alone.

    Attributes:
        is_first, is_last: Whether the root's layers before the blocks, and those behind them, are here.
        recompute_to_end: A recomputation goes on behind the last number that backward needs, so that the collectives
            there are repeated, however the block's products are computed.
        dropout_clock: Says where the training is; whoever trains with dropout sets it before each forward.
    """

    clock: Clock | None = None  # told when computation passes from unit to unit
    is_first = True
    is_last = True

    def __init__(self, spec: ModelSpec, *, recompute: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.spec, self.recompute, self.dropout = spec, recompute, dropout
        self.dropout_clock = DropoutClock()
        self._pace: Pace | None = None
        self.recompute_to_end = False

    @abstractmethod
    def stack(self) -> nn.ModuleList:
        """The blocks, in the order of forward."""

    def make_dropout(self, place: str) -> Dropout:
        """At "embedding", "block.0.attention", "block.0.mlp", ...: the place gives the mask."""
        return Dropout(self.dropout, place=place, clock=self.dropout_clock)

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
        return loss if self._pace is None else self._pace.leave(loss).clone()  # FSDP2 warns of views

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
                x_BTD = checkpoint(
                    block,
                    x_BTD,
                    use_reentrant=False,
                    preserve_rng_state=False,
                    early_stop=not self.recompute_to_end,
                )
            else:
                x_BTD = block(x_BTD)
            border = f"block.{i}"
        return boundary(x_BTD, self.clock, forward=f"forward/{border}", backward="backward/root")

    def emulate(
        self,
        flop_per_s: float | None,
        *,
        sequence: int,
        slow: Callable[[], float] | None = None,
        synchronize: Callable[[], None] | None = None,
    ) -> None:
        """Make every unit take the time that its matmuls take at this rate (backward: twice that), by how many
        sequences it is given.

        All of the root's time is taken where its head is.

        Args:
            flop_per_s: None: units take the time that they take.
            slow, synchronize: As of `Pace`: how many times as long units take now.
        """
        block = sum(product.flop for product in block_matmuls(self.spec, sequence=sequence, micro=1))
        root = sum(product.flop for product in root_matmuls(self.spec, sequence=sequence, micro=1))

        def pace(flop: int, *, recompute: bool) -> Pace:
            sequence_ns = None if flop_per_s is None else flop / flop_per_s * 1e9
            if slow is None:
                return Pace(sequence_ns, recompute=recompute)
            return Pace(sequence_ns, recompute=recompute, slow=slow, synchronize=synchronize)

        self._pace = pace(root, recompute=False)
        for each in self.stack():
            assert isinstance(each, PacedBlock)
            each.pace = pace(block, recompute=self.recompute)

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


def build_model(spec: ModelSpec, *, seed: int | None, recompute: bool = False, dropout: float = 0.0) -> Stack:
    """The model of the spec's family.

    Args:
        seed: Of the first weights and of dropout; None: weights come from elsewhere.
        recompute, dropout: As `Stack`.

    Raises:
        ValueError: The family is not trained here.
    """
    from .bert import BERT
    from .llama import Llama
    from .model import GPT
    from .vit import ViT

    kinds: dict[str, type[GPT | ViT | Llama | BERT]] = {
        "vit": ViT,
        "llama": Llama,
        "qwen2": Llama,
        "bert": BERT,
    }
    model = kinds.get(spec.family, GPT)(spec, seed=seed, recompute=recompute, dropout=dropout)
    model.dropout_clock.seed = seed or 0
    return model
