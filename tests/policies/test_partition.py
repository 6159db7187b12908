"""The order in which FSDP2 lays a unit's shards side by side."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from twinbed.conf.model_spec import parameters, spec_from_keys
from twinbed.policies.partition import fsdp2_order
from twinbed.runtime.stack import build_model


def test_what_submodules_hold_comes_before_a_modules_own() -> None:
    names = ["scale", "a.token", "a.inner.weight", "a.inner.bias", "a.last.weight", "norm.weight"]
    ordered = [names[at] for at in fsdp2_order(names)]
    assert ordered == ["a.inner.weight", "a.inner.bias", "a.last.weight", "a.token", "norm.weight", "scale"]
    assert fsdp2_order(["x.weight", "x.bias", "y.weight"]) == (0, 1, 2)
    assert fsdp2_order([]) == ()


@pytest.fixture
def fake_group() -> Iterator[None]:
    """A group of 2 without peers."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    torch.distributed.destroy_process_group()


KEYS = {"layers": 1, "hidden": 8, "heads": 2}
TOKENS = KEYS | {"vocab": 11, "sequence": 6}


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize(
    "keys",
    [
        KEYS | {"family": "vit", "extra": {"image": 28, "patch": 14, "channels": 1, "classes": 10}},
        TOKENS | {"family": "gpt", "tied_embeddings": True},
        TOKENS | {"family": "llama", "ffn": 12, "kv_heads": 1},
        TOKENS | {"family": "qwen2", "ffn": 12, "tied_embeddings": True},
        TOKENS | {"family": "bert", "extra": {"head": "masked_lm"}},
    ],
    ids=lambda keys: keys["family"],
)
def test_it_is_the_order_of_fsdp2_itself(keys: dict[str, object]) -> None:
    spec = spec_from_keys(keys)
    model = build_model(spec, seed=0)
    for unit in reversed(parameters(spec)):
        module = model.get_submodule(unit.module)
        fully_shard(module, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
        group: Any = fully_shard.state(module)._fsdp_param_group  # type: ignore[attr-defined]
        paths = {id(inner): f"{path}." if path else "" for path, inner in module.named_modules()}
        infos = [parameter._module_info for parameter in group.fsdp_params]
        names = [tensor.name for tensor in unit.tensors]
        assert [paths[id(info.module)] + info.param_name for info in infos] == [
            names[at] for at in fsdp2_order(names)
        ]
