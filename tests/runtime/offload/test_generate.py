"""Generation with layers streamed: the tokens of the whole model, whatever lies on disk."""

import dataclasses
import json
import os
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp

from twinbed.conf.model_spec import spec_from_keys
from twinbed.conf.schema import OffloadConf, OffloadKind
from twinbed.runtime.checkpoint import find_checkpoint
from twinbed.runtime.model import GPT, Past
from twinbed.runtime.offload.command import main
from twinbed.runtime.offload.generate import Generator, import_weights, unit_layouts
from twinbed.runtime.offload.header import DamagedError, lay_out
from twinbed.runtime.offload.manifest import MANIFEST, StoreError
from twinbed.runtime.offload.region import Region
from twinbed.runtime.offload.store import Store

SPEC = spec_from_keys(
    {
        "family": "gpt",
        "layers": 4,
        "hidden": 32,
        "heads": 4,
        "kv_heads": 2,
        "vocab": 300,
        "sequence": 24,
    }
)
PROMPT = b"to be"
LARGEST = max(layout.nbytes for layout in unit_layouts(SPEC).values())
CONFS = {
    "none": OffloadConf(),
    "disk": OffloadConf(name="disk"),
    "half": OffloadConf(name="disk", parameters=0.5),
    "no prefetch": OffloadConf(name="disk", prefetch=0),
    "auto": OffloadConf(name="disk", policy=OffloadKind.auto, memory_bytes=4 * LARGEST, prefetch=2),
}

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def model():
    made = GPT(SPEC, seed=3)
    with torch.no_grad():  # initial weights are small: every token would be the same
        for parameter in made.parameters():
            parameter.mul_(12)
    return made


@pytest.fixture
def checkpoint(model, tmp_path):
    folder = tmp_path / "checkpoints/step_00000007"
    dcp.save({"model": dict(model.named_parameters())}, checkpoint_id=folder, no_dist=True)
    manifest = {
        "version": 2,
        "step": 7,
        "loss_scale": None,
        "model": dataclasses.asdict(SPEC),
        "optimizer": "adamw",
        "placement": "sharded",
        "files": {},
    }
    (folder / "twinbed.json").write_text(json.dumps(manifest))
    return find_checkpoint(tmp_path)


@pytest.fixture
def store(checkpoint, tmp_path):
    made = import_weights(checkpoint, SPEC, tmp_path / "weights")
    yield made
    made.close()


@torch.no_grad()
def whole_model(model, num_tokens):
    """Greedy, without anything kept from token to token."""
    tokens = list(PROMPT)
    for _ in range(num_tokens):
        x = model.embed(torch.tensor([tokens]))
        for block in model.blocks:
            x = block(x)
        tokens.append(int(model.logits(x)[0, -1].argmax()))
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize("name", list(CONFS))
def test_streamed_layers_give_the_tokens_of_the_whole_model(model, store, name):
    found = Generator(SPEC, store, CONFS[name]).generate(PROMPT, 15)
    assert found == whole_model(model, 15)
    assert len(set(found)) > 3


def test_draws_are_the_same_for_one_seed(store):
    draws = [
        Generator(SPEC, store, CONFS[name]).generate(PROMPT, 15, temperature=5.0, seed=seed)
        for name, seed in (("none", 1), ("disk", 1), ("disk", 2))
    ]
    assert draws[0] == draws[1] != draws[2]


def test_every_token_uses_every_unit_and_the_root_twice(store):
    generator = Generator(SPEC, store, CONFS["disk"])
    generator.generate(PROMPT, 3)
    said = [event for event, _ in generator.decisions]
    begins = [i for i, event in enumerate(said) if type(event).__name__ == "IterationBegins"]
    assert len(begins) == 3
    needed = [e.chunk for e in said[begins[1] : begins[2]] if type(e).__name__ == "ChunkNeeded"]
    units = ["root", "block.0", "block.1", "block.2", "block.3", "root"]
    assert needed == [f"parameters/{unit}" for unit in units]


def test_weights_are_imported_once_and_belong_to_their_checkpoint(checkpoint, store, tmp_path):
    store.close()
    again = import_weights(checkpoint, SPEC, tmp_path / "weights")
    assert Generator(SPEC, again, CONFS["disk"]).generate(PROMPT, 2)
    again.close()
    other = import_weights(dataclasses.replace(checkpoint, step=8), SPEC, tmp_path / "weights")
    assert other.committed.notes == {"step": 8}
    other.close()


def test_weights_follow_a_checkpoint_that_is_moved_or_written_again(checkpoint, tmp_path):
    files = {path.name: path.stat().st_size for path in checkpoint.folder.iterdir() if path.is_file()}
    known, folder = dataclasses.replace(checkpoint, files=files), tmp_path / "own"
    import_weights(known, SPEC, folder).close()
    written_ns = (folder / MANIFEST).stat().st_mtime_ns
    moved = tmp_path / "moved"
    shutil.copytree(checkpoint.folder, moved)  # with times, as a move has it
    import_weights(dataclasses.replace(known, folder=moved), SPEC, folder).close()
    assert (folder / MANIFEST).stat().st_mtime_ns == written_ns
    (folder / "notes.txt").write_text("of the user")
    os.utime(moved / next(iter(files)))  # trained again
    reader = import_weights(known, SPEC, folder)
    with pytest.raises(StoreError, match="in use"):
        import_weights(dataclasses.replace(known, folder=moved), SPEC, folder)
    reader.close()
    import_weights(dataclasses.replace(known, folder=moved), SPEC, folder).close()
    assert (folder / MANIFEST).stat().st_mtime_ns > written_ns
    assert (folder / "notes.txt").read_text() == "of the user"


def test_the_store_of_a_training_is_not_replaced(checkpoint, tmp_path):
    layout = lay_out({"x": (torch.float32, (4,))})
    training = Store.create(tmp_path / "states", {"x": layout}, {"model": {}, "rank": 0})
    training.write("x", Region(layout)).result()
    training.commit({})
    training.close()
    with pytest.raises(StoreError, match="store of a training"):
        import_weights(checkpoint, SPEC, tmp_path / "states")


def test_who_reads_shares_and_who_writes_does_not(checkpoint, store, tmp_path):
    with pytest.raises(StoreError, match="in use by another run"):
        import_weights(checkpoint, SPEC, tmp_path / "weights")
    store.close()
    readers = [import_weights(checkpoint, SPEC, tmp_path / "weights") for _ in range(2)]
    for reader in readers:
        reader.close()


def test_damaged_weights_are_named(checkpoint, store, tmp_path):
    store.close()
    path = tmp_path / "weights/parameters.block.2.0.safetensors"
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedError, match=r"1 of 5 files .*parameters\.block\.2\.0.*blocks\.2\."):
        import_weights(checkpoint, SPEC, tmp_path / "weights")


@pytest.mark.parametrize(
    ("prompt", "num_tokens", "said"),
    [
        ([], 3, "at least one"),
        ([300], 3, r"tokens in \[0, 300\)"),
        ([1] * 20, 5, "20 tokens of a prompt and 5 to add are more than the 24 positions"),
    ],
)
def test_what_cannot_be_gone_on_with_is_refused(store, prompt, num_tokens, said):
    with pytest.raises(ValueError, match=said):
        Generator(SPEC, store, CONFS["disk"]).generate(prompt, num_tokens)


def test_several_tokens_come_only_first():
    past = Past(batch=1, num_key_heads=1, head_size=2, max_tokens=4)
    one, two = torch.ones(1, 1, 1, 2), torch.ones(1, 1, 2, 2)
    past.with_more(two, two)
    past.with_more(one, one)
    with pytest.raises(ValueError, match="2 tokens after 3"):
        past.with_more(two, two)


def test_the_command_writes_text(checkpoint, tmp_path, capsys):
    arguments = [str(tmp_path), "--prompt", "to be", "--tokens", "4"]
    assert main(arguments) == 0
    streamed = capsys.readouterr().out
    assert streamed.startswith("to be")
    assert main([*arguments, "--offload", "none"]) == 0
    assert capsys.readouterr().out == streamed
    assert (checkpoint.folder / "weights").is_dir()


def test_the_command_says_what_is_wrong(checkpoint, tmp_path, capsys):
    assert main([str(tmp_path / "nothing")]) == 1
    assert "twinbed-generate: CHECKPOINT=" in capsys.readouterr().err
    for more in (["--temperature", "nan"], ["--memory-bytes", "1e9", "--offload", "none"]):
        assert main([str(tmp_path), *more]) == 1
        assert more[0] in capsys.readouterr().err
    for more in (["--tokens", "0"], ["--prompt", ""], ["--memory-bytes", "1e3"], ["--store", "/proc/x"]):
        assert main([str(tmp_path), *more]) == 1
        told = capsys.readouterr().err
        assert more[0] in told
        assert "offload." not in told
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--memory-bytes", "10MB"])
    assert "'10MB' is no number of bytes (10 MB is 10e6)" in capsys.readouterr().err
    assert main([str(tmp_path), "--tokens", "100"]) == 1
    assert "more than the 24 positions" in capsys.readouterr().err
