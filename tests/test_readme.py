"""What the README tells to type is legal."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from twinbed.analysis.record import read_record
from twinbed.conf.compose import compose

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"`python run\.py ([^`]+)`", README) + re.findall(
    r"^python run\.py (.+)$", README, re.M
)
# sweeps, other folders' files and Hydra's own options are not of the kind that compose() takes
PLAIN = [line for line in COMMANDS if not re.search(r"(^|\s)-|DATE|\[overrides\]", line)]


def test_there_are_examples() -> None:
    assert len(PLAIN) >= 6


@pytest.mark.parametrize("line", PLAIN)
def test_an_example_composes(line: str) -> None:
    assert compose(line.split()).warnings == ()


def test_the_cluster_of_the_readme_is_the_one_by_overrides(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", README, re.S)
    (tmp_path / "mine" / "cluster").mkdir(parents=True)
    (tmp_path / "mine" / "cluster" / "lab.yaml").write_text(text)
    keys = ["--config-dir", "mine", "target=sim", "cluster=lab", "model=gpt_18b", "hydra.run.dir=out"]
    command = [sys.executable, str(ROOT / "run.py"), *keys]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    found = read_record(tmp_path / "out").result["experiment"]["cluster"]
    (line,) = (line for line in PLAIN if "cluster.nodes=4" in line and "inter_node.links" in line)
    assert found | {"name": "dgx_a100"} == compose(line.split()).resolved["cluster"]
