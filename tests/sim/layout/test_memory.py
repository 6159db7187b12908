"""What a rank holds: parts of parameters and of activations, by hand."""

from math import prod

import pytest

from twinbed.conf.model_spec import num_parameters, parameters
from twinbed.conf.schema import Backend, Recompute
from twinbed.policies.comm import build_comm
from twinbed.policies.layout import replicas_of
from twinbed.sim.costs import Costs
from twinbed.sim.layers import block_work, kernels_of
from twinbed.sim.layout.published import PublishedSizes
from twinbed.sim.layout.shapes import BEHIND, BLOCK
from twinbed.sim.memory import at_most, memory_over_time

MODES = {
    "1d": {"tensor": 4},
    "1d+sequence": {"tensor": 4, "sequence": 4},
    "2d": {"tensor": 4, "tensor_mode": "2d"},
    "2.5d": {"tensor": 8, "tensor_mode": "2.5d", "depth": 2},
    "3d": {"tensor": 8, "tensor_mode": "3d"},
}


def laid(experiment, spec):
    return Costs(experiment, spec, None).laid.model


def held(experiment, spec):
    seen = replicas_of(experiment)
    policy, _ = build_comm(experiment.comm, num_ranks=seen.num_ranks, ranks_per_node=seen.ranks_per_node)
    return at_most(memory_over_time(experiment, spec, policy, ()))


@pytest.mark.parametrize(
    ("mode", "matrices", "norms"), [("1d", 4, 1), ("2d", 4, 2), ("2.5d", 4, 2), ("3d", 8, 2)]
)
def test_local_parameters_of_a_block(make, spec_of, mode, matrices, norms):
    """2.5D keeps its matrices once a layer of depth: four ranks of eight have all of them."""
    spec = spec_of()
    ranks = MODES[mode]["tensor"]
    tensors = laid(make(ranks, micro=8, **MODES[mode]), spec).stretch(0, 0).blocks[0].tensors
    whole = {tensor.name: tensor for tensor in parameters(spec)[1].tensors}
    assert [t.name for t in tensors] == list(whole)
    for tensor in tensors:
        parts = matrices if len(tensor.shape) == 2 else norms if tensor.name.startswith("norm") else None
        if parts is not None:
            assert prod(whole[tensor.name].shape) == parts * tensor.numel, tensor.name


@pytest.mark.parametrize("family", ["gpt", "gpt2", "llama", "bert", "vit"])
def test_without_tensor_parallelism_all_parameters_are_there(make, spec_of, family):
    keys = {
        "gpt": {"vocab": 251, "tied_embeddings": True},
        "gpt2": {"family": "gpt2", "vocab": 251},
        "llama": {"family": "llama", "ffn": 128, "kv_heads": 4},
        "bert": {"family": "bert", "extra": {"head": "masked_lm"}},
        "vit": {"family": "vit", "extra": {"image": 28, "patch": 7, "channels": 1, "classes": 10}},
    }[family]
    if family == "vit":
        keys |= {"vocab": None, "sequence": None}
    spec = spec_of(**keys)
    model = laid(make(4, pipeline=2, accumulation=2), spec)
    total = sum(model.num_parameters(stage) for stage in range(2))
    twice = spec.vocab * spec.hidden if spec.tied_embeddings else 0
    assert total == num_parameters(spec) + twice


def test_what_a_block_keeps_without_a_plan_is_that_of_data_parallelism(make, spec_of):
    """A pipeline's stages keep what a whole model's blocks keep."""
    experiment = make(2, pipeline=2, accumulation=2, cluster_backend=Backend.nccl)
    spec = spec_of()
    whole = block_work(
        spec,
        Costs(experiment, spec, None).device,
        sequence=16,
        micro=4,
        kernels=kernels_of(experiment),
    )
    assert laid(experiment, spec).saved_bytes(BLOCK) == whole.saved_bytes


def test_2d_and_3d_share_activations_out_where_1d_repeats_them(make, spec_of):
    """Inputs of norms and products between the pairs: whole on each rank in 1D, a quarter in 2D and of 1D with sequence
    parallelism. What lies within a pair is a quarter in all.
    """
    spec, gpu = spec_of(), {"micro": 8, "cluster_backend": Backend.nccl}
    whole = laid(make(4, pipeline=2, accumulation=2, **gpu), spec).saved_bytes(BLOCK)
    kept = {
        name: laid(make(keys["tensor"], **gpu, **keys), spec).saved_bytes(BLOCK)
        for name, keys in MODES.items()
    }
    bsh = 8 * 16 * 64 * 4
    replicated = 4 * bsh  # of two norms and of two products
    assert kept["1d"] == replicated + (whole - replicated) / 4
    sums = 2 * 2 * (8 // 2) * 16 * 4  # of two norms: two numbers a token
    assert kept["2d"] == whole / 4 + sums
    assert kept["2.5d"] == whole / 8 + sums / 2
    assert kept["1d+sequence"] == pytest.approx(whole / 4, rel=0.01)
    # 3D keeps what it gathered: of each product its input over one axis, and its matrix over another
    inputs = (3 * bsh + 4 * bsh) / 8
    gathered = (3 * bsh + 4 * bsh) / 4 + 12 * 64 * 64 * 4 / 4
    assert kept["3d"] > whole / 8 - inputs + gathered
    assert kept["3d"] < kept["1d"]


def test_states_are_those_of_the_own_part(make, spec_of):
    """fp32, AdamW: 4 bytes a weight, 4 a gradient, 8 of moments, of a quarter of the model; over two replicas half."""
    spec = spec_of()
    model = laid(make(8, micro=8, tensor=4, tensor_mode="2d"), spec)
    numel = model.num_parameters()
    assert num_parameters(spec) / 4 < numel < 1.05 * num_parameters(spec) / 4
    plain = held(make(8, micro=8, tensor=4, tensor_mode="2d", comm="ddp"), spec)
    assert [plain[key] for key in ("parameters", "gradients", "optimizer")] == [
        4 * numel,
        4 * numel,
        8 * numel,
    ]
    shared = held(make(8, micro=8, tensor=4, tensor_mode="2d", comm="zero3"), spec)
    half = -(-numel // 2)
    assert [shared[key] for key in ("parameters", "gradients", "optimizer")] == [4 * half, 4 * half, 8 * half]


def test_recomputation_keeps_the_input_of_a_block_and_stands_beside_it(make, spec_of):
    spec = spec_of(layers=4)
    keys = {"micro": 8, "tensor": 4, "tensor_mode": "2d"}
    own = 8 // 2 * 16 * 64 // 2 * 4
    for backend, stands in ((Backend.nccl, 1), (Backend.gloo, 0)):  # on CPUs what is repeated is a buffer
        plain, again = (
            held(make(4, recompute=each, cluster_backend=backend, **keys), spec)["activations"]
            for each in (Recompute.none, Recompute.full)
        )
        block = laid(make(4, cluster_backend=backend, **keys), spec).saved_bytes(BLOCK)
        assert plain - again == pytest.approx(4 * block - (4 * own + stands * block), rel=0.05)


def test_the_first_stage_has_the_most_micro_batches_in_flight(make, spec_of):
    """1F1B: as many as there are stages ahead. GPipe: all of a step, on the last stage with what its head keeps, beside
    which the logits' gradient comes.
    """
    spec = spec_of(layers=4, vocab=2)
    keys = {"pipeline": 4, "accumulation": 8, "cluster_backend": Backend.nccl}
    model = laid(make(4, **keys), spec)
    one, head = model.saved_bytes(BLOCK), model.saved_bytes(BEHIND)
    assert held(make(4, **keys), spec)["activations"] == 4 * one
    assert held(make(4, pipeline_schedule="gpipe", **keys), spec)["activations"] == 8 * (one + head) + head


# ---- to the byte, as the runtime keeps it on CPUs (tests/parity/test_memory.py compares)

B, S, H = 8, 16, 64
TOKENS, ROWS = B * S * H * 4, B * S * 4  # bytes of an activation [b, s, h] in fp32, and of a number a token


def saved(make, spec, ranks, **keys):
    model = laid(make(ranks, micro=B, **keys), spec)
    assert model.saved is not None
    return model.saved


def test_partitioned_and_replicated_activations_of_a_block(make, spec_of):
    """A block of a GPT keeps 16 bsh: inputs of two norms and of the first product of each pair, which 1D replicates
    (4 bsh); queries, keys and values (3), what attention gives (1), what goes into GELU (4) and comes out (4), which it
    shares out. 2D has 1/p of all 16, 2.5D too. 3D has 1/p of what lies between products (10 bsh), and in place of the
    products' inputs what it gathered: 1/q^2 of them (7 bsh), and of the matrices (12 h^2).
    """
    spec = spec_of(heads=16)
    heads = 16 * ROWS  # logarithms of sums, of each head
    deviations = 4 * ROWS  # mean and inverse deviation of two norms
    sums = 4 * ROWS  # of two norms' features and of their squares, of the tokens that are here
    sizes = (("1d", 4, 1), ("1d", 16, 1), ("2d", 4, 1), ("2d", 16, 1), ("2.5d", 8, 2), ("3d", 8, 1))
    kept = {
        (mode, ranks): saved(make, spec, ranks, tensor=ranks, tensor_mode=mode, depth=depth).nbytes(BLOCK)
        for mode, ranks, depth in sizes
    }
    for ranks in (4, 16):
        q = round(ranks**0.5)
        assert kept["1d", ranks] == 4 * TOKENS + (12 * TOKENS + heads) / ranks + deviations
        assert kept["2d", ranks] == (16 * TOKENS + heads) / ranks + sums / q
    assert kept["2.5d", 8] == (16 * TOKENS + heads) / 8 + sums / 4
    assert kept["3d", 8] == (10 * TOKENS + heads) / 8 + 7 * TOKENS / 4 + 12 * H * H * 4 / 4 + sums / 4


@pytest.mark.parametrize(("depth", "side"), [(1, 2), (2, 2), (4, 2), (1, 4), (2, 4)])
def test_25d_keeps_weights_once_a_layer_of_depth(make, spec_of, depth, side):
    """d / p of the matrices, not 1 / p."""
    ranks = depth * side**2
    spec = spec_of()
    unit = (
        laid(make(ranks, micro=8, tensor=ranks, tensor_mode="2.5d", depth=depth), spec)
        .stretch(0, 0)
        .blocks[0]
    )
    assert sum(t.numel for t in unit.tensors if len(t.shape) == 2) * ranks == depth * 12 * H * H


@pytest.mark.parametrize("n", [2, 4, 8])
def test_sequence_and_tensor_parallelism_cross_where_the_paper_says(n):
    """Li et al. 2021, tables 1 and 2, with the paper's own accounting."""
    for hidden, heads, sequences in ((768, 12, 4), (1024, 16, 8), (1024, 32, 64)):
        for kind, crossing in (("mlp", 32 * hidden), ("attention", 16 * hidden)):
            for by, sign in ((-sequences, 1), (0, 0), (sequences, -1)):
                tokens = (crossing + by) // sequences
                sizes = PublishedSizes(sequences, tokens, hidden, heads, hidden // heads, n)
                more = getattr(sizes, kind)(sequence=True) - getattr(sizes, kind)(sequence=False)
                assert (more > 0) - (more < 0) == sign, (kind, by)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_where_they_cross_by_our_own_count(make, spec_of, n):
    """Parameters, gradients and moments, and what is kept, of the runtime's layers in fp32. An MLP's two products:
    biases are parameters too, so from BL = 32 H + 16 on. Attention's: BL (1 - 3 / N) = (16 H + 12) (1 - 1 / N), for a
    ring keeps a copy of keys and values beside the matrix' output, of which queries are a part.
    """

    def difference(paths, tokens):
        found = []
        for keys in ({"sequence": n, "sequence_mode": "ring"}, {"tensor": n}):
            model = laid(make(n, micro=1, **keys), spec_of(sequence=tokens))
            own = sum(kept.nbytes for kept in model.saved.part(BLOCK) if kept.path in paths)
            tensors = model.stretch(0, 0).blocks[0].tensors
            own += sum(16 * t.numel for t in tensors if t.name.rpartition(".")[0] in paths)
            found.append(own)
        return found[0] - found[1]

    mlp = 32 * H + 16  # tokens, of one sequence
    assert difference(("fc1", "fc2"), mlp) == 0
    assert difference(("fc1", "fc2"), mlp - 16) > 0 > difference(("fc1", "fc2"), mlp + 16)
    for tokens in (2 * n, 256, 1024):
        expected = 16 * (4 * H * H + 3 * H) * (n - 1) / n - 4 * tokens * H * ((n - 1) / n - 2 / n)
        assert difference(("qkv", "core", "proj"), tokens) == expected
