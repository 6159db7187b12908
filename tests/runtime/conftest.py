"""Starts the ranks of a test, joined by gloo over a file."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

Launch = Callable[..., list[Any]]
HOST = Path(__file__).with_name("ranks_host.py")


@pytest.fixture
def launch(tmp_path: Path, request: pytest.FixtureRequest) -> Launch:
    """launch(script, case, world) runs `script.py case`, beside the test's file, on each rank; what its function
    returned, by rank. Of several cases, "a,b", what each returned by its name.
    """
    folder = request.path.parent

    def run(script: str, case: str, world: int, timeout_s: float = 180.0) -> list[Any]:
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
        env.pop("LOCAL_WORLD_SIZE", None)
        command = [sys.executable, "-W", "ignore::FutureWarning", str(HOST), str(folder / f"{script}.py")]
        host = subprocess.Popen(
            [*command, case, str(world), str(tmp_path), str(timeout_s)], env=env, start_new_session=True
        )
        try:
            host.wait(timeout_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(host.pid, signal.SIGKILL)
            host.wait()
        codes = json.loads((tmp_path / "codes.json").read_text())
        outputs = [(tmp_path / f"{rank}.log").read_text(errors="replace") for rank in range(world)]
        failed = [
            f"rank {rank} exited with {code}:\n{output[-4000:]}"
            for rank, (code, output) in enumerate(zip(codes, outputs, strict=True))
            if code
        ]
        assert not failed, "\n".join(failed)
        return [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(world)]

    return run
