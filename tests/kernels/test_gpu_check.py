"""`make gpu-check` on a machine without a GPU: one clear line, and a rehearsal of the same code on the CPU."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from twinbed.kernels import encode_segments

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"


def run(*arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line():
    done = run(timeout=60)
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("gpu-check needs a CUDA GPU")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_the_rehearsal_passes_all_checks_and_says_what_one_gpu_cannot_show():
    done = run("--rehearse", timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "FAILED" not in done.stdout
    assert "0 of the checks failed" in done.stdout
    assert "pageable: 18 of 18 weights and moments on cpu" in done.stdout
    assert "pageable: losses within" in done.stdout
    _, said = done.stdout.split("One GPU cannot show: ")
    for missing in ("NCCL between GPUs and between nodes", "NVLink", "rails"):
        assert missing in said


@pytest.mark.gpu
@pytest.mark.timeout(480)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_all_checks_pass_on_a_gpu():
    done = run(timeout=480)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def test_codes_beside_a_tie_are_counted_apart_from_wrong_ones():
    near_ties = runpy.run_path(str(SCRIPT))["near_ties"]
    options = {"segments": (512,), "bits": 8, "block": 256}
    x = torch.full((2, 512), 127.0)
    x[:, 1::2] = torch.arange(256).remainder(127).float() + 0.5  # quotients are exact: each one is a tie
    plain = encode_segments(x, **options)
    assert near_ties(x, plain, plain, options) == (0, 0)
    other = plain.clone()
    other[:, 1:512:2] ^= 1  # even codes go a step up: they had been rounded down, or up, to even
    assert near_ties(x, other, plain, options) == (512, 0)
    other[0, 0] -= 1  # a step, and no tie
    other[0, 2] -= 2
    other[1, -1] += 1  # a scale
    assert near_ties(x, other, plain, options) == (512, 3)
