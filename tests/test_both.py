"""`target=both` from the command line: one launch, two records, a comparison, a report."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from yaml import safe_load

from twinbed.analysis.record import read_record

ROOT = Path(__file__).resolve().parent.parent
SMALL = (
    "model.layers=2",
    "model.hidden=64",
    "model.heads=4",
    "batch.sequence=32",
    "steps=4",
    "warmup_steps=1",
)


def run(*arguments: str, cwd: Path, timeout: float = 200) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False
    )


@pytest.mark.distributed
@pytest.mark.timeout(240)
def test_both_targets_leave_equal_ledgers_and_a_report(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run(str(ROOT / "run.py"), "comm=zeropp", *SMALL, f"hydra.run.dir={out}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "ledgers: equal; replayed decisions: equal" in done.stdout
    parity = json.loads((out / "parity.json").read_text())
    assert (parity["status"], parity["ledger_equal"], parity["replay_equal"]) == ("ok", True, True)
    assert parity["iteration_s_ratio"] > 0
    sim, real = read_record(out / "sim"), read_record(out / "runtime")
    assert len(sim.ledger) == len(real.ledger) > 0
    assert len(real.result["loss"]) == 4
    # the prediction was made from this launch's probe, and the record keeps the constants
    host = sim.result["experiment"]["cluster"]["host"]
    assert max(ns for key, ns in host["op_ns"].items() if key.startswith("all_gather/world/")) > 0
    assert host["compute_ns"]["forward/block.0"] > 0

    report = run("-m", "twinbed.analysis.report", str(out), cwd=tmp_path)
    assert report.returncode == 0, report.stderr
    assert (out / "report.html").stat().st_size > 10_000
    compared = run(
        "-m", "twinbed.analysis.report", "--compare", str(out / "sim"), str(out / "runtime"), cwd=tmp_path
    )
    assert compared.returncode == 0, compared.stderr


@pytest.mark.distributed
@pytest.mark.timeout(240)
def test_states_on_disk_are_predicted_from_the_disks_own_rates(tmp_path: Path) -> None:
    out = tmp_path / "out"
    cluster = ("cluster.nodes=2", "cluster.devices_per_node=1", "cluster.shaped=false")
    keys = ("offload=disk", "offload.policy=auto", "offload.memory_bytes=600000", "precision=fp32")
    done = run(
        str(ROOT / "run.py"), "comm=zero3", *SMALL, *cluster, *keys, f"hydra.run.dir={out}", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "ledgers: equal; replayed decisions: equal" in done.stdout
    sim, real = read_record(out / "sim"), read_record(out / "runtime")
    for record in (sim, real):
        assert any(decision.event.startswith("ChunkStep") for decision in record.decisions)
    for key in ("far_memory_bytes", "moved_bytes"):  # of one node, and of one rank
        assert sim.result[key] == real.result[key]
    measured = json.loads((out / "probe_before" / "probe.json").read_text())["disk"]
    if measured is not None:  # else: no direct I/O here
        disk = sim.result["experiment"]["cluster"]["disk"]
        assert disk["read_Bps"] != real.result["experiment"]["cluster"]["disk"]["read_Bps"]
        assert sim.result["guessed_inputs"] == []


def hear_interrupts() -> None:
    """A shell that starts the tests in the background has them, and their children, ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def workers(folder: Path) -> list[int]:
    """Pids of the ranks that run in this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            mine = str(folder).encode() in path.read_bytes()
            if mine and path.with_name("comm").read_text().startswith("rank"):
                found.append(int(path.parent.name))
    return sorted(found)


@pytest.mark.distributed
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "who",
    [
        "rank",
        "interrupted",
        *(pytest.param(who, marks=pytest.mark.long) for who in ("terminated", "hung up")),
    ],
)
def test_a_run_that_is_ended_leaves_two_failed_records(who: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    keys = (*SMALL, "steps=100000", "cluster.shaped=false", f"hydra.run.dir={out}")
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "run.py"), *keys],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_interrupts,
    )
    metrics = out / "runtime" / "metrics.csv"
    deadline = time.monotonic() + 150
    while not (metrics.is_file() and metrics.read_text().count("\n") > 3) and time.monotonic() < deadline:
        time.sleep(0.1)
    if who == "rank":
        os.kill(workers(out)[-1], signal.SIGKILL)
    else:
        signals = {"interrupted": signal.SIGINT, "terminated": signal.SIGTERM, "hung up": signal.SIGHUP}
        process.send_signal(signals[who])
    try:
        _, told = process.communicate(timeout=30)
    finally:
        process.kill()
    says = "was killed by SIGKILL in step" if who == "rank" else "interrupted"
    assert process.returncode == {"rank": 1, "interrupted": 130, "terminated": 143, "hung up": 129}[who]
    assert says in told
    assert "Traceback" not in told.splitlines()[-3:]
    assert "holds no result.json" not in told
    for side in ("sim", "runtime"):
        assert json.loads((out / side / "result.json").read_text())["status"] == "failed"
    assert says in json.loads((out / "runtime" / "result.json").read_text())["error"]
    assert workers(out) == []


@pytest.mark.distributed
@pytest.mark.timeout(240)
def test_the_script_for_torchrun_runs_the_same_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    keys = (*SMALL, "launch=torchrun", "cluster.nodes=1", "cluster.shaped=false")
    done = run(str(ROOT / "run.py"), *keys, f"hydra.run.dir={out}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "RDZV_HOST": "localhost", "GLOO_SOCKET_IFNAME": "lo"}
    environment["RDZV_PORT"] = "0"  # one that is free
    subprocess.run(["bash", str(out / "launch.sh")], env=environment, cwd=tmp_path, timeout=150, check=True)
    pair = (str(out / "sim"), str(out / "runtime"))
    compared = run("-m", "twinbed.analysis.report", "--compare", *pair, cwd=tmp_path)
    assert compared.returncode == 0, compared.stderr
    parity = json.loads((out / "runtime" / "compare" / "parity.json").read_text())
    assert parity["ledger_equal"] is True


@pytest.mark.parametrize(("launch", "script"), [("torchrun", "launch.sh"), ("slurm", "launch.sbatch")])
def test_a_cluster_gets_a_script_and_the_prediction_is_made_here(
    launch: str, script: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = run(
        str(ROOT / "run.py"),
        f"launch={launch}",
        "cluster=dgx_a100",
        "comm=zeropp",
        *SMALL,
        f"hydra.run.dir={out}",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    text = (out / script).read_text()
    assert "twinbed.runtime.worker" in text
    assert os.access(out / script, os.X_OK)
    assert subprocess.run(["bash", "-n", str(out / script)], check=False).returncode == 0
    assert json.loads((out / "launch.json").read_text())["cases"][0]["kind"] == "train"
    assert read_record(out / "sim").result["status"] == "ok"


@pytest.mark.distributed
@pytest.mark.timeout(240)
def test_a_probe_serves_later_predictions(tmp_path: Path) -> None:
    """Measured once, written as YAML, and chosen like any other cluster."""
    yaml = tmp_path / "mine" / "cluster" / "here.yaml"
    yaml.parent.mkdir(parents=True)
    probed = run(
        "-c",
        "import sys; from twinbed.runtime.probe import main; sys.exit(main())",
        str(yaml),
        "cluster.devices_per_node=1",
        cwd=tmp_path,
    )
    assert probed.returncode == 0, probed.stderr
    found = safe_load(yaml.read_text())
    kernels = {"copy", *(f"{kind}{bits}" for kind in ("encode", "decode") for bits in (4, 8))}
    kernels |= {"requantize_decode4", "requantize_encode4"}
    for key in ("codec_ns", "codec_ns_per_element"):
        assert found["host"][key].keys() == kernels
        assert all(value >= 0 for value in found["host"][key].values())
    source = found["source"]
    assert re.fullmatch(r"measured by twinbed-probe \(native kernels, .+, ready after \d+\.\d\d s\)", source)
    out = tmp_path / "out"
    done = run(
        str(ROOT / "run.py"),
        f"--config-dir={tmp_path}/mine",
        "target=sim",
        "cluster=here",
        "comm=zero3",
        f"hydra.run.dir={out}",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    result = read_record(out).result
    assert result["iteration_s"]["mean"] > 0
    assert result["experiment"]["cluster"]["host"]["op_measured_ns"]


@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_a_hugging_face_model_in_a_loop_of_its_own(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("torchrun")),
            "--nproc-per-node=2",
            "--standalone",
            str(ROOT / "examples" / "attach_gpt2.py"),
            "zeropp",
            "4",
        ],
        cwd=tmp_path,
        env=os.environ | {"RANKS_PER_NODE": "1", "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert "zeropp: rank 0 sent" in done.stdout


def test_predict_in_process() -> None:
    import twinbed

    record = twinbed.predict(["comm=hpz", "cluster=dgx2_v100", "model=gpt_18b", "recompute=full"])
    assert record.result["status"] == "ok"
    assert record.result["iteration_s"]["low"] < record.result["iteration_s"]["mean"]
    assert record.result["guessed_inputs"]


def test_the_simulator_imports_nothing_heavy() -> None:
    code = (
        "import sys, twinbed; from twinbed.sim.simulate import simulate; twinbed.predict;"
        "print([m for m in ('torch', 'pandas', 'matplotlib') if m in sys.modules])"
    )
    done = run("-c", code, cwd=Path("/"))
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.distributed
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("layout", "key"),
    [
        pytest.param(
            ("parallel.tensor=4", "parallel.tensor_mode=2d", "batch.micro=4"),
            "broadcast/row",
            marks=pytest.mark.long,
        ),
        (("parallel.pipeline=4", "batch.accumulation=4", "model.layers=4"), "send/pipeline"),
    ],
    ids=["2d", "pipeline"],
)
def test_a_layout_is_predicted_from_its_own_collectives(
    layout: tuple[str, ...], key: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    keys = (*SMALL, *layout, "cluster.shaped=false", f"hydra.run.dir={out}")
    done = run(str(ROOT / "run.py"), "comm=zero3", *keys, cwd=tmp_path, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "ledgers: equal; replayed decisions: equal" in done.stdout
    parity = json.loads((out / "parity.json").read_text())
    assert (parity["status"], parity["ledger_equal"], parity["replay_equal"]) == ("ok", True, True)
    host = read_record(out / "sim").result["experiment"]["cluster"]["host"]
    measured = {name.rpartition("/")[0] for name in host["op_measured_ns"]}
    assert key in measured
    assert len([name for name in host["op_ns"] if name.startswith(f"{key}/")]) == 2
    assert {"forward/embed", "forward/block.1", "backward/head", "step"} <= host["compute_ns"].keys()
