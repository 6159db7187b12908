"""What a policy decides, carried out: in which order chunks come."""

import threading
import time
from concurrent.futures import Future
from contextlib import nullcontext

import pytest
import torch

from twinbed.conf.schema.offload import OffloadConf
from twinbed.policies.offload import Kind, build_offload
from twinbed.policies.offload.chunks import cut_chunks
from twinbed.runtime.offload.header import lay_out
from twinbed.runtime.offload.region import Region
from twinbed.runtime.offload.residency import Residency
from twinbed.runtime.offload.store import Store


@pytest.mark.timeout(60)
def test_what_is_needed_next_comes_after_what_is_needed_now(tmp_path, monkeypatch):
    chunks = cut_chunks({"u0": 1 << 16, "u1": 1 << 16}, Kind.parameters)
    layouts = {chunk.name: lay_out({"x": (torch.uint8, (chunk.nbytes,))}) for chunk in chunks}
    store = Store.create(tmp_path / "store", layouts, {})
    regions = {name: Region(layout) for name, layout in layouts.items()}
    residency = Residency(
        build_offload(OffloadConf(name="disk"), chunks),
        store,
        regions,
        log=lambda event, actions: None,
        wait=lambda chunk, nbytes: nullcontext(),
        moved=lambda *_: None,
    )
    first, second = (chunk.name for chunk in chunks)
    for chunk in (first, second):
        residency.adopt(chunk)
    residency.begins("train")
    for chunk in (first, second):  # the order that the policy then knows
        residency.needed(chunk)
        residency.released(chunk, changed=False)

    gate: Future[None] = Future()
    asked: dict[str, Future[None]] = {}
    after_of: dict[str, list[Future[None]]] = {}
    read = store.read

    def held_back(chunk, region, *, after=()):
        after_of[chunk] = list(after)
        asked[chunk] = read(chunk, region, after=[*after, gate] if chunk == first else after)
        return asked[chunk]

    monkeypatch.setattr(store, "read", held_back)
    residency.begins("train")
    begun = threading.Event()

    def use():
        residency.needed(first)
        begun.set()

    user = threading.Thread(target=use, daemon=True)
    user.start()
    while len(asked) < 2:
        time.sleep(0.01)
    assert after_of[second][-1] is asked[first]
    assert not begun.wait(0.2)
    assert not asked[second].done()
    gate.set_result(None)
    user.join()
    asked[second].result()
    store.close()
