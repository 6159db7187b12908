"""`twinbed.runtime.parallelize`: scripts for one process, on several ranks."""

import difflib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from twinbed.conf.model_spec import ModelSpec
from twinbed.runtime import parallelize
from twinbed.runtime.parallel import read_config
from twinbed.runtime.stack import build_model

transformers = pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parents[3] / "examples"
SCRIPTS = ("gpt2", "llama", "plain")
SIZES = ["--steps", "3", "--tokens", "32"]
QUANTIZED = "zeropp 1d"


def train(name: str) -> Callable[[list[str]], list[float]]:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[[list[str]], list[float]] = module.train
    return found


@pytest.mark.parametrize("name", SCRIPTS)
def test_at_most_five_lines_differ(name):
    before, after = (
        (EXAMPLES / f"train_{name}{kind}.py").read_text(encoding="utf-8").splitlines()
        for kind in ("", "_parallel")
    )
    changes = [line for line in difflib.ndiff(before, after) if line[2:].strip()]
    assert 3 <= sum(line.startswith("+ ") for line in changes) <= 5
    assert sum(line.startswith("- ") for line in changes) <= 5


@pytest.mark.timeout(600)  # of a busy machine
@pytest.mark.distributed
@pytest.mark.parametrize(
    "name", ["plain", *(pytest.param(name, marks=pytest.mark.long) for name in ("gpt2", "llama"))]
)
def test_an_example_keeps_its_losses(launch, name):
    before = train(f"train_{name}")(SIZES)
    for layouts in launch("ranks_parallelize", name, 4, timeout_s=560):
        assert len(layouts) == 10
        for layout, losses in layouts.items():
            tolerance = 5e-3 if layout == QUANTIZED else 1e-5
            assert losses == pytest.approx(before, rel=tolerance), layout
        assert layouts[QUANTIZED] != pytest.approx(before, rel=1e-5), "it was not quantized"


def _check(details: dict[str, Any]) -> None:
    for case, found in details.items():
        assert found["losses parallel"] == pytest.approx(found["losses alone"], rel=1e-5), case
        for what in ("gradient", "weights"):
            name, error = found[what]
            assert error < 1e-5, (case, what, name)
        assert abs(found["norm"]) < 1e-5, case
        assert found["eval"] < 1e-5, case


@pytest.mark.timeout(600)  # of a busy machine
@pytest.mark.distributed
def test_gradients_and_weights_are_those_of_one_process(launch):
    for found in launch("ranks_parallelize", "details", 4, timeout_s=560):
        assert len(found) == 16
        _check(found)


@pytest.mark.timeout(600)  # of a busy machine
@pytest.mark.distributed
def test_pipelines_run_forward_and_backward_in_one_call(launch):
    for found in launch("ranks_parallelize", "pipelines", 4, timeout_s=560):
        assert "call loss = model.forward_backward(...) in place of" in found.pop("forward")
        assert len(found) == 5
        for case, run in found.items():
            assert run["losses parallel"] == pytest.approx(run["losses alone"], rel=1e-5), case
            for what in ("gradient", "weights"):
                name, error = run[what]
                assert error < 1e-5, (case, what, name)
            assert run["norm"] < 1e-5, case
            assert run["parts"] < 0.6, "a stage has its own blocks only"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(600)  # of a busy machine
@pytest.mark.distributed
def test_gradients_and_weights_with_eight_ranks(launch):
    for found in launch("ranks_parallelize", "eight", 8, timeout_s=560):
        assert len(found) == 4
        _check(found)


@pytest.mark.timeout(600)  # of a busy machine
@pytest.mark.distributed
def test_own_models_dropout_and_what_is_sent(launch):
    found = launch("ranks_parallelize", "rest", 4, timeout_s=560)
    for rank in found:
        for case, (loss, (name, error)) in rank["own"].items():
            assert loss < 1e-5, case
            assert error < 1e-5, (case, name)
        dropped = rank["dropped"]
        one, two, three, other = (dropped[key] for key in dropped if isinstance(dropped[key], list))
        assert one == pytest.approx(two, rel=1e-5)
        assert one == pytest.approx(three, rel=1e-5)
        assert one != pytest.approx(other, rel=1e-4), "another seed drops others"
        assert one[0] != pytest.approx(one[1], rel=1e-4), "each forward drops others"
        assert len({round(value, 4) for key, value in dropped.items() if key.endswith("eval")}) == 1
        assert "different batches" in dropped["different"]
        assert rank["recomputed"]["error"] < 1e-5
        assert rank["recomputed"]["more"] > 0
    ledgers = [rank["ledgers"] for rank in found]
    # Matrices are cut in two, and all is then shared out over two replicas; norms and some biases both halves have.
    whole = ledgers[0]["whole"]
    assert whole < sum(ledger["parts"] for ledger in ledgers) < 1.1 * whole
    for ledger in ledgers:
        assert {row[0] for row in ledger["rows"]} == {0, 1}
        forward = [row[2:] for row in ledger["rows"] if row[:2] == (0, "forward")]
        assert forward[:4] == [
            ("root", "all_gather", "replicas"),
            ("root.transformer.wte", "all_reduce", "tensor"),
            ("block.0", "all_gather", "replicas"),
            ("block.0.attn.c_proj", "all_reduce", "tensor"),
        ]
        assert forward[-1] == ("", "all_reduce", "replicas")  # the loss of the batch
        assert (1, "backward", "root", "reduce_scatter", "replicas") in ledger["rows"]


@pytest.mark.timeout(600)  # of a busy machine
@pytest.mark.distributed
def test_torchrun_writes_weights_that_the_class_loads(tmp_path):
    """The process group and the nodes come from torchrun."""
    before, after = tmp_path / "before.pt", tmp_path / "after.pt"
    train("train_gpt2")([*SIZES, "--save", str(before)])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    command += [str(EXAMPLES / "train_gpt2_parallel.py"), *SIZES, "--save", str(after)]
    command += ["--parallel", "tensor=2 sequence=2"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.count("step 0: loss") == 1, "one rank tells"
    expected, found = torch.load(before), torch.load(after)
    assert found.keys() == expected.keys()
    for name, whole in expected.items():
        torch.testing.assert_close(found[name], whole, rtol=0, atol=2e-4, msg=name)


# ---- what is refused, by name, before anything is started


def gpt2(**settings: Any) -> Any:
    sizes = {"n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 64, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**(sizes | settings)))


def llama(kind: str = "Llama", **settings: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 16}
    config = getattr(transformers, f"{kind}Config")(**(sizes | settings))
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def own() -> nn.Module:
    return build_model(
        ModelSpec(
            name="own",
            family="gpt",
            layers=1,
            hidden=32,
            heads=4,
            kv_heads=4,
            ffn=64,
            vocab=64,
            sequence=16,
            tied_embeddings=False,
            head="lm",
        ),
        seed=0,
    )


def with_adapter() -> Any:
    model = gpt2()
    model.transformer.h[0].mlp.adapter = nn.Linear(32, 4)
    return model


def with_hook() -> Any:
    model = gpt2()
    model.transformer.h[0].mlp.register_forward_hook(lambda *_: None)
    return model


def with_other_loss() -> Any:
    model = llama()
    model.loss_function = nn.functional.cross_entropy
    return model


def with_other_mlp() -> Any:
    class Mlp(type(gpt2().transformer.h[0].mlp)):  # type: ignore[misc]
        pass

    model = gpt2()
    model.transformer.h[0].mlp.__class__ = Mlp
    return model


class Derived(transformers.GPT2LMHeadModel):  # type: ignore[misc, name-defined]
    pass


@pytest.mark.parametrize(
    ("make", "config", "said"),
    [
        (
            lambda: nn.Linear(2, 2),
            "",
            r"torch\.nn\.modules\.linear\.Linear is not known: .*GPT2LMHeadModel, Llama",
        ),
        (lambda: Derived(gpt2().config), "", r"Derived is not known: .* exactly GPT2LMHeadModel"),
        (with_adapter, "", r"transformer\.h\.0\.mlp\.adapter \(Linear\) has the parameter .*adapter\.weight"),
        (with_other_mlp, "", r"transformer\.h\.0\.mlp is a .*Mlp; parallelize knows what a GPT2MLP does"),
        (with_hook, "", r"transformer\.h\.0\.mlp has the hook"),
        (with_other_loss, "", r"loss_function was replaced"),
        (lambda: gpt2(attn_pdrop=0.1), "", r"config\.attn_pdrop=0\.1: must be 0\.0"),
        (lambda: gpt2(reorder_and_upcast_attn=True), "", r"reorder_and_upcast_attn=True: must be False"),
        (lambda: gpt2(add_cross_attention=True), "", r"'add_cross_attention' is true"),
        (lambda: llama(attention_dropout=0.1), "", r"attention_dropout=0\.1: must be 0\.0"),
        (lambda: llama(pad_token_id=0), "", r"pad_token_id=0: .* set it to None"),
        (
            lambda: llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            "",
            r"\['rope_type'\]='dynamic'",
        ),
        (
            lambda: llama("Qwen2", use_sliding_window=True, max_window_layers=0, sliding_window=4),
            "",
            r"layer_types=\['sliding_attention'\]: must be \['full_attention'\]",
        ),
        (own, "tensr=2", r"there is no key tensr; legal are parallel\.data"),
        (own, "tensor=two", r"parallel\.tensor: Value 'two'"),
        (own, "comm=zero9", r"comm='zero9' is unknown; use one of \['ddp'"),
        (own, "comm.weight_bits=5", r"comm\.weight_bits=5: must be one of \[2, 4, 6, 8\]"),
        (own, "tensor 2", r"'tensor' in 'tensor 2' is no override"),
        (own, "nowhere.yaml", r"nowhere\.yaml cannot be read"),
        (own, {"batch": {"accumulation": 0}}, r"batch\.accumulation=0 must be >= 1"),
        (own, {"seed": "x"}, r"seed='x' must be a whole number"),
        (own, 4, r"config=4 must be a mapping"),
        (own, "tensor=2", r"parallel\.tensor=2 .*is 2, which must divide the 1 ranks"),
        (
            own,
            "tensor=3 tensor_mode=2d",
            r"parallel\.tensor=3 with parallel\.tensor_mode=2d must be a square",
        ),
        (own, "comm=zeropp comm.overlap=true", r"comm\.overlap=true"),
        (own, "pipeline=2", r"parallel\.pipeline=2 is 2, which must divide the 1 ranks"),
    ],
)
def test_refused_by_name(make, config, said):
    with pytest.raises(ValueError, match=said):
        parallelize(make(), config)
    assert not torch.distributed.is_initialized()


@pytest.fixture
def alone():
    """Models that are parallel over one rank; the process group that this made is let go."""
    yield lambda model: parallelize(model, "")
    torch.distributed.destroy_process_group()


def test_calls_that_are_refused(alone):
    ids = torch.randint(0, 64, (2, 8))
    padded = torch.ones_like(ids)
    padded[1, 6:] = 0
    model = alone(gpt2())
    calls: list[tuple[dict[str, Any], str]] = [
        ({"input_ids": ids}, r"needs labels of the shape of input_ids, \[2, 8\]"),
        ({"labels": ids}, r"needs input_ids \[sequences, tokens\], got None"),
        ({"input_ids": ids, "labels": ids[:, 1:]}, r"got a tensor \[2, 7\]"),
        ({"input_ids": ids, "labels": ids, "attention_mask": padded}, "has 2 entries other than 1"),
        ({"input_ids": ids, "labels": ids, "use_cache": True}, "use_cache="),
        ({"input_ids": ids, "labels": ids, "position_ids": ids}, "position_ids="),
        ({"input_ids": ids + 60, "labels": ids}, "an input is .*: must be from 0 to 63"),
        ({"input_ids": ids, "labels": ids - 64}, "a label is -.*from 0 to 63, .*or -100"),
        ({"input_ids": ids[:0], "labels": ids[:0]}, "a batch has no sequence"),
        ({"input_ids": ids.repeat(1, 3), "labels": ids.repeat(1, 3)}, r"24 tokens: .*n_positions=16"),
    ]
    for given, said in calls:
        with pytest.raises(ValueError, match=said):
            model(**given)
    loss = model(ids, labels=ids, attention_mask=torch.ones_like(ids), use_cache=False).loss
    assert loss.requires_grad
    once = model.forward_backward(ids, labels=ids)
    assert not once.requires_grad
    assert once.item() == pytest.approx(loss.item(), rel=0.01)  # other dropouts
    assert all(each.grad is not None for each in model.parameters())
    for call in (model.generate, model.state_dict, model.load_state_dict):
        with pytest.raises(RuntimeError, match=f"{call.__name__}"):
            call(ids)


def test_one_process_is_plain(alone):
    """Nothing is sent, and a model of ours is still called as before."""
    torch.manual_seed(0)
    ids = torch.randint(0, 64, (2, 8))
    expected = own()(ids, ids)
    model = alone(own())
    assert torch.equal(model(ids, ids), expected)
    with pytest.raises(ValueError, match="GPT is called with"):
        model(ids)
    model(ids, ids).backward()
    assert not model.ledger.rows
    assert list(model.full_state_dict()) == list(dict(own().named_parameters()))
    assert [name for name, _ in model.named_parameters()] == list(dict(own().named_parameters()))


def test_random_numbers_of_the_script_stay_as_they_are(alone):
    for model in (gpt2(), llama(), own()):
        before = torch.get_rng_state()
        alone(model)
        assert torch.equal(torch.get_rng_state(), before), type(model)


def test_a_config_may_be_text_a_mapping_or_a_file(tmp_path):
    path = tmp_path / "parallel.yaml"
    path.write_text("tensor: 4\ntensor_mode: 2d\ncomm: zero3\nseed: 3\n", encoding="utf-8")
    nested = {"parallel": {"tensor": 4, "tensor_mode": "2d"}, "comm": {"name": "zero3"}, "seed": 3}
    text = "parallel.tensor=4 tensor_mode=2d comm=zero3 seed=3"
    flat = {"tensor": 4, "tensor_mode": "2d", "comm": "zero3", "seed": 3}
    read = [read_config(config) for config in (path, str(path), nested, text, flat)]
    assert all(each == read[0] for each in read)
    assert (read[0].parallel.tensor, read[0].parallel.tensor_mode, read[0].comm.zero_stage) == (4, "2d", 3)
    assert read[0].seed == 3
    assert read_config({"comm.weight_bits": 4, "comm": "zeropp"}).comm.weight_bits == 4
    assert read_config("").comm.name == "ddp"
