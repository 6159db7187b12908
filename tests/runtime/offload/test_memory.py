"""Under a limit that the kernel enforces: what does not fit without offload is trained, and generated from, with it."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("limited.py")
ROOTS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))  # of the first version, of the second

pytestmark = pytest.mark.timeout(240)


def made_group() -> Path:
    """A new control group whose memory can be limited."""
    if os.geteuid() != 0:
        pytest.skip("memory limits need root")
    root = next((root for root in ROOTS if root.is_dir()), None)
    if root is None:
        pytest.skip("there are no control groups here")
    folder = Path(tempfile.mkdtemp(prefix="twinbed_", dir=root))
    if not any((folder / name).exists() for name in ("memory.limit_in_bytes", "memory.max")):
        folder.rmdir()
        pytest.skip("the memory controller is not enabled here")
    return folder


def run(folder: Path, mode: str, allowance: int | None = None) -> dict | None:
    """What the script found; None: it was killed for its memory."""
    group = made_group()
    arguments = [mode, str(folder), str(group), *([str(allowance)] if allowance is not None else [])]
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(SCRIPT), *arguments],
            capture_output=True,
            text=True,
            timeout=200,
        )
    finally:
        remove(group)
    if done.returncode == -9:
        return None
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / f"{mode}.json").read_text())


def remove(group: Path) -> None:
    for _ in range(50):
        with contextlib.suppress(OSError):  # a moment after its last process has ended
            group.rmdir()
            return
        time.sleep(0.1)


def test_half_of_the_memory_is_enough_to_train_the_same_model_to_the_same_losses(tmp_path):
    plain = run(tmp_path, "train")
    half = plain["needed"] // 2
    assert run(tmp_path, "train", half) is None, "the limit does not bind"
    (tmp_path / "train_disk.json").unlink(missing_ok=True)
    disk = run(tmp_path, "train_disk", half)
    assert disk is not None, "killed"
    assert disk["loss"] == plain["loss"]
    assert len(set(plain["loss"])) == len(plain["loss"])


def test_a_quarter_of_the_model_is_enough_to_generate_the_same_tokens(tmp_path):
    model_bytes = run(tmp_path, "save")["model_bytes"]
    plain = run(tmp_path, "generate")
    quarter = model_bytes // 4
    assert run(tmp_path, "generate", quarter) is None, "the limit does not bind"
    disk = run(tmp_path, "generate_disk", quarter)
    assert disk is not None, "killed"
    assert disk["tokens"] == plain["tokens"]
    assert len(set(plain["tokens"])) > 3
