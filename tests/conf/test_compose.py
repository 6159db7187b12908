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
        (
            ["model=bert_large"],
            r"model.extra.head=pretraining of model=bert_large of family bert cannot be trained here \(target=both\): "
            "must be masked_lm",
        ),
        (["model=bert_tiny", "model.extra.head=pooled"], "model.extra.head=pooled .*must be masked_lm"),
        (["model=bert_tiny", "model.tied_embeddings=false"], "model.tied_embeddings=false .*must be true"),
        (["model=bert_tiny", "model.vocab=256"], "model.vocab=256 must be >= 257 with data=text.*the mask's"),
        (
            ["model=bert_tiny", "data=synthetic", "model.vocab=1"],
            "model.vocab=1 must be >= 2 with data=synthetic",
        ),
        (["model=llama_tiny", "model.hidden=40"], "gives heads of 5 with target=both: rotary .*must be even"),
        (["model=llama_tiny", "+model.extra.head=none"], "model.extra.head=none .* must be lm"),
        (["model=gpt_tiny", "model.family=gpt2"], r"of family gpt2 cannot be trained here \(target=both\)"),
        (["train.dropout=1"], r"train.dropout=1.0: must be in \[0, 1\)"),
        (["train.resume_from=/no/such"], "train.resume_from='/no/such': no such checkpoint folder"),
        (["optimizer.name=lion"], "optimizer.name='lion': must be one of"),
        (["optimizer=sgd", "optimizer.momentum=-1"], r"optimizer.momentum=-1.0: must be in \[0, 1\)"),
        (["optimizer=lars", "optimizer.momentum=9"], r"optimizer.momentum=9.0: must be in \[0, 1\)"),
        (
            ["+cluster.host.codec_ns.requantise_encode4=5"],
            "cluster.host.codec_ns='requantise_encode4': must be made of",
        ),
        (
            ["+cluster.host.codec_ns_per_element.encode4=-5"],
            "cluster.host.codec_ns_per_element.encode4=-5.0: must be >= 0",
        ),
        (["optimizer.eps=-1e-8"], r"optimizer.eps=-1e-08: must be >= 0"),
        (["optimizer.weight_decay=-0.1"], r"optimizer.weight_decay=-0.1: must be >= 0"),
        (["seed=9223372036854775808"], r"seed=9223372036854775808: must be in \[0, 9223372036854775807\]"),
        (["train.timeout_s=0.5"], r"train.timeout_s=0.5: must be in \[1, 86400\]"),
        (["train.timeout_s=1e30"], r"train.timeout_s=1e\+30: must be in \[1, 86400\]"),
        (["train.lr_min_fraction=1.5"], r"train.lr_min_fraction=1.5: must be in \[0, 1\]"),
        (["train.lr_min_fraction=-0.1"], r"train.lr_min_fraction=-0.1: must be in \[0, 1\]"),
        (["train.tokens=0"], r"train.tokens=0.0: must be > 0 or null"),
        (["cluster.device.price_per_hour=-1"], r"cluster.device.price_per_hour=-1.0: must be >= 0"),
        (["train.loss_scale=1e30"], r"train.loss_scale=1e\+30: must be in \[0, 16777216\]"),
        (["steps=10000001"], r"steps=10000001: must be <= 10000000"),
        (["model.layers=100001"], r"model.layers=100001: must be <= 100000"),
        (["batch.accumulation=100001"], r"batch.accumulation=100001: must be in \[1, 100000\]"),
        (
            ["target=sim", "cluster.nodes=1000000"],
            r"cluster.nodes \* devices_per_node='1000000 \* 2': must be <=",
        ),
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
        (
            ["optimizer=sgd", "optimizer.eps=1e-3"],
            "optimizer.eps=0.001 has no effect without optimizer=adamw",
        ),
        (
            ["optimizer=lars", "optimizer.betas=[0.8,0.99]"],
            "optimizer.betas=[0.8, 0.99] has no effect without",
        ),
        (
            ["optimizer=lamb", "optimizer.weight_decay=0", "optimizer.decay_in_ratio=false"],
            "optimizer.decay_in_ratio=False has no effect without optimizer=lamb and optimizer.weight_decay",
        ),
        (
            ["target=sim", "recompute=selective"],
            "recompute=selective has no effect without kernels.attention=unfused",
        ),
        (["target=sim", "launch=slurm"], "launch=slurm has no effect without target=runtime or both"),
        (
            ["target=sim", "cluster=leaf_spine_a100", "cluster.nodes=4"],
            "cluster.inter_node.oversubscription=2.0 has no effect without cluster.nodes > ",
        ),
        (["cluster.wan_Bps=1e9"], "cluster.wan_Bps=1000000000.0 has no effect without cluster.sites > 1"),
        (["cluster.nccl.channels=4"], "cluster.nccl.channels=4 has no effect without cluster.backend=nccl"),
        (
            ["parallel.pipeline_schedule=gpipe"],
            "parallel.pipeline_schedule=gpipe has no effect without engine=",
        ),
        (["goodput.checkpoint_s=5"], "goodput.checkpoint_s=5.0 has no effect without goodput.node_mtbf_h"),
        (
            ["cluster.device.price_per_hour=2"],
            "cluster.device.price_per_hour=2.0 has no effect without train.tokens",
        ),
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


GPT2 = {
    "model_type": "gpt2",
    "n_layer": 12,
    "n_embd": 768,
    "n_head": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}


def test_keys_beside_a_hugging_face_config(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT2))
    file = ["target=sim", "model=hf", f"model.config_json={path}"]
    whole, part = compose(file), compose([*file, "model.layers=4"])
    assert part.spec.layers == 4
    block = (num_parameters(whole.spec) - num_parameters(part.spec)) / 8
    assert block == 12 * 768**2 + 13 * 768  # of a GPT-2 block, by hand
    with pytest.raises(ValueError, match=r"model.hidden=64 with model.config_json='.*', which gives it"):
        compose([*file, "model.hidden=64"])
    with pytest.raises(ValueError, match=r"model.layers=0 with model.config_json="):
        compose([*file, "model.layers=0"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "cluster.inter_node.bandwidth=1",
            "legal keys of cluster.inter_node: links, bandwidth_Bps, latency_ns",
        ),
        ("bandwidth=1", "legal keys: target, cluster, model"),
        (
            "cluster.inter_node.bandwidth_Bps=200Gbit",
            r"cluster.inter_node.bandwidth_Bps is a number in bytes a second \(200 Gbit/s is 25e9\)",
        ),
        ("cluster.device.launch_ns=4us", "cluster.device.launch_ns is a number in nanoseconds"),
        ("offload.chunk_bytes=1e7", "offload.chunk_bytes is a whole number of bytes, all its digits written"),
        ("comm.gradient_bits=5", r"comm.gradient_bits is a list: comm.gradient_bits=\[A,B\]"),
        ("cluster.device.memory_bytes=80GB", r"memory_bytes is a number in bytes \(80 GB is 80e9\)"),
    ],
)
def test_what_hydra_refuses_is_told_with_the_way_out(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compose([override])


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
    assert not any("in place of" in warning for warning in composed.warnings)


def test_what_a_deepspeed_json_leaves_out_is_as_in_deepspeed(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 2}))
    composed = compose(["comm=deepspeed", f"comm.config_json={path}"])
    assert composed.experiment.comm.zero_stage == 0
    assert composed.experiment.precision.value == "fp32"
    said = [warning for warning in composed.warnings if "in place of" in warning]
    assert said == [
        f"{path}: comm.zero_stage=0 in place of 3: no zero_optimization.stage, which is 0 in DeepSpeed",
        f"{path}: precision=fp32 in place of bf16: neither fp16 nor bf16 is enabled, and DeepSpeed then trains in fp32",
    ]


def test_what_is_not_read_of_a_models_file_is_said(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
    config |= {"intermediate_size": 48, "vocab_size": 256, "max_position_embeddings": 16}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | {"rope_parameters": {"rope_theta": 500_000.0}}))
    keys = ["model=hf", f"model.config_json={path}"]
    assert any("rotary positions of base 10,000" in told for told in compose(keys).warnings)
    assert not any("rotary" in told for told in compose([*keys, "target=sim"]).warnings)
