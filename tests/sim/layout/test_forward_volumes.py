"""Forward volumes and partners that are counted from the modes' plans, against published figures."""

import pytest

from twinbed.conf.schema import ParallelConf
from twinbed.sim.layout.volumes import block_layout, forward_volume, partners, product_transfers

# Forward elements per GPU of a block, in units of b s h, to the printed digits: b s = 6144, h = 3072. 1D: Shoeybi et
# al. 2019 by Korthikanti et al. 2022, section 4.2.2; 2D: Xu et al. 2021; 2.5D: Wang et al. 2021; 3D: Bian et al. 2021
PRINTED = [
    ("1d", 4, 1, "3.00", "3.00"),
    ("1d", 16, 1, "3.75", "3.75"),
    ("1d", 64, 1, "3.94", "3.94"),
    ("2d", 4, 1, "3.25", "6.50"),
    ("2d", 16, 1, "2.44", "6.50"),
    ("2d", 64, 1, "1.42", "4.88"),
    ("2.5d", 64, 4, "1.45", None),
    ("3d", 64, 1, "1.03", "1.03"),
]
MICRO, SEQUENCE = 48, 128


@pytest.fixture
def spec(spec_of):
    return spec_of(layers=1, hidden=3072, heads=64, sequence=SEQUENCE)


@pytest.mark.parametrize(("mode", "ranks", "depth", "ring", "tree"), PRINTED)
def test_forward_volume_of_a_block(spec, mode, ranks, depth, ring, tree):
    parallel = ParallelConf(tensor=ranks, tensor_mode=mode, depth=depth)
    found = forward_volume(parallel, spec, micro=MICRO, sequence=SEQUENCE)
    assert found.activation == 6144 * 3072
    assert f"{found.ring_bsh:.2f}" == ring
    assert tree is None or f"{found.tree_bsh:.2f}" == tree


@pytest.mark.parametrize(
    ("mode", "ranks", "depth"), [("1d", 8, 1), ("2d", 9, 1), ("2.5d", 18, 2), ("3d", 8, 1)]
)
def test_forward_volume_is_the_closed_form_at_other_sizes(spec_of, mode, ranks, depth):
    """Sizes that no paper prints, and an MLP that is not four times as wide."""
    hidden, ffn, tokens, micro = 144, 432, 10, 72
    spec = spec_of(layers=1, hidden=hidden, heads=24, ffn=ffn, sequence=tokens)
    found = forward_volume(
        ParallelConf(tensor=ranks, tensor_mode=mode, depth=depth), spec, micro=micro, sequence=tokens
    )
    bs, h, f = micro * tokens, hidden, ffn
    inputs, weights, outputs = bs * (3 * h + f), 4 * h * h + 2 * h * f, bs * (5 * h + f)
    q = {"2d": 3, "2.5d": 3, "3d": 2}.get(mode, 0)
    expected = {
        "1d": lambda: 2 * 2 * (ranks - 1) / ranks * bs * h,
        "2d": lambda: (q - 1) / q**2 * (inputs + weights),
        "2.5d": lambda: (q - 1) / q**2 * (inputs / depth + weights),
        "3d": lambda: (q - 1) / q**3 * (inputs + weights + outputs),
    }[mode]()
    assert found.ring == pytest.approx(expected)
    if mode in ("2d", "2.5d"):  # q broadcasts of two whole messages one after the other
        assert found.tree == pytest.approx(2 / q * (inputs / depth + weights))


def test_sequence_parallelism_sends_the_same_with_twice_the_collectives(spec):
    """A sum becomes a reduce-scatter and an all-gather (Korthikanti et al. 2022, section 4.2.2)."""
    found = [
        forward_volume(ParallelConf(tensor=4, sequence=sequence), spec, micro=MICRO, sequence=SEQUENCE)
        for sequence in (1, 4)
    ]
    assert found[0] == found[1]


def test_partners_of_100_ranks(spec_of):
    """9,900 ordered pairs in 1D; in 2D 900 along one dimension, 1,800 along both."""
    spec = spec_of(layers=1, hidden=1000, heads=100, sequence=10)
    pairs = {}
    for mode in ("1d", "2d"):
        layout, mesh = block_layout(ParallelConf(tensor=100, tensor_mode=mode), spec, micro=10, sequence=10)
        axes = {each.axis for each in product_transfers(layout, spec, mesh, micro=10, sequence=10)}
        pairs |= {(mode, axis): len(partners(mesh, [axis])) for axis in axes}
        pairs[mode, "all"] = len(partners(mesh, axes))
    assert pairs == {
        ("1d", "tensor"): 9_900,
        ("1d", "all"): 9_900,
        ("2d", "row"): 900,
        ("2d", "column"): 900,
        ("2d", "all"): 1_800,
    }
