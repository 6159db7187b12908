"""A vision transformer in plain torch, with the parameters that `conf.model_spec` counts for family "vit".

They have the names and shapes of transformers' ViTForImageClassification. Before each sublayer and after the last
block there is a norm; the class token tells the class (Dosovitskiy et al. 2021).

Shapes: B images, C channels, P patches, T = P + 1 tokens, D hidden, H heads, E head size, K classes.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..conf.model_spec import ModelSpec
from .leaves import AttentionCore, CountRight, CrossEntropy, FirstToken, PositionsOf, split_heads
from .stack import PacedBlock, Stack


class ViT(Stack):
    """Returns the loss.

    Weights are the same for one seed on every rank and under every layout.

    Args:
        spec: Of family "vit" with a classifier.
        seed: Of the initial weights; None: they come from elsewhere, and are left as they are made.
        recompute, dropout: As `Stack`.

    Attributes:
        num_right: Images of the last forward without gradients whose likeliest class was theirs; one number, and
            where the model is laid out over ranks this rank's share of it.

    Raises:
        ValueError: The spec is of another family, or has no classifier.
    """

    def __init__(
        self, spec: ModelSpec, *, seed: int | None, recompute: bool = False, dropout: float = 0.0
    ) -> None:
        if spec.family != "vit" or spec.head != "classifier":
            raise ValueError(
                f"model.family={spec.family!r} with model.head={spec.head!r}: a ViT is of family 'vit' with head "
                "'classifier'"
            )
        super().__init__(spec, recompute=recompute, dropout=dropout)
        self.vit = _Body(self)
        self.classifier = nn.Linear(spec.hidden, spec.classes)
        self.loss = CrossEntropy(over_all=True)
        self.count_right = CountRight()
        self.num_right = torch.zeros((), dtype=torch.int64)
        if seed is not None:
            self.init_weights(seed)

    def stack(self) -> nn.ModuleList:
        return self.vit.layers

    def first_deviation(self, name: str, weight: Tensor) -> float:
        """Glorot's for what is between tokens, and by the pixels of a patch for its matrix, as in the paper's own code
        (google-research/vision_transformer); 0.02 for positions, class token and classifier."""
        if name.endswith("projection.weight"):
            return 1 / math.sqrt(weight[0].numel())
        if weight.ndim != 2 or name.startswith("classifier"):
            return 0.02
        return math.sqrt(2 / sum(weight.shape))

    def before_blocks(self, inputs: Tensor) -> Tensor:
        embedded_BTD: Tensor = self.vit.embeddings(inputs.to(self.vit.embeddings.cls_token.dtype))
        return embedded_BTD

    def behind_blocks(self, x_BTD: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy in nats, fp32: summed over the images that have a class, and divided by B."""
        logits_BK = self.classifier(self.vit.layernorm(x_BTD)[:, 0])
        loss: Tensor = self.loss(logits_BK, targets)
        if not torch.is_grad_enabled():
            self.num_right = self.count_right(logits_BK, targets)
        return loss


class _Body(nn.Module):
    def __init__(self, model: Stack) -> None:
        super().__init__()
        self.embeddings = _Embeddings(model)
        self.layers = nn.ModuleList(Block(model, i) for i in range(model.spec.layers))
        self.layernorm = nn.LayerNorm(model.spec.hidden)


class _Embeddings(nn.Module):
    """Patches, each by one matrix; the class token before them; positions added."""

    def __init__(self, model: Stack) -> None:
        super().__init__()
        spec = model.spec
        self.cls_token = nn.Parameter(torch.zeros(1, 1, spec.hidden))
        self.position_embeddings = nn.Parameter(torch.zeros(1, spec.sequence, spec.hidden))
        self.patch_embeddings = _Patches(spec)
        self.class_token = FirstToken(self, "cls_token")
        self.positions = PositionsOf(self, "position_embeddings")
        self.drop = model.make_dropout("embedding")

    def forward(self, images_BCHW: Tensor) -> Tensor:
        tokens_BTD: Tensor = self.drop(self.positions(self.class_token(self.patch_embeddings(images_BCHW))))
        return tokens_BTD


class _Patches(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.projection = nn.Conv2d(spec.channels, spec.hidden, spec.patch, stride=spec.patch)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """[B, P, D]; rows and columns beyond the last whole patch are not seen."""
        patches_BPD: Tensor = self.projection(images_BCHW).flatten(2).transpose(1, 2)
        return patches_BPD


class Block(PacedBlock):
    """x + attention(layernorm_before(x)), then x + mlp(layernorm_after(x))."""

    def __init__(self, model: Stack, index: int) -> None:
        super().__init__()
        spec = model.spec
        self.attention = _Attention(spec)
        self.layernorm_before = nn.LayerNorm(spec.hidden)
        self.layernorm_after = nn.LayerNorm(spec.hidden)
        self.mlp = _Mlp(spec)
        self.drop1 = model.make_dropout(f"block.{index}.attention")
        self.drop2 = model.make_dropout(f"block.{index}.mlp")

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self.pace is not None:
            x_BTD = self.pace.enter(x_BTD)
        x_BTD = x_BTD + self.drop1(self.attention(self.layernorm_before(x_BTD)))
        x_BTD = x_BTD + self.drop2(self.mlp(self.layernorm_after(x_BTD)))
        return x_BTD if self.pace is None else self.pace.leave(x_BTD)


class _Attention(nn.Module):
    """Every token sees all of its image."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self._head_size = spec.head_dim
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(spec.hidden, spec.hidden, bias=spec.qkv_bias) for _ in range(3)
        )
        self.core = AttentionCore(causal=False, head_size=spec.head_dim)
        self.o_proj = nn.Linear(spec.hidden, spec.hidden)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q_BHTE, k_BHTE, v_BHTE = (
            split_heads(project(x_BTD), self._head_size)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed_BTD: Tensor = self.o_proj(self.core(q_BHTE, k_BHTE, v_BHTE))
        return mixed_BTD


class _Mlp(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.fc1 = nn.Linear(spec.hidden, spec.ffn)
        self.fc2 = nn.Linear(spec.ffn, spec.hidden)

    def forward(self, x_BTD: Tensor) -> Tensor:
        widened: Tensor = self.fc2(functional.gelu(self.fc1(x_BTD)))
        return widened
