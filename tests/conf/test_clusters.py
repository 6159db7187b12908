"""Every cluster file composes, names its source, and lists guesses that lie around its values."""

from pathlib import Path

import pytest
import yaml

import twinbed.conf
from twinbed.conf.compose import compose
from twinbed.conf.model_spec import num_parameters

CLUSTERS = sorted(p.stem for p in (Path(twinbed.conf.__file__).parent / "cluster").glob("*.yaml"))


@pytest.mark.parametrize("name", CLUSTERS)
def test_cluster_file(name):
    cluster = compose(("target=sim", f"cluster={name}")).experiment.cluster
    assert cluster.name == name
    assert cluster.source or name == "local_2x2"
    for key, (worst, best) in cluster.guesses.items():
        value = cluster
        for part in key.split("."):
            value = value[int(part)] if isinstance(value, list) else getattr(value, part)
        assert min(worst, best) <= value <= max(worst, best), key
        assert worst != best, key
    for key in cluster.fitted:
        assert key not in cluster.guesses


@pytest.mark.parametrize("name", CLUSTERS)
def test_what_a_comment_calls_a_guess_has_a_range(name):
    path = Path(twinbed.conf.__file__).parent / "cluster" / f"{name}.yaml"
    text = path.read_text()
    remarks = [line.partition("#")[2].strip() for line in text.splitlines()]
    guesses = compose(("target=sim", f"cluster={name}")).experiment.cluster.guesses
    guessed = [key for key, line in _scalars(yaml.compose(text)) if remarks[line].startswith("guess")]
    if "parts:" in text:  # which say what the devices are
        guessed = [key for key in guessed if not key.startswith("device.")]
    assert [key for key in guessed if key not in guesses] == []


def _scalars(node, prefix=""):
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _scalars(value, f"{prefix}{key.value}.")
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            yield from _scalars(value, f"{prefix}{i}.")
    else:
        yield prefix.removesuffix("."), node.start_mark.line


@pytest.mark.parametrize(
    ("model", "count"),
    [
        ("llama3_8b", 8_030_261_248),
        ("llama3_70b", 70_553_706_496),
        ("llama2_13b", 13_015_864_320),
        ("llama2_70b", 68_976_648_192),
    ],
)
def test_llamas(model, count):
    assert num_parameters(compose(("target=sim", "cluster=dgx_a100", f"model={model}")).spec) == count


def test_the_40_gb_version():
    device = compose(
        (
            "target=sim",
            "cluster=dgx_a100",
            "cluster.device.memory_bytes=42.48e9",
            "cluster.device.memory_Bps=1555e9",
        )
    ).experiment.cluster.device
    assert (device.memory_bytes, device.memory_Bps) == (42.48e9, 1555e9)
