"""Fixtures of the local cluster's tests: the privilege they need, and traffic inside the nodes."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from twinbed.runtime.cluster.local import LocalCluster

_TRAFFIC = str(Path(__file__).with_name("traffic.py"))


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skips where network namespaces cannot be made; the kernel is asked, not the code under test."""
    code = "import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare(0x40000000) != 0)"
    if subprocess.run([sys.executable, "-c", code], check=False).returncode != 0:
        pytest.skip("no privilege to make network namespaces")
    if shutil.which("ip") is None:
        pytest.skip("no ip command")


@pytest.fixture
def tap(namespaces: None) -> None:
    if shutil.which("cc") is None or not Path("/dev/net/tun").exists():
        pytest.skip("the user-space switch needs cc and /dev/net/tun")


class Traffic:
    """Servers in nodes, ended with the test, and clients that talk to them."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def serve(self, cluster: LocalCluster, node: int) -> None:
        command = [*cluster.argv_prefix(node), sys.executable, _TRAFFIC, "serve"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._stack.enter_context(server)
        self._stack.callback(server.kill)
        assert server.stdout is not None
        assert server.stdout.readline() == "up\n"

    def start(self, cluster: LocalCluster, node: int, *command: object) -> subprocess.Popen[str]:
        argv = [*cluster.argv_prefix(node), sys.executable, _TRAFFIC, *map(str, command)]
        return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def finish(self, client: subprocess.Popen[str]) -> list[float]:
        out, err = client.communicate(timeout=60)
        if client.returncode != 0:
            raise ConnectionError(err)
        seconds: list[float] = json.loads(out)
        return seconds

    def run(self, cluster: LocalCluster, node: int, *command: object) -> list[float]:
        return self.finish(self.start(cluster, node, *command))


@pytest.fixture
def traffic() -> Iterator[Traffic]:
    with ExitStack() as stack:
        yield Traffic(stack)


@pytest.fixture
def quiet_retry() -> Callable[[Callable[[], Any]], None]:
    """Runs a timed check up to three times: other work on the machine can only make it fail, never pass."""

    def run(check: Callable[[], Any]) -> None:
        for _ in range(2):
            try:
                check()
            except AssertionError:
                continue
            return
        check()

    return run
