"""What a block's kernels come to: activations of published formulas, recomputation, cuts over tensor ranks."""

import pytest

from twinbed.conf.compose import compose
from twinbed.conf.model_flop import forward_flop, recompute_flop, root_matmuls
from twinbed.conf.model_spec import spec_from_keys
from twinbed.conf.schema import DeviceConf
from twinbed.sim.device import Device
from twinbed.sim.layers import Kernels, block_modules, block_work, kernels_of
from twinbed.sim.root_layers import embed_work, head_bytes, head_work
from twinbed.sim.simulate import simulate

OLD = Kernels(flash=False, fused=True, dropout=True, early_stop=False, main_gradients=True)
NEW = Kernels()
S, B, H, A, L = 128, 2, 256, 8, 4


@pytest.fixture
def device():
    return Device(DeviceConf(flop_per_s=1e12, memory_Bps=1e12, launch_ns=1_000), element_bytes=2)


def gpt(**keys):
    return spec_from_keys(
        {"family": "gpt", "layers": L, "hidden": H, "heads": A, "vocab": 512, "sequence": S} | keys
    )


def llama():
    keys = {"family": "llama", "layers": L, "hidden": H, "heads": A, "kv_heads": 2, "ffn": 704}
    return spec_from_keys(keys | {"vocab": 512, "sequence": S})


SBH = S * B * H


@pytest.mark.parametrize(
    ("keys", "expected"),
    [  # Korthikanti et al. 2022, table 2
        ({}, SBH * (34 + 5 * A * S / H)),
        ({"tensor": 4}, SBH * (10 + 24 / 4 + 5 * A * S / (4 * H))),
        ({"tensor": 4, "sequence_parallel": True}, SBH / 4 * (34 + 5 * A * S / H)),
        ({"tensor": 4, "recompute": "selective"}, SBH * (10 + 24 / 4)),
        ({"tensor": 4, "sequence_parallel": True, "recompute": "selective"}, SBH / 4 * 34),
        ({"recompute": "full"}, 2 * SBH),
    ],
)
def test_activations_are_those_of_the_paper(device, keys, expected):
    work = block_work(gpt(), device, sequence=S, micro=B, kernels=OLD, **keys)
    assert work.saved_bytes == pytest.approx(expected)
    whole = block_work(gpt(), device, sequence=S, micro=B, kernels=OLD, **(keys | {"recompute": "none"}))
    if keys.get("recompute") == "selective":
        assert work.saved_bytes + work.working_bytes == pytest.approx(whole.saved_bytes)


def test_flash_attention_keeps_no_scores(device):
    saved = [block_work(gpt(), device, sequence=s, micro=1, kernels=NEW).saved_bytes / s for s in (S // 2, S)]
    assert saved[0] == pytest.approx(saved[1])


@pytest.mark.parametrize("recompute", ["none", "selective", "selective_op", "selective_layer", "full"])
@pytest.mark.parametrize(("spec", "kernels"), [(gpt(), OLD), (llama(), NEW), (llama(), OLD)])
def test_recomputed_operations_are_those_that_are_published(device, spec, kernels, recompute):
    blocks = [
        block_work(spec, device, sequence=S, micro=B, recompute=recompute, kernels=kernels, layer=layer)
        for layer in range(L)
    ]
    again = recompute_flop(spec, sequence=S, recompute=recompute, micro=B)
    assert sum(block.recomputed.flop for block in blocks) == again
    forward = sum(block.forward.flop for block in blocks)
    outside = sum(product.flop for product in root_matmuls(spec, sequence=S, micro=B))
    assert forward == sum(forward_flop(spec, sequence=S, micro=B).values()) - outside
    assert sum(block.backward.flop for block in blocks) == 2 * forward


def time_ns(device, spec, kernels, recompute):
    total, saved = 0.0, 0.0
    for layer in range(L):
        work = block_work(
            spec, device, sequence=S, micro=B, recompute=recompute, kernels=kernels, layer=layer
        )
        total += device.time_ns(work.recomputed + work.backward)
        saved += work.saved_bytes
    return total, saved


@pytest.mark.parametrize(
    ("spec", "kernels", "order"),
    [
        (gpt(), OLD, ("none", "selective", "full")),
        (llama(), NEW, ("none", "selective_op", "full")),
        (llama(), NEW, ("none", "selective_layer", "full")),
    ],
)
def test_what_is_recomputed_costs_time_and_saves_memory(device, spec, kernels, order):
    found = [time_ns(device, spec, kernels, recompute) for recompute in order]
    assert [t for t, _ in found] == sorted(t for t, _ in found)
    assert [m for _, m in found] == sorted((m for _, m in found), reverse=True)
    assert len(set(found)) == len(found)


def test_only_every_second_block_is_repeated(device):
    works = [
        block_work(gpt(), device, sequence=S, micro=B, recompute="selective_layer", kernels=NEW, layer=i)
        for i in (0, 1)
    ]
    assert works[0].recomputed.kernels == 0
    assert works[1].recomputed.kernels > 0


def test_torch_stops_a_recomputation_early(device):
    keys = {"sequence": S, "micro": B, "recompute": "full"}
    early = block_work(gpt(), device, kernels=NEW, **keys)
    late = block_work(gpt(), device, kernels=Kernels(early_stop=False), **keys)
    modules = block_modules(gpt(), device, sequence=S, micro=B, kernels=NEW)
    last = sum(m.forward.matmul_ns + m.forward.other_ns for m in modules if m.name in ("fc2", "residual2"))
    assert device.time_ns(late.recomputed) - device.time_ns(early.recomputed) == pytest.approx(last)
    assert early.recomputed.flop == late.recomputed.flop  # published figures count it


def test_selective_op_keeps_every_second_product_and_attention(device):
    spec = llama()
    modules = {m.name: m for m in block_modules(spec, device, sequence=S, micro=B, kernels=NEW)}
    work = block_work(spec, device, sequence=S, micro=B, recompute="selective_op", kernels=NEW)
    repeated = ("norm1", "k", "rotary", "repeat", "out", "residual1", "norm2", "up", "activation")
    assert work.recomputed.kernels == sum(modules[name].forward.kernels for name in repeated)


def test_tensor_parallel_shares_out_the_operations(device):
    whole, quarter = (block_work(gpt(), device, sequence=S, micro=B, kernels=OLD, tensor=t) for t in (1, 4))
    assert quarter.forward.flop * 4 == whole.forward.flop
    shared = block_work(gpt(), device, sequence=S, micro=B, kernels=OLD, tensor=4, sequence_parallel=True)
    assert shared.forward.nbytes < quarter.forward.nbytes < whole.forward.nbytes
    halves = [
        block_work(gpt(), device, sequence=S, micro=B, kernels=OLD, tensor=4, sublayer=each)
        for each in ("attention", "mlp")
    ]
    both, one = halves[0].forward + halves[1].forward, quarter.forward
    assert (both.flop, both.kernels) == (one.flop, one.kernels)
    assert both.matmul_ns + both.other_ns == pytest.approx(one.matmul_ns + one.other_ns)
    with pytest.raises(ValueError, match=r"parallel.tensor=3 must divide model.heads=8"):
        block_work(gpt(), device, sequence=S, tensor=3)


def test_logits_and_loss_grow_with_the_vocabulary(device):
    small, large = (head_work(gpt(vocab=v), device, sequence=S, kernels=NEW) for v in (512, 4096))
    assert large[0].flop - small[0].flop == 2 * S * H * (4096 - 512)
    assert large[0].nbytes > small[0].nbytes
    half = head_work(gpt(vocab=4096), device, sequence=S, tensor=2, kernels=OLD)
    whole = head_work(gpt(vocab=4096), device, sequence=S, kernels=OLD)
    assert half[0].flop * 2 == whole[0].flop
    assert head_bytes(gpt(), device, sequence=S) == S * H * 2 + S * 512 * 6
    forward, backward = embed_work(gpt(), device, sequence=S, kernels=NEW)
    assert (forward.flop, forward.nbytes) == (0, 3 * S * H * 2)
    assert backward.nbytes == 3 * S * H * 2 + 512 * H * 2


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ([], False),
        (["train.dropout=0.1"], True),
        (["train.dropout=0.1", "kernels.dropout=false"], False),
        (["kernels.dropout=true"], True),
        (["engine=megatron"], True),
    ],
)
def test_kernels_drop_out_where_the_training_does(keys, expected):
    experiment = compose(["target=sim", *keys]).experiment
    assert kernels_of(experiment).dropout is expected


def test_dropout_of_a_training_costs_time_and_memory_on_a_device():
    found = [
        simulate_keys("cluster=dgx_a100", "cluster.nodes=1", "model=gpt2_small", *keys)
        for keys in ((), ("train.dropout=0.1",))
    ]
    assert found[0]["phases_s"]["compute"] < found[1]["phases_s"]["compute"]
    assert found[0]["memory_bytes"]["activations"] < found[1]["memory_bytes"]["activations"]


def simulate_keys(*keys):
    composed = compose(["target=sim", "comm=zero3", *keys])
    return simulate(composed.experiment, spec=composed.spec, resolved=composed.resolved).result
