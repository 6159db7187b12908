"""twinbed-import: files that Hydra loads, and one error without a trace of a file for what is wrong."""

import json
from pathlib import Path

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_module
from omegaconf import OmegaConf

from twinbed.conf.compose import CONFIG_NAME, Composed, from_hydra, register_schema
from twinbed.conf.importers.command import main
from twinbed.conf.model_spec import num_parameters
from twinbed.sim.predict import predict

GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_layer": 12,
    "n_embd": 768,
    "n_head": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def composed(folder: Path, *overrides: str) -> Composed:
    """As `twinbed --config-dir FOLDER OVERRIDES`."""
    register_schema()
    search = f"hydra.searchpath=[file://{folder.absolute()}]"
    with initialize_config_module(config_module="twinbed.conf", version_base="1.3"):
        return from_hydra(hydra_compose(CONFIG_NAME, overrides=["target=sim", search, *overrides]))


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_topology_becomes_a_cluster(here: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(data / "nvswitch_dump.xml"), "--name", "mine"]) == 0
    told = capsys.readouterr().out
    assert "wrote imported/cluster/mine.yaml" in told
    assert "use it: twinbed --config-dir imported target=sim cluster=mine" in told
    assert "guess: mlx5_bond_0: far from all GPUs, not counted" in told
    text = Path("imported/cluster/mine.yaml").read_text()
    assert f"Made by twinbed-import from {data / 'nvswitch_dump.xml'}" in text.replace("\n#  ", "")
    assert "links: 2 # nvswitch_dump.xml: lines 18 to 31" in text
    cluster = composed(Path("imported"), "cluster=mine").experiment.cluster
    assert (cluster.name, cluster.devices_per_node, cluster.nodes) == ("mine", 2, 2)
    assert cluster.device.name == "A100-SXM4-80GB"
    assert cluster.guesses["intra_node.bandwidth_Bps"] == [228e9, 240e9]
    assert "nvswitch_dump.xml (NCCL topology)" in cluster.source
    assert files(here) == ["imported/cluster/mine.yaml"]


def test_guesses_widen_a_prediction(here: Path, data: Path) -> None:
    assert main([str(data / "no_classes.xml"), "--name", "mine", "--nodes", "4"]) == 0
    result = predict(composed(Path("imported"), "cluster=mine", "steps=3")).result
    stats = result["iteration_s"]
    assert stats["low"] < stats["mean"] < stats["high"]
    guessed = {guess["key"]: guess for guess in result["guessed_inputs"]}
    assert guessed["cluster.device.flop_per_s"]["best"] == 989.4e12
    assert "cluster.inter_node.bandwidth_Bps" in guessed


def test_a_measured_key_is_no_guess_of_the_base_any_more(here: Path, data: Path) -> None:
    assert main([str(data / "all_reduce_8.txt"), "--base", "dgx_a100", "--name", "mine"]) == 0
    ours = composed(here, "cluster=dgx_a100").experiment.cluster
    mine = composed(Path("imported"), "cluster=mine").experiment.cluster
    assert "intra_node.bandwidth_Bps" in ours.guesses
    assert "intra_node.bandwidth_Bps" not in mine.guesses
    assert mine.intra_node.bandwidth_Bps == pytest.approx(231e9, rel=0.002)
    assert mine.intra_node.latency_ns == pytest.approx(3000, rel=0.002)
    assert mine.device == ours.device


def test_all_files_of_a_cluster_at_once_and_one_after_the_other(here: Path, data: Path) -> None:
    paths = [str(data / name) for name in ("all_gather_2x8.txt", "smi_nvswitch.txt", "all_reduce_8.txt")]
    assert main([*paths, "--name", "at_once"]) == 0
    assert main([paths[1], "--base", "dgx_a100", "--name", "wired"]) == 0
    assert main([paths[2], "--base", "wired", "--name", "measured"]) == 0
    assert main([paths[0], "--base", "measured", "--name", "turns"]) == 0
    at_once = composed(Path("imported"), "cluster=at_once").experiment.cluster
    turns = composed(Path("imported"), "cluster=turns").experiment.cluster
    assert at_once.intra_node.latency_ns == pytest.approx(3000, rel=0.002)
    assert at_once.inter_node.links == 8
    assert at_once.inter_node.node_Bps == pytest.approx(180e9, rel=0.002)
    # 61.6 us, less 14 hops of 3 us within nodes
    assert at_once.inter_node.latency_ns == pytest.approx(19_600, rel=0.02)
    for part in ("intra_node", "inter_node", "device", "nccl", "guesses"):
        assert getattr(at_once, part) == getattr(turns, part)


def test_a_model_is_readable_and_counted(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("small.json").write_text(json.dumps(GPT2))
    assert main(["small.json"]) == 0
    told = capsys.readouterr().out
    assert "gpt2, 124,439,808 parameters" in told
    assert "guess: no 'tie_word_embeddings' in the file: embeddings are tied" in told
    spec = composed(Path("imported"), "model=small").spec
    assert num_parameters(spec) == 124_439_808
    plain = OmegaConf.load("imported/model/small.yaml")
    assert plain == {
        "name": "small",
        "family": "gpt2",
        "layers": 12,
        "hidden": 768,
        "heads": 12,
        "kv_heads": 12,
        "ffn": 3072,
        "vocab": 50257,
        "sequence": 1024,
        "tied_embeddings": True,
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "llama", "attention_bias": True, "head_dim": 96, "tie_word_embeddings": False},
        {"model_type": "bert", "type_vocab_size": 3, "architectures": ["BertModel"]},
        {"model_type": "vit", "image_size": 32, "patch_size": 4, "num_channels": 3, "num_labels": 10},
        {"model_type": "opt", "ffn_dim": 512, "word_embed_proj_dim": 64, "enable_bias": False},
    ],
)
def test_what_single_families_have_is_kept(here: Path, changes: dict[str, object]) -> None:
    config = {
        "num_hidden_layers": 2,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "intermediate_size": 256,
        "vocab_size": 1000,
        "max_position_embeddings": 64,
        **changes,
    }
    Path("m.json").write_text(json.dumps(config))
    assert main(["m.json", "--name", "mine"]) == 0
    ours = composed(Path("imported"), "model=mine").spec
    theirs = composed(Path("imported"), "model=hf", "model.config_json=m.json").spec
    assert num_parameters(ours) == num_parameters(theirs)


def test_a_model_that_keys_cannot_say_is_read_from_its_config(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llama = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4}
    llama |= {"intermediate_size": 256, "vocab_size": 1000, "max_position_embeddings": 64}
    Path("odd.json").write_text(json.dumps(llama | {"head_dim": 96}))
    assert main(["odd.json"]) == 0
    assert "keys of ours cannot say head_size: each run reads the config itself" in capsys.readouterr().out
    spec = composed(Path("imported"), "model=odd").spec
    assert (spec.family, spec.head_dim) == ("llama", 96)
    Path("even.json").write_text(json.dumps(llama | {"head_dim": 32}))
    assert main(["even.json"]) == 0
    assert "cannot say" not in capsys.readouterr().out
    Path("moe.json").write_text(
        json.dumps(
            llama
            | {
                "model_type": "mixtral",
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "num_key_value_heads": 4,
            }
        )
    )
    assert main(["moe.json"]) == 1
    assert "moe.json: a mixture of experts" in capsys.readouterr().err


def test_names(here: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("gpt2-small.json").write_text(json.dumps(GPT2))
    assert main(["gpt2-small.json"]) == 0  # model=gpt2_small is ours and would win
    assert Path("imported/model/gpt2_small_imported.yaml").exists()
    assert main(["gpt2-small.json", "--name", "gpt2_small"]) == 1
    assert "--name gpt2_small: model=gpt2_small is one of ours" in capsys.readouterr().err
    assert main([str(data / "smi_pcie.txt"), "--name", "8 gpus"]) == 1
    assert "--name 8 gpus: must be letters" in capsys.readouterr().err


def test_a_file_is_replaced_only_when_told(
    here: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(data / "smi_nvswitch.txt"), "--name", "mine"]
    assert main(arguments) == 0
    before = Path("imported/cluster/mine.yaml").read_bytes()
    assert main([*arguments, "--nodes", "9"]) == 1
    assert "imported/cluster/mine.yaml exists; choose another --name" in capsys.readouterr().err
    assert Path("imported/cluster/mine.yaml").read_bytes() == before
    assert main([*arguments, "--nodes", "9", "--force"]) == 0
    assert composed(Path("imported"), "cluster=mine").experiment.cluster.nodes == 9


def test_a_file_of_another_gpu_than_the_base_is_said(
    here: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(data / "nvswitch_dump.xml"), "--base", "dgx_h100", "--name", "mine"]) == 0
    said = f"{data / 'nvswitch_dump.xml'} names GPUs as in dgx_a100 (sm 80); those of dgx_h100 are taken"
    assert f"guess: {said}" in capsys.readouterr().out
    assert said.split(" names")[1] in Path("imported/cluster/mine.yaml").read_text().replace("\n#  ", "")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "file.txt:1: the file is empty"),
        (b" \n\n", "file.txt:1: the file is empty"),
        (b"\x7fELF\n\x02\x01\x00\x00", "file.txt:2: holds a zero byte: this is a binary file"),
        (b"a\nb\n\xff\xd8\xff\xe0", "file.txt:3: byte 4 is not text: this is a binary file"),
        (b"hello\nworld\n", "file.txt:1: is none of what can be imported: NCCL topology XML"),
        (b"<system>\n<cpu>", "file.txt:2: the file is cut off: <cpu> of line 2 is never closed"),
        (
            b'{"model_type": "gpt2",\n "n_layer',
            "file.txt is cut off: a string opens and never closes at line 2",
        ),
        (b"[1, 2]", "file.txt must hold a JSON object"),
        (b'{"model_type": "gpt2"}', "file.txt: the key 'n_embd' (or 'hidden_size') is missing"),
        (
            b"\tGPU0\tGPU1\nGPU0\t X \tNV4\n",
            "file.txt:2: the matrix ends without row GPU1: the file is cut off",
        ),
    ],
)
def test_bad_files_leave_one_error_and_nothing_else(
    here: Path, capsys: pytest.CaptureFixture[str], content: bytes, message: str
) -> None:
    Path("file.txt").write_bytes(content)
    assert main(["file.txt", "--name", "mine"]) == 1
    out, err = capsys.readouterr()
    assert err.startswith(f"twinbed-import: {message}")
    assert err.count("\n") == 1
    assert out == ""
    assert files(here) == ["file.txt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.xml"], "nowhere.xml: No such file or directory"),
        (["."], ".: Is a directory"),
        (["DATA/graphs.xml"], "<graphs> holds the rings and trees"),
        (["DATA/four_cpus_ib.xml", "--base", "nope"], "--base nope: no such cluster; use one of"),
        (["DATA/four_cpus_ib.xml", "--base", "local_2x2"], "--base local_2x2: backend is gloo"),
        (["DATA/four_cpus_ib.xml", "--base", "mixed_v100_a100"], "--base mixed_v100_a100: its nodes differ"),
        (
            ["DATA/four_cpus_ib.xml", "--base", "two_sites_a100", "--nodes", "3"],
            "cluster.sites=2: must be a divisor",
        ),
        (["DATA/four_cpus_ib.xml", "DATA/smi_pcie.txt"], "two topologies describe one node"),
        (["DATA/four_cpus_ib.xml", "--ranks", "4"], "--ranks is for one table of nccl-tests, got 0"),
        (["DATA/all_reduce_8.txt", "--ranks", "4"], "--ranks 4 contradicts the file's own list of 8"),
        (["DATA/all_reduce_8.txt", "--op", "all_gather"], "busbw / algbw is 1.750, but 0.875 for all_gather"),
        (["model.json", "--base", "dgx_a100"], "--base has no effect: model.json is a model"),
        (["model.json", "DATA/smi_pcie.txt"], "model.json is a model; give it alone"),
        (["DATA/smi_pcie.txt", "--out", "model.json"], "cannot write model.json"),
    ],
)
def test_bad_arguments(
    here: Path, data: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    Path("model.json").write_text(json.dumps(GPT2))
    assert main([argument.replace("DATA", str(data)) for argument in arguments]) == 1
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert files(here) == ["model.json"]


def test_a_base_of_ones_own_that_is_broken(
    here: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("imported/cluster").mkdir(parents=True)
    Path("imported/cluster/mine.yaml").write_text("nodes: [1\n")
    assert main([str(data / "smi_pcie.txt"), "--base", "mine", "--name", "other"]) == 1
    err = capsys.readouterr().err
    assert "--base mine: cannot be read:" in err
    assert err.count("\n") == 1


def test_text_of_powershell(here: Path, data: Path) -> None:
    text = (data / "smi_nvswitch.txt").read_text()
    Path("topo.txt").write_bytes(b"\xff\xfe" + text.replace("\n", "\r\n").encode("utf-16-le"))
    assert main(["topo.txt"]) == 0
    assert composed(Path("imported"), "cluster=topo").experiment.cluster.devices_per_node == 8
