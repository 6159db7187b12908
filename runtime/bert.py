"""BERT in plain torch, which tells masked tokens: the parameters that `conf.model_spec` counts for family "bert" with
head "masked_lm".

They have the names and shapes of transformers' BertForMaskedLM, and give the same numbers. After each sublayer and
after the embeddings there is a norm (Devlin et al. 2018). All tokens are of type 0; the other rows of that table
have gradients of 0.

Shapes: B sequences, T tokens, D hidden, H heads, E head size, V vocabulary.
"""

from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..conf.model_spec import ModelSpec
from .leaves import AttentionCore, CrossEntropy, Positions, TiedHead, TokenTypes, split_heads
from .stack import PacedBlock, Stack

_NORM_EPS: Final = 1e-12  # of the released code and of transformers


class BERT(Stack):
    """Returns the loss.

    Weights are the same for one seed on every rank and under every layout.

    Args:
        spec: Of family "bert" with head "masked_lm" and tied embeddings.
        seed: Of the initial weights; None: they come from elsewhere, and are left as they are made.
        recompute, dropout: As `Stack`; the embeddings' sum is dropped out behind its norm, as in the released code.

    Raises:
        ValueError: The spec is of another family, or has another head.
    """

    def __init__(
        self, spec: ModelSpec, *, seed: int | None, recompute: bool = False, dropout: float = 0.0
    ) -> None:
        if spec.family != "bert" or spec.head != "masked_lm" or not spec.tied_embeddings:
            raise ValueError(
                f"model.family={spec.family!r} with model.extra.head={spec.head!r} and model.tied_embeddings="
                f"{spec.tied_embeddings}: a BERT is of family 'bert' with head 'masked_lm' and tied embeddings"
            )
        super().__init__(spec, recompute=recompute, dropout=dropout)
        self.bert = _Body(self)
        self.cls = _Heads(self)
        self.loss = CrossEntropy()
        if seed is not None:
            self.init_weights(seed)

    def stack(self) -> nn.ModuleList:
        return self.bert.encoder.layer

    def first_deviation(self, name: str, weight: Tensor) -> float:
        """0.02 everywhere, as the paper; the norm behind each sum leaves no residual to be kept small."""
        return 0.02

    def before_blocks(self, inputs: Tensor) -> Tensor:
        embedded_BTD: Tensor = self.bert.embeddings(inputs)
        return embedded_BTD

    def behind_blocks(self, x_BTD: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats, fp32, over the tokens whose target is not -100."""
        loss: Tensor = self.loss(self.cls.predictions(x_BTD), targets)
        return loss


class _Body(nn.Module):
    def __init__(self, model: Stack) -> None:
        super().__init__()
        self.embeddings = _Embeddings(model)
        self.encoder = _Encoder(model)


class _Embeddings(nn.Module):
    """Word, type and position, and a norm over their sum."""

    def __init__(self, model: Stack) -> None:
        super().__init__()
        spec = model.spec
        self.word_embeddings = nn.Embedding(spec.vocab, spec.hidden)
        self.position_embeddings = Positions(spec.sequence, spec.hidden)
        self.token_type_embeddings = TokenTypes(spec.token_types, spec.hidden)
        self.LayerNorm = nn.LayerNorm(spec.hidden, eps=_NORM_EPS)
        self.drop = model.make_dropout("embedding")

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.token_type_embeddings(self.word_embeddings(tokens_BT))
        embedded_BTD: Tensor = self.drop(self.LayerNorm(self.position_embeddings(x_BTD)))
        return embedded_BTD


class _Encoder(nn.Module):
    def __init__(self, model: Stack) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Block(model, i) for i in range(model.spec.layers))


class Block(PacedBlock):
    """norm(x + attention(x)), then norm(x + mlp(x))."""

    def __init__(self, model: Stack, index: int) -> None:
        super().__init__()
        spec = model.spec
        self.attention = _Attention(model, f"block.{index}.attention")
        self.intermediate = _Widened(spec)
        self.output = _Added(model, spec.ffn, f"block.{index}.mlp")

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self.pace is not None:
            x_BTD = self.pace.enter(x_BTD)
        x_BTD = self.attention(x_BTD)
        x_BTD = self.output(self.intermediate(x_BTD), x_BTD)
        return x_BTD if self.pace is None else self.pace.leave(x_BTD)


class _Attention(nn.Module):
    def __init__(self, model: Stack, place: str) -> None:
        super().__init__()
        self.self = _SelfAttention(model.spec)
        self.output = _Added(model, model.spec.hidden, place)

    def forward(self, x_BTD: Tensor) -> Tensor:
        added_BTD: Tensor = self.output(self.self(x_BTD), x_BTD)
        return added_BTD


class _SelfAttention(nn.Module):
    """Every token sees all of its sequence."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self._head_size = spec.head_dim
        self.query, self.key, self.value = (nn.Linear(spec.hidden, spec.hidden) for _ in range(3))
        self.core = AttentionCore(causal=False, head_size=spec.head_dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q_BHTE, k_BHTE, v_BHTE = (
            split_heads(project(x_BTD), self._head_size) for project in (self.query, self.key, self.value)
        )
        mixed_BTD: Tensor = self.core(q_BHTE, k_BHTE, v_BHTE)
        return mixed_BTD


class _Widened(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.dense = nn.Linear(spec.hidden, spec.ffn)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return functional.gelu(self.dense(x_BTD))


class _Added(nn.Module):
    """The last product of a sublayer, added to what came in, and the norm behind."""

    def __init__(self, model: Stack, width: int, place: str) -> None:
        super().__init__()
        self.dense = nn.Linear(width, model.spec.hidden)
        self.LayerNorm = nn.LayerNorm(model.spec.hidden, eps=_NORM_EPS)
        self.drop = model.make_dropout(place)

    def forward(self, inner_BTX: Tensor, x_BTD: Tensor) -> Tensor:
        normed_BTD: Tensor = self.LayerNorm(x_BTD + self.drop(self.dense(inner_BTX)))
        return normed_BTD


class _Heads(nn.Module):
    def __init__(self, model: Stack) -> None:
        super().__init__()
        self.predictions = _Predictions(model)


class _Predictions(nn.Module):
    """Dense, GELU, norm; then the word embedding's matrix, and a bias of its own."""

    def __init__(self, model: Stack) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(model.spec.vocab))
        self.transform = _Transform(model.spec)
        self.decoder = TiedHead(model, "bert.embeddings.word_embeddings", bias="cls.predictions.bias")

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, V]."""
        logits_BTV: Tensor = self.decoder(self.transform(x_BTD))
        return logits_BTV


class _Transform(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.dense = nn.Linear(spec.hidden, spec.hidden)
        self.LayerNorm = nn.LayerNorm(spec.hidden, eps=_NORM_EPS)

    def forward(self, x_BTD: Tensor) -> Tensor:
        normed_BTD: Tensor = self.LayerNorm(functional.gelu(self.dense(x_BTD)))
        return normed_BTD
