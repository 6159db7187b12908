"""Quantization in blocks against one scale for a whole tensor, on weights that were really trained.

Run: python benchmarks/trained_weights.py [OUTPUT] [STEPS]. Trains the small GPT on the built-in text (about a minute),
reads the weights back from its checkpoints, and quantizes each matrix both ways with the kernels that gathers use. The
paper (ZeRO++, section 3.1) reports a third of the error for blocks, on weights that it does not name.
"""

import csv
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load

from twinbed.conf.compose import Composed, compose
from twinbed.kernels import decode, encode
from twinbed.runtime.case import Case
from twinbed.runtime.checkpoint import find_checkpoint
from twinbed.runtime.launcher import launch_local
from twinbed.runtime.model import GPT

FORMATS = ((8, 2048), (8, 256), (4, 256))  # bits and block; the first is comm's default for weights
STEPS = 400


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative L2 errors of one kind of matrix."""

    kind: str
    bits: int
    block: int
    in_blocks: float
    whole: float

    @property
    def ratio(self) -> float:
        return self.whole / self.in_blocks


def relative_error(matrices: Iterable[Tensor], *, bits: int, block: int) -> float:
    """Relative L2 error of all together, each quantized by itself. `block` 0: one scale a matrix."""
    off = total = 0.0
    for matrix in matrices:
        x = matrix.detach().flatten().float()
        size = block or x.numel()
        back = decode(encode(x, bits=bits, block=size), bits=bits, block=size, numel=x.numel())
        off += float((back.float() - x).double().square().sum())
        total += float(x.double().square().sum())
    return float((off / total) ** 0.5)


def errors(weights: Mapping[str, Tensor]) -> list[Errors]:
    """By the last two parts of the names of matrices, and of all."""
    kinds: dict[str, list[Tensor]] = {}
    for name, weight in weights.items():
        if weight.ndim == 2:
            kinds.setdefault(".".join(name.split(".")[-2:]), []).append(weight)
    kinds["all matrices"] = [matrix for own in kinds.values() for matrix in own]
    return [
        Errors(
            kind,
            bits,
            block,
            relative_error(own, bits=bits, block=block),
            relative_error(own, bits=bits, block=0),
        )
        for bits, block in FORMATS
        for kind, own in kinds.items()
    ]


def trained(folder: Path, steps: int) -> tuple[Composed, dict[str, Tensor]]:
    composed = compose(
        [
            "target=runtime",
            "cluster.nodes=1",
            "cluster.devices_per_node=1",
            "cluster.shaped=false",
            "comm=zero3",
            "batch.micro=8",
            f"steps={steps}",
            f"train.save_every={steps}",
            "train.warmup_lr_steps=20",
            "train.lr_schedule=cosine",
        ]
    )
    case = Case(name="trained", folder="trained", experiment=composed.resolved)
    outcome = launch_local(folder, cluster=composed.experiment.cluster, cases=[case])
    if outcome.status != "ok":
        sys.exit(outcome.error)
    weights = dict(fresh(composed))
    load({"model": weights}, checkpoint_id=find_checkpoint(folder / "trained").folder, no_dist=True)
    return composed, weights


def fresh(composed: Composed) -> dict[str, Tensor]:
    """The weights that the training began with."""
    model = GPT(composed.spec, seed=composed.experiment.seed)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def main(argv: list[str] | None = None) -> None:
    """Print and write the table."""
    arguments = sys.argv[1:] if argv is None else argv
    folder = Path(arguments[0] if arguments else "outputs/bench/trained_weights")
    folder.mkdir(parents=True, exist_ok=True)
    composed, weights = trained(folder, int(arguments[1]) if len(arguments) > 1 else STEPS)
    rows = []
    print(
        f"{'weights':10}{'bits':>5}{'block':>7}  {'matrices':<20}{'in blocks':>11}{'whole':>11}{'ratio':>8}"
    )
    for when, found in (("fresh", fresh(composed)), ("trained", weights)):
        for each in errors(found):
            print(
                f"{when:10}{each.bits:5}{each.block:7}  {each.kind:<20}{each.in_blocks:11.5f}{each.whole:11.5f}"
                f"{each.ratio:7.2f}x"
            )
            rows.append([when, each.bits, each.block, each.kind, each.in_blocks, each.whole, each.ratio])
    with (folder / "trained_weights.csv").open("w", newline="") as file:
        head = ["weights", "bits", "block", "matrices", "in_blocks", "whole", "ratio"]
        csv.writer(file).writerows([head, *rows])
    print(f"wrote {folder}/trained_weights.csv")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
