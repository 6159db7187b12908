"""What each tensor mode sends for the products of a transformer block, and with whom, counted from its plans.

Run: python benchmarks/mode_volumes.py [--tokens N] [--hidden N]; nothing is simulated or measured, and nothing is typed
in: every collective of every plan is counted as the ledger counts it.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from twinbed.conf.model_spec import ModelSpec, spec_from_keys
from twinbed.conf.schema import ParallelConf
from twinbed.sim.layout.volumes import block_layout, forward_volume, partners, product_transfers

SEQUENCES = 48  # of a batch, which 2.5D and 3D cut in 16 parts at 64 ranks
HEADS = 64

# mode, ranks, depth, as the papers' tables have them
POINTS = (
    ("1d", 4, 1),
    ("1d", 16, 1),
    ("1d", 64, 1),
    ("2d", 4, 1),
    ("2d", 16, 1),
    ("2d", 64, 1),
    ("2.5d", 8, 2),
    ("2.5d", 64, 4),
    ("3d", 8, 1),
    ("3d", 64, 1),
)
HUNDRED = 100


@dataclass(frozen=True, slots=True)
class Partners:
    """Ordered pairs of ranks that lie in one group. `of`: what is counted."""

    mode: str
    axes: tuple[str, ...]
    pairs: int
    of: str


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=6144, help="of a batch, b s: a multiple of 48")
    parser.add_argument("--hidden", type=int, default=3072, help="a multiple of 64")
    given = parser.parse_args(arguments)
    if given.tokens < SEQUENCES or given.tokens % SEQUENCES:
        parser.error(f"--tokens {given.tokens}: must be a multiple of {SEQUENCES}, the sequences")
    if given.hidden < HEADS or given.hidden % HEADS:
        parser.error(f"--hidden {given.hidden}: must be a multiple of {HEADS}, the heads")
    sequence = given.tokens // SEQUENCES
    spec = block_spec(hidden=given.hidden, heads=HEADS, sequence=sequence)
    print(f"Forward of one block at b s = {given.tokens}, h = {given.hidden}: its four products.")
    print("Elements sent by a rank, mean over ranks, in units of b s h. `ring`: a broadcast goes round in")
    print("pieces; `tree`: whole messages that a binomial tree sends one after the other.\n")
    print(f"{'mode':<12} {'ranks':>5} {'ring':>6} {'tree':>6}")
    for mode, ranks, depth in POINTS:
        parallel = ParallelConf(tensor=ranks, tensor_mode=mode, depth=depth)
        found = forward_volume(parallel, spec, micro=SEQUENCES, sequence=sequence)
        name = f"{mode} depth {depth}" if depth > 1 else mode
        print(f"{name:<12} {ranks:>5} {found.ring_bsh:>6.2f} {found.tree_bsh:>6.2f}")
    print(f"\nPartners at {HUNDRED} ranks: ordered pairs of ranks.\n")
    for each in partners_of_hundred():
        print(f"{each.mode:<4} {each.pairs:>6,}  {each.of}")


def block_spec(*, hidden: int, heads: int, sequence: int) -> ModelSpec:
    """A GPT of one block; its words do not matter here."""
    keys = {"family": "gpt", "layers": 1, "hidden": hidden, "heads": heads, "vocab": 64, "sequence": sequence}
    return spec_from_keys(keys)


def partners_of_hundred() -> list[Partners]:
    """1D and 2D, from the axes that their products' collectives are over."""
    found = []
    spec = block_spec(hidden=1000, heads=HUNDRED, sequence=10)
    for mode in ("1d", "2d"):
        parallel = ParallelConf(tensor=HUNDRED, tensor_mode=mode)
        layout, mesh = block_layout(parallel, spec, micro=10, sequence=10)
        transfers = product_transfers(layout, spec, mesh, micro=10, sequence=10)
        axes = tuple(dict.fromkeys(transfer.axis for transfer in transfers))
        for over in dict.fromkeys([*((axis,) for axis in axes), axes]):
            said = " and ".join(f"a {axis}" if axis != "tensor" else "the group of all" for axis in over)
            size = " and ".join(dict.fromkeys(str(mesh.size(axis)) for axis in over))
            of = f"each rank with the others of {said}, of {size} ranks"
            found.append(
                Partners(mode, over, len(partners(mesh, over)), of + (" each" if len(over) > 1 else ""))
            )
    return found


if __name__ == "__main__":
    main()
