"""Experiments are typed and checked before anything starts; errors name key, value and the way out."""

import json
from pathlib import Path

import pytest

from twinbed.conf.compose import compose, load_experiment, to_dict
from twinbed.conf.model_spec import num_parameters


def test_defaults_are_zeropp_on_the_local_cluster() -> None:
    composed = compose()
    experiment = composed.experiment
    assert (experiment.comm.name, experiment.cluster.name, composed.spec.name) == (
        "zeropp",
        "local_2x2",
        "gpt_tiny",
    )
    assert experiment.batch.sequence == 128
    assert composed.warnings == ()


def test_a_resolved_experiment_comes_back_whole() -> None:
    composed = compose(["target=sim", "cluster=dgx2_v100", "model=gpt_18b", "comm=hpz"])
    assert to_dict(load_experiment(composed.resolved)) == composed.resolved
    assert json.loads(json.dumps(composed.resolved)) == composed.resolved


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["comm.zero_stge=2"], "zero_stge"),
        (["engine=magic"], "fsdp2"),
        (["comm=magic"], "zeropp"),
        (["steps=many"], "steps"),
        (["steps=0"], r"steps=0: must be >= 1"),
        (["cluster.nodes=-1"], r"cluster.nodes=-1: must be >= 1"),
        (["cluster.inter_node.bandwidth_Bps=0"], "cluster.inter_node.bandwidth_Bps=0.0: must be > 0"),
        (["parallel.data=3"], r"parallel.data=3 must be -1 or the number of ranks, 4"),
        (["batch.sequence=4096"], r"batch.sequence=4096 must be <= model.sequence=128"),
        (["batch.global_sequences=6"], r"batch.global_sequences=6 must be a multiple of"),
        (["batch.global_sequences=8", "batch.accumulation=3"], r"contradicts batch.global_sequences=8"),
        (["data.path=/no/such/file"], r"data.path='/no/such/file': no such file"),
        (["data=synthetic", "data.path=x"], "data.path='x' has no effect"),
        (["model=gpt"], "model.layers must be given"),
        (["model.heads=7"], "model.heads=7 must divide model.hidden=256"),
        (["model.vocab=100"], r"model.vocab=100 must be >= 256 with data=text"),
        (["model=hf"], "model.config_json must be given"),
        (["comm=deepspeed"], "comm.config_json must be given"),
        (["model=bert_large"], r"of family bert cannot be trained here \(target=both\)"),
        (["train.resume_from=/no/such"], "train.resume_from='/no/such': no such checkpoint folder"),
        (["optimizer.name=lion"], "optimizer.name='lion': must be one of"),
    ],
)
def test_bad_input_is_named(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compose(overrides)


def test_global_sequences_give_the_accumulation() -> None:
    assert compose(["batch.global_sequences=24", "batch.micro=2"]).experiment.batch.accumulation == 3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["comm=zero3", "comm.weight_bits=4"],
            "comm.weight_bits=4 has no effect without comm.zero_quantized_weights",
        ),
        (["comm=hpz", "comm.gradient_path=ring"], "comm.gradient_path=ring has no effect without"),
        (["comm=zero3", "comm.hpz_lifetime=step"], "comm.hpz_lifetime=step has no effect without hpZ"),
        (["optimizer.momentum=0.9"], "optimizer.momentum=0.9 has no effect without optimizer=sgd"),
        (["target=sim", "launch=slurm"], "launch=slurm has no effect without target=runtime or both"),
    ],
)
def test_keys_without_effect_are_said(overrides: list[str], message: str) -> None:
    assert any(warning.startswith(message) for warning in compose(overrides).warnings)


def test_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text("some text " * 200)
    monkeypatch.chdir(tmp_path)
    assert compose(["data.path=text.txt"]).experiment.data.path == str(tmp_path / "text.txt")


def test_few_steps_are_said() -> None:
    assert any("steps=2 is not more than warmup_steps=2" in w for w in compose(["steps=2"]).warnings)


def test_hugging_face_config(tmp_path: Path) -> None:
    config = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": 12,
        "n_embd": 768,
        "n_head": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    composed = compose(["target=sim", "model=hf", f"model.config_json={path}"])
    assert num_parameters(composed.spec) == 124_439_808


def test_a_mixture_of_experts_is_counted_and_refused(tmp_path: Path) -> None:
    config = {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_size": 100,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"[\d,]+ parameters, [\d,]+ active: expert parallelism"):
        compose(["target=sim", "model=hf", f"model.config_json={path}"])


def test_deepspeed_json(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 4,
                "gradient_clipping": 0.5,
                "bf16": {"enabled": True},
                "optimizer": {"type": "Adam", "params": {"lr": 3e-4}},
                "zero_optimization": {
                    "stage": 3,
                    "zero_quantized_weights": True,
                    "zero_hpz_partition_size": 2,
                    "zero_quantized_gradients": True,
                    "overlap_comm": True,
                },
            }
        )
    )
    composed = compose(["comm=deepspeed", f"comm.config_json={path}"])
    comm, batch = composed.experiment.comm, composed.experiment.batch
    assert (comm.zero_stage, comm.zero_quantized_weights, comm.zero_hpz_partition_size) == (3, True, 2)
    assert (batch.micro, batch.accumulation, composed.experiment.train.gradient_clipping) == (2, 4, 0.5)
    assert composed.experiment.optimizer.lr == pytest.approx(3e-4)
    assert any("overlap_comm" in warning for warning in composed.warnings)
