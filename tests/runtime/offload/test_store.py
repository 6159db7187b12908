"""Tensors in files: what is written is read, what is damaged is named, what was committed survives."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twinbed.runtime.offload.data_file import supports_direct
from twinbed.runtime.offload.header import (
    BLOCK_BYTES,
    CHUNK_BYTES,
    DamagedError,
    Header,
    decode_header,
    encode_header,
    header_bytes,
    lay_out,
)
from twinbed.runtime.offload.manifest import MANIFEST, StoreError, committed_generations
from twinbed.runtime.offload.region import Region
from twinbed.runtime.offload.store import Store
from twinbed.runtime.offload.transfers import Transfers

LAYOUT = lay_out({"weight": (torch.float32, (1000, 2500)), "bias": (torch.float32, (1000,))})  # two chunks
LAYOUTS = {"a": LAYOUT, "b/c": lay_out({"x": (torch.bfloat16, (3,)), "n": (torch.int64, (5, 1))})}
IDENTITY = {"model": "m", "ranks": 2}

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system: needs root")


def filled(entry, value):
    region = Region(LAYOUTS[entry])
    for i, tensor in enumerate(region.tensors.values()):
        tensor.copy_(torch.full(tensor.shape, value + i, dtype=torch.float64))
    return region


def write_all(store, value):
    for entry in LAYOUTS:
        store.write(entry, filled(entry, value)).result()


def read(store, entry):
    region = Region(LAYOUTS[entry])
    store.read(entry, region).result()
    return {name: tensor.clone() for name, tensor in region.tensors.items()}


def committed(folder, value=7):
    store = Store.create(folder, LAYOUTS, IDENTITY)
    write_all(store, value)
    store.commit({"step": 3})
    store.close()


def files_of(folder):
    """The file of each entry that a store's only commit names."""
    return {entry: folder / f"{entry.replace('/', '.')}.0.safetensors" for entry in LAYOUTS}


shapes = st.lists(st.integers(0, 9), min_size=0, max_size=3).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8])


@given(
    tensors=st.dictionaries(
        st.text(min_size=1).filter(lambda n: n[0] != "_"), st.tuples(dtypes, shapes), max_size=5
    ),
    generation=st.integers(0, 10**15),
    data=st.data(),
)
@settings(deadline=None, max_examples=60)
def test_a_header_comes_back_and_is_as_long_for_every_generation(tensors, generation, data):
    layout = lay_out(tensors)
    checksums = data.draw(st.tuples(*[st.integers(0, 2**64 - 1)] * layout.num_chunks))
    header = Header("e", generation, layout, checksums)
    encoded = encode_header(header)
    assert len(encoded) == header_bytes("e", layout)
    assert len(encoded) % BLOCK_BYTES == 0
    whole = len(encoded) + layout.padded_bytes
    found = decode_header(encoded, path="f", file_bytes=whole)
    assert (found.entry, found.generation, found.checksums) == ("e", generation, checksums)
    assert dict(found.layout.tensors) == dict(layout.tensors)
    with pytest.raises(DamagedError, match="f: has .* the file is cut off"):
        decode_header(encoded, path="f", file_bytes=whole - 1)


def test_every_flipped_byte_of_a_header_is_seen():
    encoded = encode_header(Header("e", 5, LAYOUT, (1, 2)))
    for at in [*range(0, 700, 7), len(encoded) - 1]:
        broken = bytearray(encoded)
        broken[at] ^= 4
        with pytest.raises(DamagedError, match="header is damaged|it is damaged|is cut off"):
            decode_header(bytes(broken), path="f", file_bytes=len(encoded) + LAYOUT.padded_bytes)


def test_tensors_of_wider_elements_come_first_and_every_tensor_is_aligned():
    layout = lay_out({"a": (torch.uint8, (3,)), "b": (torch.float32, (2,)), "c": (torch.int64, (1,))})
    assert list(layout.tensors) == ["c", "b", "a"]
    assert all(t.begin % t.dtype.itemsize == 0 for t in layout.tensors.values())


def test_a_region_takes_no_memory_until_it_is_written_and_after_it_is_released():
    def resident_bytes():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    size = 64 << 20
    region = Region(lay_out({"x": (torch.uint8, (size,))}))
    before = resident_bytes()
    region.tensors["x"].fill_(1)
    assert resident_bytes() - before > 0.9 * size
    region.release()
    assert resident_bytes() - before < 0.1 * size
    assert not region.tensors["x"].any()


def test_what_is_written_is_read_again(tmp_path):
    store = Store.create(tmp_path / "s", LAYOUTS, IDENTITY)
    write_all(store, 7)
    found = read(store, "a")
    assert found["weight"].eq(7).all()
    assert found["bias"].eq(8).all()
    assert read(store, "b/c")["x"].dtype == torch.bfloat16
    store.close()


def test_safetensors_opens_the_files(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    committed(tmp_path)
    tensors = safetensors.load_file(files_of(tmp_path)["a"])
    assert tensors["weight"].eq(7).all()
    assert tensors["bias"].shape == (1000,)


@pytest.mark.parametrize("direct", [True, False])
def test_a_store_is_opened_at_its_last_commit(tmp_path, direct):
    store = Store.create(tmp_path, LAYOUTS, IDENTITY, direct=direct)
    assert store.direct == (direct and supports_direct(tmp_path))
    for step in range(4):
        write_all(store, step)
        store.commit({"step": step})
    store.write("a", filled("a", 99)).result()  # not committed
    assert read(store, "a")["bias"].eq(100).all()
    store.close()
    assert committed_generations(tmp_path) == [3, 2]
    again = Store.open(tmp_path, LAYOUTS, IDENTITY, direct=direct)
    assert again.committed.notes == {"step": 3}
    assert read(again, "a")["weight"].eq(3).all()
    again.close()


def test_an_earlier_generation_can_be_gone_on_from(tmp_path):
    store = Store.create(tmp_path, LAYOUTS, IDENTITY)
    for step in range(3):
        write_all(store, step)
        store.commit({"step": step})
    store.close()
    store = Store.open(tmp_path, LAYOUTS, IDENTITY, generation=1)
    assert read(store, "a")["weight"].eq(1).all()
    write_all(store, 50)  # over generation 2
    store.close()
    store = Store.open(tmp_path, LAYOUTS, IDENTITY)  # killed before the next commit
    assert store.committed.notes == {"step": 1}
    assert read(store, "a")["weight"].eq(1).all()
    store.close()


def test_what_does_not_change_is_not_written_again(tmp_path):
    store = Store.create(tmp_path, LAYOUTS, IDENTITY)
    write_all(store, 1)
    store.commit({})
    for value in (2, 3, 4):
        store.write("a", filled("a", value))
        store.commit({})
    store.close()
    store = Store.open(tmp_path, LAYOUTS, IDENTITY)
    assert read(store, "a")["weight"].eq(4).all()
    assert read(store, "b/c")["x"].eq(2).all()
    store.close()


@pytest.mark.parametrize("entry", list(LAYOUTS))
def test_a_flipped_byte_is_named(tmp_path, entry):
    committed(tmp_path)
    path = files_of(tmp_path)[entry]
    at = header_bytes(entry, LAYOUTS[entry]) + 1
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    tensor = next(iter(LAYOUTS[entry].tensors))
    with pytest.raises(DamagedError) as error:
        Store.open(tmp_path, LAYOUTS, IDENTITY)
    said = str(error.value)
    assert f"1 of 2 files of generation 0 (step 3) in {tmp_path} are damaged: {path}: bytes 0-" in said
    assert tensor in said


def test_a_byte_that_flips_while_the_store_is_open_is_found_by_the_next_read(tmp_path):
    store = Store.create(tmp_path, LAYOUTS, IDENTITY)
    write_all(store, 7)
    with files_of(tmp_path)["a"].open("r+b") as file:
        file.seek(header_bytes("a", LAYOUT) + CHUNK_BYTES + 10)  # in the second chunk
        file.write(b"\xff")
    with pytest.raises(
        DamagedError, match=rf"a.0.safetensors: bytes {CHUNK_BYTES}-.* \(weight, bias\).*damaged"
    ):
        read(store, "a")
    store.close()


def test_a_truncated_and_a_missing_file_are_both_named(tmp_path):
    committed(tmp_path)
    cut, gone = files_of(tmp_path)["a"], files_of(tmp_path)["b/c"]
    os.truncate(cut, header_bytes("a", LAYOUT) + 5_000_000)
    gone.unlink()
    with pytest.raises(DamagedError) as error:
        Store.open(tmp_path, LAYOUTS, IDENTITY)
    said = str(error.value)
    assert "2 of 2 files" in said
    assert f"{cut}: has" in said
    assert "the file is cut off" in said
    assert f"{gone} cannot be read: No such file" in said


def test_a_damaged_manifest_is_named(tmp_path):
    committed(tmp_path)
    manifest = tmp_path / MANIFEST
    manifest.write_text(manifest.read_text().replace('"step": 3', '"step": 4'))
    with pytest.raises(DamagedError, match=rf"{MANIFEST}: does not have the checksum .* manifest is damaged"):
        Store.open(tmp_path, LAYOUTS, IDENTITY)


def test_another_runs_store_is_refused(tmp_path):
    committed(tmp_path)
    with pytest.raises(StoreError, match="another run: ranks=2 there, 4 here"):
        Store.open(tmp_path, LAYOUTS, IDENTITY | {"ranks": 4})
    with pytest.raises(StoreError, match="holds a store already"):
        Store.create(tmp_path, LAYOUTS, IDENTITY)
    with pytest.raises(StoreError, match="no committed store"):
        Store.open(tmp_path / "nowhere", LAYOUTS, IDENTITY)


def test_a_disk_that_is_full_while_writing_is_one_clear_error(tmp_path):
    store = Store.create(tmp_path, LAYOUTS, IDENTITY, direct=False)
    write_all(store, 1)
    store.commit({"step": 8})
    path = tmp_path / "a.1.safetensors"
    path.unlink()
    path.symlink_to("/dev/full")  # every write there fails as on a full disk
    with pytest.raises(StoreError, match=r"the disk is full; generation 0 \(step 8\) is intact"):
        store.write("a", filled("a", 2)).result()
    with pytest.raises(StoreError, match="the disk is full"):
        store.commit({"step": 9})
    store.close()
    store = Store.open(tmp_path, LAYOUTS, IDENTITY)
    assert read(store, "a")["weight"].eq(1).all()
    store.close()


@needs_root
def test_a_disk_too_small_is_refused_before_anything_is_written(small_disk):
    folder = small_disk(8 << 20) / "s"
    with pytest.raises(
        StoreError, match=r"the disk is too small: 20,\d{3},\d{3} bytes are needed, [\d,]+ are free"
    ):
        Store.create(folder, LAYOUTS, IDENTITY)
    assert list(folder.iterdir()) == []


WRITER = """
import sys
from pathlib import Path
import torch
from twinbed.runtime.offload.header import lay_out
from twinbed.runtime.offload.region import Region
from twinbed.runtime.offload.store import Store
layouts = {name: lay_out({"x": (torch.float32, (3_000_000,))}) for name in ("a", "b")}
store = Store.create(Path(sys.argv[1]), layouts, {})
regions = {name: Region(layout) for name, layout in layouts.items()}
for step in range(10**6):
    for name, region in regions.items():
        region.tensors["x"].fill_(step)
        store.write(name, region)
    store.commit({"step": step})
    print(step, flush=True)
"""


@pytest.mark.parametrize("pause_s", [0.0, 0.003, 0.011, 0.017])
def test_a_kill_during_a_write_leaves_a_whole_generation(tmp_path, pause_s):
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "s")], stdout=subprocess.PIPE, text=True
    )
    try:
        for line in process.stdout:
            if int(line) == 3:
                break
        time.sleep(pause_s)  # somewhere within the next writes
    finally:
        process.kill()
        rest = process.communicate()[0].split()
    layouts = {name: lay_out({"x": (torch.float32, (3_000_000,))}) for name in ("a", "b")}
    store = Store.open(tmp_path / "s", layouts, {})
    said = int(rest[-1]) if rest else 3
    step = store.committed.notes["step"]
    assert step in (said, said + 1)
    for name in layouts:
        region = Region(layouts[name])
        store.read(name, region).result()
        assert region.tensors["x"].eq(step).all()
    store.close()


def test_a_transfer_ends_when_nobody_touches_the_memory_any_more():
    transfers, ended = Transfers(2), []

    def fail():
        raise OSError("broken")

    def slow():
        time.sleep(0.1)
        ended.append(True)

    done = transfers.start([fail, slow], lambda results: ended.append("finished"))
    with pytest.raises(OSError, match="broken"):
        done.result(timeout=5)
    assert ended == [True]
    transfers.close()


def test_a_transfer_begins_after_those_it_waits_for():
    transfers, order = Transfers(4), []

    def slow():
        time.sleep(0.1)
        order.append("first")

    first = transfers.start([slow], lambda results: None)
    second = transfers.start([lambda: order.append("second")], lambda results: None, after=[first])
    second.result(timeout=5)
    assert order == ["first", "second"]
    transfers.close()
