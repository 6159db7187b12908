"""Runs on each rank for test_parallelize.py: examples as a script runs them, under many layouts in one launch."""

import faulthandler
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

EXAMPLES = Path(__file__).parents[3] / "examples"
SIZES = ["--steps", "4", "--tokens", "32"]

LAYOUTS: Mapping[str, str] = {
    "1d": "tensor=4",
    "1d sequence": "tensor=4 sequence=4",
    "2d": "tensor=4 tensor_mode=2d",
    "ulysses": "sequence=2 sequence_mode=ulysses tensor=2",
    "data": "comm=zero3",
    "data ddp": "tensor=2",
    "data zeropp": "tensor=2 comm=zeropp",
    "data sequence": "sequence=2 sequence_mode=ulysses comm=hpz",
}


def example(name: str) -> Callable[[list[str]], list[float]]:
    """Its training function."""
    sys.path.insert(0, str(EXAMPLES))
    train: Callable[[list[str]], list[float]] = importlib.import_module(name).train
    return train


def losses(name: str, *layouts: str) -> dict[str, list[float]]:
    """Of each layout."""
    found = {}
    for layout in layouts:
        try:
            found[layout] = example(f"train_{name}_parallel")([*SIZES, "--parallel", LAYOUTS[layout]])
        except Exception as err:
            raise RuntimeError(f"{name}, {layout}") from err
    return found


CASES: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: losses("gpt2", *LAYOUTS),
    "llama": lambda: losses("llama", *LAYOUTS),
    "plain": lambda: losses("plain", *LAYOUTS),
}


def main() -> None:
    """`script.py case rank world folder`."""
    case, rank, world, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    faulthandler.dump_traceback_later(280, exit=True)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=UserWarning)
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=120),
    )
    torch.save(CASES[case](), folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
