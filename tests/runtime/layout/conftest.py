"""Starts the ranks of a test: one Python a rank, joined by gloo over a file."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

LaunchRanks = Callable[..., list[Any]]


@pytest.fixture
def launch_ranks(tmp_path: Path) -> LaunchRanks:
    """launch_ranks(script, case, world) runs `script.py case` on each rank; what its function returned, by rank."""

    def run(script: str, case: str, world: int, timeout_s: float = 150.0) -> list[Any]:
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
        path = str(Path(__file__).with_name(f"{script}.py"))
        ranks = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-W",
                    "ignore::FutureWarning",
                    path,
                    case,
                    str(rank),
                    str(world),
                    str(tmp_path),
                ],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(world)
        ]
        outputs = []
        try:
            for process in ranks:
                outputs.append(process.communicate(timeout=timeout_s)[0])
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        failed = [
            f"rank {rank} exited with {process.returncode}:\n{output[-3000:]}"
            for rank, (process, output) in enumerate(zip(ranks, outputs, strict=True))
            if process.returncode
        ]
        assert not failed, "\n".join(failed)
        return [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(world)]

    return run
