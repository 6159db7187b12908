"""DeepSpeed JSON into twinbed's keys: what is taken, what is left to twinbed, what is said to be ignored."""

import json
import re

import pytest

from twinbed.conf.deepspeed import DeepSpeedImport, read_deepspeed_config

ALL_THREE = {
    "stage": 3,
    "zero_quantized_weights": True,
    "zero_hpz_partition_size": 16,
    "zero_quantized_gradients": True,
}


def _said(result):
    """What the file spells out."""
    return {key: value for key, value in result.overrides.items() if key not in result.unsaid}


def _read(tmp_path, data):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(data))
    return read_deepspeed_config(path)


def test_a_whole_configuration_is_translated(tmp_path):
    data = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "zero_optimization": ALL_THREE | {"overlap_comm": True},
        "optimizer": {"type": "Adam", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 7, "warmup_max_lr": 3e-4}},
        "steps_per_print": 10,
    }
    assert _read(tmp_path, data) == DeepSpeedImport(
        overrides={
            "batch.micro": 2,
            "batch.accumulation": 4,
            "train.gradient_clipping": 0.5,
            "precision": "bf16",
            "comm.zero_stage": 3,
            "comm.zero_quantized_weights": True,
            "comm.zero_hpz_partition_size": 16,
            "comm.zero_quantized_gradients": True,
            "optimizer": "adamw",
            "optimizer.lr": 3e-4,
            "optimizer.betas": [0.9, 0.95],
            "optimizer.eps": 1e-8,
            "train.warmup_lr_steps": 7,
        },
        auto=(),
        ignored=("zero_optimization.overlap_comm", "scheduler.params.warmup_max_lr", "steps_per_print"),
    )


def test_auto_values_are_left_to_twinbed_and_listed(tmp_path):
    data = {
        "fp16": {"enabled": "auto", "loss_scale": 0},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "zero_optimization": {"stage": 2},
        "train_batch_size": "auto",
    }
    result = _read(tmp_path, data)
    assert result.overrides == {"comm.zero_stage": 2, "optimizer": "adamw"}
    assert result.auto == (
        "fp16.enabled",
        "bf16.enabled",
        "optimizer.params.lr",
        "optimizer.params.betas",
        "train_batch_size",
    )
    assert result.ignored == ("fp16.loss_scale",)


def test_every_leaf_is_taken_auto_or_ignored_and_never_two_of_them(tmp_path):
    data = {
        "zero_optimization": ALL_THREE | {"reduce_scatter": "auto", "sub_group_size": 1e9},
        "wall_clock_breakdown": 1,
    }
    result = _read(tmp_path, data)
    assert result.auto == ("zero_optimization.reduce_scatter",)
    assert result.ignored == ("zero_optimization.sub_group_size", "wall_clock_breakdown")
    assert len(_said(result)) == 4


@pytest.mark.parametrize("size", [0, 1])
def test_hpz_of_0_or_1_is_off(tmp_path, size):
    result = _read(tmp_path, {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": size}})
    assert result.overrides["comm.zero_hpz_partition_size"] == 1


def test_zeropp_keys_do_nothing_below_stage_3(tmp_path):
    result = _read(tmp_path, {"zero_optimization": ALL_THREE | {"stage": 2}})
    assert _said(result) == {"comm.zero_stage": 2}
    assert result.ignored == tuple(f"zero_optimization.{key}" for key in ALL_THREE if key != "stage")


def test_the_stage_defaults_to_0_as_in_deepspeed(tmp_path):
    for data in ({"zero_optimization": {}}, {"zero_optimization": None}, {}):
        result = _read(tmp_path, data)
        assert result.overrides == {"comm.zero_stage": 0, "precision": "fp32"}
        assert set(result.unsaid) == {"comm.zero_stage", "precision"}
    assert _read(tmp_path, {"zero_optimization": "auto", "bf16": "auto"}).overrides == {}
    assert _read(tmp_path, {"zero_optimization": {"stage": 0}}).unsaid.keys() == {"precision"}


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"fp16": {"enabled": True, "loss_scale": 128}}, {"precision": "fp16", "train.loss_scale": 128.0}),
        ({"bfloat16": {"enabled": True}}, {"precision": "bf16"}),
        ({"fp16": {"enabled": False}}, {"precision": "fp32"}),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": "auto"}}, {}),
    ],
)
def test_precision(tmp_path, data, expected):
    assert _said(_read(tmp_path, data)) == expected


def test_the_global_batch_gives_the_accumulation_unless_both_parts_are_there(tmp_path):
    data = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}
    assert _said(_read(tmp_path, data)) == {"batch.micro": 4, "batch.global_sequences": 64}
    whole = _read(tmp_path, data | {"gradient_accumulation_steps": 2})
    assert _said(whole) == {"batch.micro": 4, "batch.accumulation": 2}
    assert whole.ignored == ("train_batch_size",)


def test_lamb_keeps_its_own_parameters(tmp_path):
    params = {
        "lr": 11e-3,
        "weight_decay": 0.01,
        "bias_correction": False,
        "max_coeff": 0.3,
        "min_coeff": 0.01,
    }
    result = _read(tmp_path, {"optimizer": {"type": "Lamb", "params": params}})
    assert _said(result) == {"optimizer": "lamb"} | {
        f"optimizer.{key}": value for key, value in params.items()
    }
    assert result.ignored == ()


def test_a_linear_decay_is_taken_and_an_unknown_scheduler_ignored(tmp_path):
    decay = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 5, "total_num_steps": 50}}
    result = _read(tmp_path, {"scheduler": decay})
    assert _said(result) == {
        "train.lr_schedule": "linear",
        "train.lr_min_fraction": 0.0,
        "train.warmup_lr_steps": 5,
    }
    unknown = _read(tmp_path, {"scheduler": {"type": "OneCycle"}})
    assert (_said(unknown), unknown.ignored) == ({}, ("scheduler.type",))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"zero_optimization": {"stage": 4}},
            "'zero_optimization.stage' must be a whole number from 0 to 3, got 4",
        ),
        ({"zero_optimization": {"stage": "3"}}, "got the string '3'"),
        ({"zero_optimization": {"stage": True}}, "got the boolean true"),
        ({"zero_optimization": True}, "'zero_optimization' must be an object {...}, got the boolean true"),
        (
            {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": -8}},
            "'zero_optimization.zero_hpz_partition_size' must be a whole number >= 0, got -8",
        ),
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_weights": "yes"}},
            "'zero_optimization.zero_quantized_weights' must be true or false"
            " (or \"auto\"), got the string 'yes'",
        ),
        (
            {"gradient_accumulation_steps": 0},
            "'gradient_accumulation_steps' must be a whole number >= 1, got 0",
        ),
        (
            {"train_micro_batch_size_per_gpu": 1.5},
            'must be a whole number >= 1 (or "auto"), got the number 1.5',
        ),
        (
            {"gradient_clipping": -1},
            "'gradient_clipping' must be a number >= 0 (or \"auto\"), got the number -1",
        ),
        ({"gradient_clipping": float("nan")}, "'gradient_clipping' must be a number >= 0"),
        (
            {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
            "'bf16.enabled' and 'fp16.enabled' are both true",
        ),
        (
            {"optimizer": {"type": "Lion"}},
            "'optimizer.type' 'Lion' is not supported; use one of Adam, AdamW, Lamb, SGD",
        ),
        ({"optimizer": {"params": {}}}, "'optimizer.type' is missing; it must be one of Adam"),
        (
            {"optimizer": {"type": "Adam", "params": {"lr": "fast"}}},
            "'optimizer.params.lr' must be a number >= 0",
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}},
            "must be a list of two numbers in [0, 1)",
        ),
        ({"optimizer": {"type": "Adam", "params": {"betas": [0.9, 1]}}}, "got the number 1 in it"),
        (
            {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}},
            "'optimizer.params.adam_w_mode' is false",
        ),
        (
            {"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
            "'train_batch_size' (30) must be a multiple of train_micro_batch_size_per_gpu x"
            " gradient_accumulation_steps (4 x 2)",
        ),
        ([1], "must hold a JSON object {...} as a DeepSpeed configuration does, got a list"),
    ],
)
def test_bad_values_name_file_key_and_what_is_legal(tmp_path, data, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        _read(tmp_path, data)
    assert str(tmp_path / "ds.json") in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="does not exist; give the path of a DeepSpeed configuration"):
        read_deepspeed_config(tmp_path / "ds.json")


def test_sizes_of_stage_3_become_keys_of_the_engine(tmp_path):
    sizes = {
        "stage3_prefetch_bucket_size": 5e7,
        "stage3_max_live_parameters": 2_000_000_000,
        "stage3_max_reuse_distance": "auto",
        "reduce_bucket_size": 10_000_000,
    }
    result = _read(tmp_path, {"zero_optimization": {"stage": 3} | sizes})
    assert _said(result) == {
        "comm.zero_stage": 3,
        "deepspeed.stage3_prefetch_bucket_size": 50_000_000,
        "deepspeed.stage3_max_live_parameters": 2_000_000_000,
        "deepspeed.reduce_bucket_size": 10_000_000,
    }
    assert result.auto == ("zero_optimization.stage3_max_reuse_distance",)
    assert result.ignored == ()
    with pytest.raises(ValueError, match=r"reduce_bucket_size' must be a whole number >= 0.*got 1.5"):
        _read(tmp_path, {"zero_optimization": {"stage": 3, "reduce_bucket_size": 1.5}})


def test_a_file_without_any_key_of_deepspeed_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"ds.json holds no key of DeepSpeed, only 'model_type', 'n_layer'"):
        _read(tmp_path, {"model_type": "gpt2", "n_layer": 12})
    assert _read(tmp_path, {"steps_per_print": 10}).ignored == ("steps_per_print",)


@pytest.mark.parametrize(
    ("zero", "typed"),
    [
        ({"offload_optimizer": {"device": "cpu"}}, "offload=cpu offload.parameters=0"),
        ({"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}, "offload=cpu"),
        ({"offload_param": {"device": "nvme"}}, "offload=disk offload.optimizer=0"),
        ({"offload_optimizer": {"device": "none"}}, ""),
        ({"offload_optimizer": None}, ""),
        ({}, ""),
    ],
)
def test_offload_is_not_followed_but_said(tmp_path, zero, typed):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3, **zero}}))
    assert read_deepspeed_config(path).offload == typed
