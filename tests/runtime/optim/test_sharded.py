"""Four ranks that hold parts of the parameters step as one process does that holds them whole."""

import json
from pathlib import Path

import pytest

from twinbed.conf.compose import compose
from twinbed.runtime.case import Case
from twinbed.runtime.launcher import launch_local

CASES = str(Path(__file__).with_name("rank_cases.py"))

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    """What each case found, by its name."""
    folder = tmp_path_factory.mktemp("optim")
    composed = compose(["target=runtime", "cluster.shaped=false", "comm=zero3"])
    names = ("given_gradients", "fully_sharded")
    cases = [
        Case(name=name, folder=name, experiment=composed.resolved, kind=f"{CASES}:{name}") for name in names
    ]
    cluster = composed.experiment.cluster
    assert cluster.num_ranks == 4
    outcome = launch_local(folder, cluster=cluster, cases=cases, timeout_s=100, show_progress=False)
    assert outcome.exit_code == 0, outcome.error
    return {name: json.loads((folder / name / "values.json").read_text()) for name in names}


def test_parts_step_as_the_whole_does(values):
    found = dict(values["given_gradients"])
    partial = found.pop("partial")
    assert len(found) == 7
    for name, each in found.items():
        assert max(each["errors"]) < 1e-6, name
        assert min(each["moved"]) > 1e-3, name  # they went somewhere
    assert "a sum that is not there yet has no norm" in partial


def test_there_is_one_all_reduce_for_each_set_of_ranks(values):
    """Of the two norms of each parameter that is cut there; what is whole on each rank takes part in none."""
    found = dict(values["given_gradients"])
    found.pop("partial")
    world = [0, 1, 2, 3]
    for name, each in found.items():
        ones = 2 if name in ("lamb uncorrected", "lars before") else 0  # that take vectors in as well
        sums = each["sums"]
        assert each["num_sums"] == 20 * len(sums), name
        assert [sum_ for sum_ in sums if sum_[0] == world] == [[world, [2, 3 + ones]]], name
        assert sorted(shape for ranks, shape in sums if ranks != world) == [[2, 1], [2, 1], [2, 1]], name


def test_fsdp2_trains_as_one_process_does(values):
    for name, each in values["fully_sharded"].items():
        assert each["error"] < 1e-6, name
        assert each["ratios"] < 1e-6, name
        assert each["numel"] == [2 * each["adapted"]] * 20, name
