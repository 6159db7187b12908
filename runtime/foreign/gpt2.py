"""GPT-2 of transformers (`models/gpt2/modeling_gpt2.py` of release 5)."""

import copy
import math
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP, GPT2Attention, GPT2Block, GPT2Model
from transformers.pytorch_utils import Conv1D

from ...policies.layout import ParallelLayout
from ...policies.layout.border import num_parts
from ...policies.mesh import Mesh
from ..leaves import AttentionCore, Positions
from .model import Foreign

_ATTENTION: Final = "twinbed"  # in transformers' registry of attention functions
_MATRICES: Final = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")


class ForeignGPT2(Foreign):
    """Conv1D, whose matrices are [in, out], become linear layers; learned positions are added by `Positions`."""

    blocks_path = "transformer.h"
    table_path = "transformer.wte"

    def __init__(self, module: GPT2LMHeadModel, *, seed: int) -> None:
        super().__init__(module, seed=seed)
        config: Any = module.config
        self.refuse(
            attn_pdrop=(config.attn_pdrop, 0.0),
            reorder_and_upcast_attn=(config.reorder_and_upcast_attn, False),
        )
        body: Any = module.transformer
        self.expect(body, GPT2Model, "transformer")
        self.lm_head = self.head_of(module)
        self.expect(body.wpe, nn.Embedding, "transformer.wpe")
        body.wpe = _positions(body.wpe)
        body.drop = self.dropout_at("embedding", body.drop)
        attending = _attention_config(config)
        for i, block in enumerate(body.h):
            self._take(block, i, attending)
        self.transformer = body
        self.train(module.training)

    def before_blocks(self, inputs: Tensor) -> Tensor:
        if inputs.shape[1] > self.spec.sequence:
            raise ValueError(
                f"{inputs.shape[1]} tokens: {self.kind}.config.n_positions={self.spec.sequence} is the most it takes"
            )
        body: Any = self.transformer
        x_BTD: Tensor = body.drop(body.wpe(body.wte(inputs)))
        return x_BTD

    def logits(self, x_BTD: Tensor) -> Tensor:
        body: Any = self.transformer
        logits_BTV: Tensor = self.lm_head(body.ln_f(x_BTD))
        return logits_BTV

    def laid_out(self, layout: ParallelLayout, mesh: Mesh) -> None:
        (qkv,) = (layer for layer in layout.outline.block if layer.path == "attn.c_attn")
        width = self.spec.hidden // num_parts(mesh, qkv.output.features)
        for block in self.stack():
            attention: Any = block.get_submodule("attn")
            attention.split_size = width  # of the queries, keys and values that are here

    def _take(self, block: Any, i: int, attending: Any) -> None:
        path = f"{self.blocks_path}.{i}"
        for part, kind, name in (
            (block, GPT2Block, path),
            (block.attn, GPT2Attention, f"{path}.attn"),
            (block.mlp, GPT2MLP, f"{path}.mlp"),
        ):
            self.expect(part, kind, name)
        block.gradient_checkpointing = False  # the stack's `recompute`
        for matrix in _MATRICES:
            conv = block.get_submodule(matrix)
            self.expect(conv, Conv1D, f"{path}.{matrix}")
            block.set_submodule(matrix, _linear(conv))
            self._transposed.add(f"{path}.{matrix}.weight")
        block.attn.core = AttentionCore(causal=True, head_size=self.spec.head_dim)
        block.attn.config = attending
        block.attn.resid_dropout = self.dropout_at(f"block.{i}.attention", block.attn.resid_dropout)
        block.mlp.dropout = self.dropout_at(f"block.{i}.mlp", block.mlp.dropout)


def _attention_config(config: Any) -> Any:
    """A copy of a model's config by which its attention calls ours."""
    AttentionInterface.register(_ATTENTION, _attention)
    found = copy.deepcopy(config)
    found._attn_implementation = _ATTENTION
    return found


def _attention(
    module: Any,
    q_BHTE: Tensor,
    k_BKTE: Tensor,
    v_BKTE: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """([B, T, H, E], no weights), as transformers calls attention: every token sees those before it and itself."""
    head_size = q_BHTE.shape[-1]
    natural = 1 / math.sqrt(head_size)
    if scaling is not None and not math.isclose(scaling, natural, rel_tol=1e-12):
        q_BHTE = q_BHTE * (scaling / natural)
    mixed_BTX: Tensor = module.core(q_BHTE, k_BKTE, v_BKTE)
    return torch.unflatten(mixed_BTX, -1, (-1, head_size)), None


def _linear(conv: Any) -> nn.Linear:
    features_in, features_out = conv.weight.shape
    made = nn.Linear(features_in, features_out, device="meta")
    made.weight = nn.Parameter(conv.weight.detach().t().contiguous(), conv.weight.requires_grad)
    made.bias = conv.bias
    return made


def _positions(table: Any) -> Positions:
    with torch.device("meta"):  # draws no random numbers, of which the script's own depend
        made = Positions(1, table.embedding_dim)
    made.weight = table.weight
    return made
