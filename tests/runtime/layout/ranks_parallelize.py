"""Runs on each rank for test_parallelize.py: many layouts in one launch."""

import copy
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from twinbed.conf.model_spec import ModelSpec
from twinbed.runtime import ParallelModel, parallelize
from twinbed.runtime.stack import build_model

from ranks_run import run_cases

EXAMPLES = Path(__file__).parents[3] / "examples"
SIZES = ["--steps", "3", "--tokens", "32"]
BATCH, TOKENS, WORDS = 8, 16, 61  # the words are padded in every mode

LAYOUTS: Mapping[str, str] = {
    "1d": "tensor=4",
    "1d sequence": "tensor=4 sequence=4",
    "2d": "tensor=4 tensor_mode=2d",
    "ring 1d": "sequence=2 sequence_mode=ring tensor=2",
    "ring ddp": "sequence=2 sequence_mode=ring zigzag=false",
    "ulysses 1d": "sequence=2 sequence_mode=ulysses tensor=2",
    "zero3": "comm=zero3",
    "ddp 1d": "tensor=2",
    "zeropp 1d": "tensor=2 comm=zeropp",
    "hpz ulysses": "sequence=2 sequence_mode=ulysses comm=hpz",
}


def example(name: str) -> Callable[[list[str]], list[float]]:
    """Its training function."""
    sys.path.insert(0, str(EXAMPLES))
    train: Callable[[list[str]], list[float]] = importlib.import_module(name).train
    return train


def losses(name: str) -> dict[str, list[float]]:
    """Of each layout."""
    found = {}
    for layout, config in LAYOUTS.items():
        try:
            found[layout] = example(f"train_{name}_parallel")([*SIZES, "--parallel", config])
        except Exception as err:
            raise RuntimeError(f"{name}, {layout}") from err
    return found


# ---- gradients and weights against this process alone


def foreign(kind: str, **settings: Any) -> nn.Module:
    """A small model of transformers, the same on all ranks; no bias is 0, no norm 1."""
    import transformers

    torch.manual_seed(2)
    if kind == "GPT2":
        sizes = {"n_positions": TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": WORDS}
        settings = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} | settings
        model: nn.Module = transformers.GPT2LMHeadModel(transformers.GPT2Config(**(sizes | settings)))
    else:
        sizes = {
            "max_position_embeddings": TOKENS,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": WORDS,
        }
        config = getattr(transformers, f"{kind}Config")(**(sizes | settings))
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    random = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=random)
    return model


def labelled(seed: int = 5) -> dict[str, Tensor]:
    """Words and labels; the last two sequences have no label, and others few."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, WORDS, (BATCH, TOKENS), generator=random)
    labels = ids.clone()
    labels[6:] = -100
    labels[1, :11] = -100
    labels[4, ::2] = -100
    return {"input_ids": ids, "labels": labels}


def relative(found: Tensor, expected: Tensor) -> float:
    """The error in L2; of what is nearly 0, as the gradient of a bias of keys may be, that of 1e-2."""
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-2))


def worst(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[str, float]:
    """The parameter with the largest relative error."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    errors = {name: relative(found[name], tensor) for name, tensor in expected.items()}
    return max(errors.items(), key=lambda item: item[1])


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if "lm_head.weight" not in found and hasattr(model, "lm_head") and hasattr(model.lm_head, "weight"):
        found["lm_head.weight"] = model.lm_head.weight.grad  # tied
    return found


def against_alone(module: nn.Module, config: str, **batch: Tensor) -> dict[str, Any]:
    """Two backwards of different sizes that add up, clipping and a step of SGD: worst relative errors."""
    alone = copy.deepcopy(module)
    model = parallelize(module, config)
    found: dict[str, Any] = {}
    halves = [{name: x[:4] for name, x in batch.items()}, batch]
    for name, each in (("alone", alone), ("parallel", model)):
        found[f"losses {name}"] = []
        for part in halves:
            loss = each(**part).loss
            loss.backward()
            found[f"losses {name}"].append(float(loss.detach()))
    found["gradient"] = worst(model.full_gradients(), gradients_of(alone))
    norm = float(torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5))
    found["norm"] = model.clip_grad_norm_(0.5) / norm - 1
    for each in (alone, model):
        torch.optim.SGD(each.parameters(), lr=0.5).step()
    state = {name: x for name, x in alone.state_dict().items() if not name.endswith("inv_freq")}
    found["weights"] = worst(model.full_state_dict(), state)
    with torch.no_grad():
        found["eval"] = relative(model(**batch).loss, alone(**batch).loss)
    alone.load_state_dict(model.full_state_dict())  # strict: names and shapes are the class's
    return found


LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8}

MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: foreign("GPT2", n_inner=72, scale_attn_by_inverse_layer_idx=True),
    "gpt2 untied": lambda: foreign("GPT2", tie_word_embeddings=False, activation_function="relu"),
    "llama": lambda: foreign(
        "Llama", attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3, rms_norm_eps=1e-3
    ),
    "llama tied": lambda: foreign("Llama", tie_word_embeddings=True, head_dim=8, hidden_act="gelu"),
    "qwen2": lambda: foreign("Qwen2"),
}


FOUR = (
    "tensor=4 tensor_mode=2d",
    "tensor=4 sequence=4",
    "tensor=2 sequence=2 sequence_mode=ring",
    "sequence=2 sequence_mode=ring comm=zero3",
    "tensor=2 comm=zero1",
)
EIGHT = ("tensor=8 tensor_mode=3d", "tensor=8 tensor_mode=2.5d depth=2")


def details(*configs: str, models: Sequence[str] = ("gpt2", "llama")) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in models:
        make = MODELS[name]
        for config in configs:
            try:
                found[f"{name}: {config}"] = against_alone(make(), config, **labelled())
            except Exception as err:
                raise RuntimeError(f"{name}: {config}") from err
    return found


PIPELINES: Sequence[tuple[str, str, Mapping[str, Any]]] = (
    ("GPT2", "pipeline=2 tensor=2 batch.accumulation=2", {}),
    ("GPT2", "pipeline=2 comm=zero3 batch.accumulation=4 pipeline_schedule=gpipe", {}),
    ("Llama", "pipeline=2 batch.accumulation=2", {}),
    ("Llama", "pipeline=2 sequence=2 sequence_mode=ring batch.accumulation=8", {"tie_word_embeddings": True}),
    (
        "Llama",
        "pipeline=2 virtual_stages=2 pipeline_schedule=interleaved batch.accumulation=2 comm=zero2",
        {"num_hidden_layers": 4},
    ),
)


def pipelines() -> dict[str, Any]:
    """Losses of three steps, clipped, and the weights behind them; micro-batches have unequally many labels."""
    found: dict[str, Any] = {}
    for kind, config, settings in PIPELINES:
        module = foreign(kind, **settings)
        alone = copy.deepcopy(module)
        model = parallelize(module, config)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (alone, model)]
        case: dict[str, Any] = {"losses alone": [], "losses parallel": [], "norm": 0.0}
        for step in range(3):
            batch = labelled(step)
            loss = alone(**batch).loss
            loss.backward()
            case["losses alone"].append(float(loss.detach()))
            case["losses parallel"].append(float(model.forward_backward(**batch)))
            case["gradient"] = worst(model.full_gradients(), gradients_of(alone))
            norm = float(torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5))
            case["norm"] = max(case["norm"], abs(model.clip_grad_norm_(0.5) / norm - 1))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        case["weights"] = worst(model.full_state_dict(), alone.state_dict())
        case["parts"] = sum(p.numel() for p in model.parameters()) / sum(
            p.numel() for p in alone.parameters()
        )
        found[f"{kind}: {config}"] = case
    try:
        model(**labelled())
    except RuntimeError as err:
        found["forward"] = str(err)
    return found


OWN: Mapping[str, Any] = {
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 4,
    "ffn": 64,
    "vocab": WORDS,
    "sequence": TOKENS,
    "tied_embeddings": True,
    "head": "lm",
}
PICTURES: Mapping[str, Any] = {
    "vocab": 0,
    "sequence": 5,
    "tied_embeddings": False,
    "head": "classifier",
    "image": (8, 8),
    "patch": (4, 4),
    "channels": 3,
    "classes": 10,
}


def own_models() -> dict[str, Any]:
    """Ours, which return the loss, with weights that differ between ranks until parallelize takes rank 0's."""
    batch = labelled()
    random = torch.Generator().manual_seed(6)
    images = torch.randn(BATCH, 3, 8, 8, generator=random)
    classes = torch.randint(0, 10, (BATCH,), generator=random)
    classes[5:7] = -100
    cases: Mapping[str, tuple[Mapping[str, Any], tuple[Tensor, Tensor]]] = {
        "gpt": ({}, (batch["input_ids"], batch["labels"])),
        "llama": (
            {"family": "llama", "qkv_bias": False, "out_bias": False, "mlp_bias": False},
            (batch["input_ids"], batch["labels"]),
        ),
        "bert": (
            {"family": "bert", "head": "masked_lm", "token_types": 2},
            (batch["input_ids"], batch["labels"]),
        ),
        "vit": ({"family": "vit"} | PICTURES, (images, classes)),
    }
    found = {}
    for name, (changes, given) in cases.items():
        spec = ModelSpec(**({"name": "own", "family": "gpt"} | OWN | changes))
        for config in ("tensor=4 tensor_mode=2d", "tensor=2 comm=zero3", "tensor=2"):
            alone = build_model(spec, seed=3)
            model = parallelize(build_model(spec, seed=3 + dist.get_rank()), config)
            for each in (alone, model):
                each(*given).backward()
            found[f"{name}: {config}"] = (
                relative(model(*given), alone(*given)),
                worst(model.full_gradients(), gradients_of(alone)),
            )
    return found


def dropped() -> dict[str, Any]:
    """Losses with dropout, of one model under several layouts; and a batch that differs between ranks."""
    batch = labelled()
    found: dict[str, Any] = {}
    for config in (
        "seed=7 tensor=4 tensor_mode=2d",
        "seed=7 tensor=2",
        "seed=7 tensor=4 sequence=4",
        "seed=8 tensor=4",
    ):
        model = parallelize(foreign("GPT2", resid_pdrop=0.2, embd_pdrop=0.1), config)
        model.train()
        found[config] = [float(model(**batch).loss.detach()) for _ in range(2)]
        model.eval()
        found[f"{config} eval"] = float(model(**batch).loss.detach())
    model = parallelize(foreign("GPT2"), "tensor=4")
    try:
        model(**labelled(seed=dist.get_rank()))
    except ValueError as err:
        found["different"] = str(err)
    return found


def ledgers() -> dict[str, Any]:
    """What is sent, and what a rank holds: not a copy of everything."""
    batch = labelled()
    model: ParallelModel = parallelize(foreign("GPT2"), "tensor=2 comm=zero3")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    parts = sum(p.to_local().numel() for p in model.parameters())
    return {
        "parts": parts,
        "whole": sum(p.numel() for p in foreign("GPT2").parameters()),
        "rows": [(row.iteration, row.phase, row.layer, row.op, row.axis) for row in model.ledger.rows],
    }


def recomputed() -> dict[str, Any]:
    """Blocks that repeat their forward in backward, as the class's own checkpointing does."""
    batch = labelled()
    found = {}
    models = {}
    for name in ("once", "again"):
        module = foreign("Llama")
        if name == "again":
            module.gradient_checkpointing_enable()
        models[name] = parallelize(module, "tensor=4")
        models[name](**batch).loss.backward()
        found[name] = len(models[name].ledger.rows)
    error = worst(models["again"].full_gradients(), models["once"].full_gradients())[1]
    return {"error": error, "more": found["again"] - found["once"]}


CASES: dict[str, Callable[[], Any]] = {
    "gpt2": partial(losses, "gpt2"),
    "llama": partial(losses, "llama"),
    "plain": partial(losses, "plain"),
    "details": lambda: details(*FOUR) | details(*FOUR[1:3], models=("gpt2 untied", "llama tied", "qwen2")),
    "pipelines": pipelines,
    "eight": lambda: details(*EIGHT),
    "rest": lambda: {
        "own": own_models(),
        "dropped": dropped(),
        "ledgers": ledgers(),
        "recomputed": recomputed(),
    },
}


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=UserWarning)
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    run_cases(CASES)
