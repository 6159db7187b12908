"""The command line: what a user types, what comes back, and what is left behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from twinbed.analysis.record import read_record

ROOT = Path(__file__).resolve().parent.parent


def twinbed(
    *overrides: str, cwd: Path, env: dict[str, str] | None = None, timeout: float = 100
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "run.py"), *overrides],
        cwd=cwd,
        env=os.environ | (env or {}),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def test_a_simulation_writes_the_agreed_files(tmp_path: Path) -> None:
    done = twinbed("target=sim", "comm=zero3", f"hydra.run.dir={tmp_path}/out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert {
        "result.json",
        "ledger.csv",
        "decisions.jsonl",
        "timeline.json",
        "timing.json",
        ".hydra",
    } <= names
    result = read_record(tmp_path / "out").result
    assert result["status"] == "ok"
    assert result["iteration_s"]["n"] == 8


def test_one_seed_gives_one_result_to_the_byte(tmp_path: Path) -> None:
    texts = []
    for name in ("a", "b"):
        done = twinbed("target=sim", f"hydra.run.dir={tmp_path}/{name}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        texts.append((tmp_path / name / "result.json").read_bytes())
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("comm.zero_stge=3", "zero_stge"),
        ("parallel.data=7", "parallel.data=7 must be -1 or the number of ranks, 4"),
        ("comm.zero_hpz_partition_size=3", "zero_hpz_partition_size=3 must divide the world size 4"),
        ("data.path=/no/such/text", "data.path='/no/such/text': no such file"),
        (
            "cluster.inter_node.bandwidth_Bps=nan",
            "cluster.inter_node.bandwidth_Bps=nan: must be a finite number",
        ),
        ("optimizer.lr=inf", "optimizer.lr=inf: must be a finite number"),
        ("+comm.foo=1", "comm.foo: there is no such key; use one of ['config_json', "),
        ("cluster.devices_per_node=500", "1000 ranks on this machine, must be at most 64"),
    ],
)
def test_bad_input_is_one_clear_error_and_nothing_starts(override: str, message: str, tmp_path: Path) -> None:
    done = twinbed(override, f"hydra.run.dir={tmp_path}/out", cwd=tmp_path)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("out/rank*.log"))


def test_a_simulated_failure_is_a_failure(tmp_path: Path) -> None:
    failure = "cluster.failures=[{rank:3,at_s:0.5}]"
    done = twinbed("target=sim", failure, f"hydra.run.dir={tmp_path}/out", cwd=tmp_path)
    assert done.returncode == 1
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["status"] == "failed"
    assert "rank 3" in result["error"]
    assert "Traceback" not in done.stderr


def test_what_fails_takes_an_older_record_with_it(tmp_path: Path) -> None:
    out = f"hydra.run.dir={tmp_path}/out"
    assert twinbed("target=sim", out, cwd=tmp_path).returncode == 0
    assert twinbed("target=sim", "optimizer.lr=nan", out, cwd=tmp_path).returncode == 1
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert (result["status"], result["error"]) == ("failed", "optimizer.lr=nan: must be a finite number")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("cluster.inter_node.bandwidth=1", "legal keys of cluster.inter_node: links, bandwidth_Bps"),
        ("cluster.inter_node.bandwidth_Bps=200Gbit", "is a number in bytes a second (200 Gbit/s is 25e9)"),
        ("+experiment=stragglers cluster.slowdown={0:8}", "cluster.slowdown is a list here: give"),
    ],
)
def test_what_hydra_refuses_is_followed_by_a_hint(override: str, message: str, tmp_path: Path) -> None:
    done = twinbed(*override.split(), cwd=tmp_path)
    assert done.returncode == 1
    assert message in done.stderr.splitlines()[-1]


def test_a_policy_of_ones_own_goes_by_its_own_name(tmp_path: Path) -> None:
    policy = tmp_path / "policy.py"
    policy.write_text(
        "from twinbed.policies.comm import ZeroComm\n"
        "def Mine(*, num_ranks, ranks_per_node):\n"
        "    return ZeroComm(name='mine', ranks_per_node=ranks_per_node)\n"
    )
    done = twinbed(
        "target=sim",
        "comm=zero3",
        "comm.policy=policy.py:Mine",
        f"hydra.run.dir={tmp_path}/out",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"simulated mine (comm.policy={policy}:Mine): ")
    assert read_record(tmp_path / "out").result["experiment"]["comm"]["name"] == "mine"


def test_a_script_for_torchrun_comes_with_the_prediction_and_a_word_on_links(tmp_path: Path) -> None:
    done = twinbed("launch=torchrun", "comm=zero3", f"hydra.run.dir={tmp_path}/out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("simulated zero3: ")
    assert "cluster.shaped=true with launch=torchrun: torchrun shapes no links" in done.stderr
    warned = read_record(tmp_path / "out" / "sim").result["warnings"]
    assert any("torchrun shapes no links" in warning for warning in warned)


def probe(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    code = "import sys; from twinbed.runtime.probe import main; sys.exit(main())"
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("new/here.yaml", "cluster=dgx_a100"), "cluster=dgx_a100 with launch=local needs 16 GPUs"),
        (("new/here.yaml", "launch=slurm"), "launch=slurm: only this machine can be probed"),
        (("file/here.yaml",), "cannot write file/here.yaml: "),
        (("folder",), "cannot write folder: Is a directory"),
    ],
)
def test_a_probe_refuses_before_it_measures(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    done = probe(*arguments, cwd=tmp_path)
    assert done.returncode != 0
    assert message in done.stderr
    assert "measuring" not in done.stdout
    assert not (tmp_path / "new").exists()


@pytest.mark.distributed
def test_a_probe_makes_the_folder_of_its_file(tmp_path: Path) -> None:
    keys = ("cluster.nodes=1", "cluster.devices_per_node=1", "cluster.shaped=false")
    done = probe("mine/cluster/here.yaml", *keys, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "measuring 1 rank on this machine" in done.stdout
    assert "probe: measuring collectives" in done.stderr
    used = twinbed("--config-dir", "mine", "target=sim", "cluster=here", cwd=tmp_path)
    assert used.returncode == 0, used.stderr


def test_a_truncated_model_config_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "gpt2", "n_layer": ')
    done = twinbed(
        "target=sim", "model=hf", f"model.config_json={path}", f"hydra.run.dir={tmp_path}/out", cwd=tmp_path
    )
    assert done.returncode != 0
    assert str(path) in done.stderr
    assert json.loads((tmp_path / "out" / "result.json").read_text())["status"] == "failed"


def test_gpus_that_are_not_there_are_missed_before_a_process_starts(tmp_path: Path) -> None:
    done = twinbed(
        "target=runtime",
        "cluster=dgx_a100",
        "cluster.nodes=64",
        f"hydra.run.dir={tmp_path}/out",
        cwd=tmp_path,
    )
    assert done.returncode != 0
    assert "cluster=dgx_a100 with launch=local needs 512 GPUs on this machine, found" in done.stderr
    assert not list(tmp_path.glob("out/rank*.log"))


def test_a_failed_run_of_both_targets_can_be_reported(tmp_path: Path) -> None:
    done = twinbed("cluster.nodes=0", f"hydra.run.dir={tmp_path}/out", cwd=tmp_path)
    assert done.returncode != 0
    for side in ("sim", "runtime"):
        result = read_record(tmp_path / "out" / side).result
        assert (result["status"], result["target"]) == ("failed", side)
    report = subprocess.run(
        [sys.executable, "-m", "twinbed.analysis.report", str(tmp_path / "out")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert report.returncode == 0, report.stderr
    assert "cluster.nodes=0" in report.stdout


def test_a_multirun_of_twenty_points_gives_one_table(tmp_path: Path) -> None:
    done = twinbed(
        "-m",
        "target=sim",
        "comm=zero3,qwz,hpz,qgz,zeropp",
        "cluster.inter_node.links=1,2,4,8",
        f"hydra.sweep.dir={tmp_path}/sweep",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    records = sorted((tmp_path / "sweep").glob("*/result.json"))
    assert len(records) == 20
    report = subprocess.run(
        [sys.executable, "-m", "twinbed.analysis.report", str(tmp_path / "sweep")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert report.returncode == 0, report.stderr
    for policy in ("zero3", "qwz", "hpz", "qgz", "zeropp"):
        assert report.stdout.count(policy) >= 4
    assert (tmp_path / "sweep" / "report.html").is_file()


def test_a_failed_point_does_not_stop_a_multirun(tmp_path: Path) -> None:
    done = twinbed(
        "-m",
        "target=sim",
        "comm=hpz",
        "comm.zero_hpz_partition_size=3,2",
        f"hydra.sweep.dir={tmp_path}/sweep",
        cwd=tmp_path,
    )
    assert done.returncode != 0
    status = [json.loads((tmp_path / "sweep" / str(i) / "result.json").read_text())["status"] for i in (0, 1)]
    assert status == ["failed", "ok"]


@pytest.mark.distributed
@pytest.mark.timeout(150)
def test_our_kernels_do_not_shadow_an_installed_package(tmp_path: Path) -> None:
    """Hugging Face's `kernels` must stay importable beside our folder of that name, also in ranks."""
    package = tmp_path / "site" / "kernels"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("WHOSE = 'installed'\n")
    policy = tmp_path / "policy.py"
    policy.write_text(
        "import kernels, sys\n"
        "from twinbed.policies.comm import ZeroComm\n"
        "assert kernels.WHOSE == 'installed', kernels.__file__\n"
        "import twinbed.kernels\n"
        "def Mine(*, num_ranks, ranks_per_node):\n"
        "    return ZeroComm(name='mine', ranks_per_node=ranks_per_node)\n"
    )
    done = twinbed(
        "target=runtime",
        f"comm.policy={policy}:Mine",
        "cluster.devices_per_node=1",
        "model.layers=1",
        "model.hidden=32",
        "model.heads=2",
        "batch.sequence=16",
        "steps=3",
        f"hydra.run.dir={tmp_path}/out",
        cwd=ROOT,  # the very folder that holds our kernels/
        env={"PYTHONPATH": str(tmp_path / "site")},
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small file system")
@pytest.mark.netns
@pytest.mark.parametrize("kind", ["full", "read-only"])
@pytest.mark.parametrize("target", ["sim", "runtime", "both"])
def test_an_output_folder_that_cannot_be_written(kind: str, target: str, tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    options = "size=16k" if kind == "full" else "size=1m,ro"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(mount)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mount is not permitted")
    try:
        done = twinbed(f"target={target}", "steps=3", f"hydra.run.dir={mount}/out", cwd=tmp_path)
    finally:
        subprocess.run(["umount", str(mount)], check=True)
    assert done.returncode != 0
    reason = "No space left" if kind == "full" else "Read-only file system"
    assert reason in done.stderr
    assert "holds no result.json" not in done.stderr
