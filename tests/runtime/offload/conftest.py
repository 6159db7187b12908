"""Small disks. They need root."""

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """small_disk(size) is an empty folder on a file system of so many bytes."""
    mounted: list[Path] = []

    def mount(size_bytes: int) -> Path:
        folder = tmp_path / f"disk_{len(mounted)}"
        folder.mkdir()
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "none", str(folder)], check=True, timeout=10
        )
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        with contextlib.suppress(subprocess.CalledProcessError):
            subprocess.run(["umount", "-l", str(folder)], check=True, timeout=10)
