"""A GPT in plain torch: the model that the runtime trains, with the parameters that `conf.model_spec` counts.

Shapes: B sequences, T tokens, D hidden, H heads, K key heads, E head size, V vocabulary.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..conf.model_spec import ModelSpec
from .leaves import AttentionCore, CrossEntropy, Positions, TiedHead, split_heads
from .stack import PacedBlock, Stack


class GPT(Stack):
    """Returns the loss.

    Embedding and position, blocks that normalize before attention and MLP, a last norm, a head. Weights are
    the same for one seed on every rank and under every layout.

    Args:
        spec: Of family "gpt".
        seed: Of the initial weights; None: they come from elsewhere, and are left as they are made.
        recompute, dropout: As `Stack`.

    Raises:
        ValueError: The spec is of another family.
    """

    def __init__(
        self, spec: ModelSpec, *, seed: int | None, recompute: bool = False, dropout: float = 0.0
    ) -> None:
        if spec.family != "gpt":
            raise ValueError(f"model.family={spec.family!r}: a GPT is of family 'gpt'")
        super().__init__(spec, recompute=recompute, dropout=dropout)
        self.embedding = nn.Embedding(spec.vocab, spec.hidden)
        self.position = Positions(spec.sequence, spec.hidden)
        self.drop = self.make_dropout("embedding")
        self.blocks = nn.ModuleList(Block(self, i) for i in range(spec.layers))
        self.norm = nn.LayerNorm(spec.hidden)
        self.head = (
            TiedHead(self, "embedding")
            if spec.tied_embeddings
            else nn.Linear(spec.hidden, spec.vocab, bias=False)
        )
        self.loss = CrossEntropy()
        if seed is not None:
            self.init_weights(seed)

    def stack(self) -> nn.ModuleList:
        return self.blocks

    def first_deviation(self, name: str, weight: Tensor) -> float:
        """GPT-2's: 0.02, and of what is added to the residual 1 / sqrt(2 layers) of that."""
        residual = name.endswith(("proj.weight", "fc2.weight"))
        return 0.02 / math.sqrt(2 * self.spec.layers) if residual else 0.02

    def before_blocks(self, inputs: Tensor) -> Tensor:
        return self.embed(inputs)

    def behind_blocks(self, x_BTD: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token, fp32."""
        loss: Tensor = self.loss(self.logits(x_BTD), targets)
        return loss

    def embed(self, tokens_BT: Tensor, first: int = 0) -> Tensor:
        """What goes into the first block; the tokens stand at positions `first` and on."""
        x_BTD: Tensor = self.drop(self.position(self.embedding(tokens_BT), first))
        return x_BTD

    def logits(self, x_BTD: Tensor) -> Tensor:
        """[B, T, V] from what the last block gave."""
        logits_BTV: Tensor = self.head(self.norm(x_BTD))
        return logits_BTV


class Past:
    """Keys and values of the tokens that one block has seen, so that generating the next needs only that one.

    Several tokens at once are taken only at the beginning: their mask does not know of earlier ones.
    """

    def __init__(self, *, batch: int, num_key_heads: int, head_size: int, max_tokens: int) -> None:
        shape = (batch, num_key_heads, max_tokens, head_size)
        self._keys_BKTE, self._values_BKTE = torch.empty(shape), torch.empty(shape)
        self.num_tokens = 0

    def with_more(self, keys_BKTE: Tensor, values_BKTE: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values, these added at the end."""
        begin, end = self.num_tokens, self.num_tokens + keys_BKTE.shape[2]
        if begin and end > begin + 1:
            raise ValueError(f"{end - begin} tokens after {begin}: give one at a time after the first time")
        self._keys_BKTE[:, :, begin:end] = keys_BKTE
        self._values_BKTE[:, :, begin:end] = values_BKTE
        self.num_tokens = end
        return self._keys_BKTE[:, :, :end], self._values_BKTE[:, :, :end]


class Block(PacedBlock):
    """x + attention(norm1(x)), then x + mlp(norm2(x))."""

    def __init__(self, model: Stack, index: int) -> None:
        super().__init__()
        spec = model.spec
        hidden, self.head_size = spec.hidden, spec.head_dim
        self._shares = (spec.heads, spec.kv_heads, spec.kv_heads)  # of queries, keys and values in `qkv`
        self.norm1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, hidden + 2 * spec.kv_heads * spec.head_dim)
        self.core = AttentionCore(causal=True, head_size=spec.head_dim)
        self.proj = nn.Linear(hidden, hidden)
        self.drop1 = model.make_dropout(f"block.{index}.attention")
        self.norm2 = nn.LayerNorm(hidden)
        self.fc1 = nn.Linear(hidden, spec.ffn)
        self.fc2 = nn.Linear(spec.ffn, hidden)
        self.drop2 = model.make_dropout(f"block.{index}.mlp")

    def forward(self, x_BTD: Tensor, past: Past | None = None) -> Tensor:
        """[B, T, D] to the same; with `past`, T tokens after those that it has seen."""
        if self.pace is not None:
            x_BTD = self.pace.enter(x_BTD)
        x_BTD = x_BTD + self.drop1(self.proj(self._attention(self.qkv(self.norm1(x_BTD)), past)))
        x_BTD = x_BTD + self.drop2(self.fc2(functional.gelu(self.fc1(self.norm2(x_BTD)))))
        return x_BTD if self.pace is None else self.pace.leave(x_BTD)

    def _attention(self, qkv_BTX: Tensor, past: Past | None) -> Tensor:
        heads = qkv_BTX.shape[-1] // self.head_size  # those that are here, whatever their number
        sizes = [share * heads // sum(self._shares) * self.head_size for share in self._shares]
        q_BHTE, k_BKTE, v_BKTE = (
            split_heads(part, self.head_size) for part in torch.split(qkv_BTX, sizes, dim=-1)
        )
        if past is not None:
            k_BKTE, v_BKTE = past.with_more(k_BKTE, v_BKTE)
        mixed_BTD: Tensor = self.core(q_BHTE, k_BKTE, v_BKTE)
        return mixed_BTD
