"""The switch's binary and its cache."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from twinbed.runtime.cluster import build
from twinbed.runtime.cluster.build import netswitch_binary

needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "twinbed"


@needs_cc
def test_two_builds_at_once_leave_one_binary(cache):
    code = "from twinbed.runtime.cluster.build import netswitch_binary; print(netswitch_binary())"
    command = [sys.executable, "-c", code]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {process.communicate(timeout=60)[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0]
    assert paths == {str(path) for path in cache.iterdir()}
    assert len(paths) == 1


@needs_cc
def test_built_once_and_then_taken_from_the_cache(monkeypatch):
    binary = netswitch_binary()
    built_ns = binary.stat().st_mtime_ns
    monkeypatch.setenv("PATH", "")  # no compiler any more
    assert netswitch_binary() == binary
    assert binary.stat().st_mtime_ns == built_ns


@needs_cc
def test_compiles_without_a_warning(cache):
    binary = netswitch_binary()
    sources = [str(path) for path in sorted(Path(build.__file__).parent.glob("*.c"))]
    command = [
        "cc",
        "-O2",
        "-std=gnu11",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-o",
        str(cache / "strict"),
        *sources,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stderr == ""
    usage = subprocess.run([str(binary)], capture_output=True, text=True)
    assert usage.returncode == 2
    assert usage.stderr.startswith("usage: netswitch")


@needs_cc
def test_what_a_killed_build_left_is_removed(cache):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    dead, living = cache / f"build-{process.pid}-x", cache / f"build-{os.getpid()}-x"
    for folder in (dead, living):
        folder.mkdir(parents=True)
    netswitch_binary()
    assert not dead.exists()
    assert living.exists()


def test_without_a_compiler_the_names_looked_for_are_said(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match=r"no C compiler in PATH \(looked for cc, gcc, clang\)"):
        netswitch_binary()


def test_a_cache_that_others_can_write_is_not_used(cache):
    cache.mkdir()
    cache.chmod(0o777)
    assert build._cache_folder() != cache
