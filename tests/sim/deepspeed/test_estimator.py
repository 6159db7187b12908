"""DeepSpeed's estimate of model states."""

import json

import pytest

from twinbed.sim.deepspeed.estimator import estimate_zero3, main

GIB = 2**30


@pytest.mark.parametrize(
    ("optimizer", "weights", "gib"), [(True, True, 0.12), (True, False, 0.79), (False, False, 6.10)]
)
def test_deepspeeds_estimator(optimizer, weights, gib):
    nbytes = estimate_zero3(
        2_851_598_336, 32_899_072, ranks=8, offload_optimizer=optimizer, offload_parameters=weights
    )
    assert round(nbytes / GIB, 2) == gib


def test_weights_are_not_offloaded_alone():
    with pytest.raises(ValueError, match="offload_optimizer=True"):
        estimate_zero3(1_000, 10, ranks=1, offload_parameters=True)


def test_the_command_reads_a_hugging_face_config(tmp_path, capsys):
    """GPT-2 small: 124,439,808 parameters, of which the words are 50257 x 768."""
    config = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | {"n_positions": 1024, "architectures": ["GPT2LMHeadModel"]}))
    main([str(path), "--gpus", "8"])
    shown = capsys.readouterr().out
    words = 50257 * 768
    assert f"124,439,808 parameters, the largest layer {words:,}, 8 GPUs" in shown
    assert f"{(4 * words + 18 * 124_439_808 / 8) / GIB:.2f} GiB  nothing in host memory" in shown


@pytest.mark.parametrize(("gpus", "said"), [("0", "--gpus must be >= 1, got 0"), ("8", "missing.json")])
def test_bad_input_is_named(tmp_path, capsys, gpus, said):
    with pytest.raises(SystemExit):
        main([str(tmp_path / "missing.json"), "--gpus", gpus])
    assert said in capsys.readouterr().err
