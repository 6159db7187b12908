"""Shared out unevenly, the replicas' sequences are together those of one rank with the whole batch, in their order."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinbed.conf.compose import compose
from twinbed.runtime.data import build_batches

MODELS = {
    "gpt": (
        "model=gpt",
        "model.vocab=61",
        "model.layers=1",
        "model.hidden=8",
        "model.heads=1",
        "model.sequence=6",
    ),
    "bert": ("model=bert_tiny", "model.vocab=61", "model.sequence=8"),
    "vit": ("model=vit_tiny",),
}


def readers(model, *, replicas, micro, accumulation):
    """Of the replicas, and of one rank with all of them."""
    keys = ("target=runtime", "data=synthetic", "cluster.nodes=1", *MODELS[model])
    batch = (f"batch.micro={micro}", f"batch.accumulation={accumulation}")
    composed = compose([*keys, *batch, f"cluster.devices_per_node={replicas}"])
    whole = compose([*keys, f"batch.micro={micro * replicas}", *batch[1:], "cluster.devices_per_node=1"])
    return [
        build_batches(composed.experiment, composed.spec, rank=rank, num_ranks=replicas)
        for rank in range(replicas)
    ], build_batches(whole.experiment, whole.spec, rank=0, num_ranks=1)


@pytest.mark.parametrize(
    "model", [model if model == "gpt" else pytest.param(model, marks=pytest.mark.long) for model in MODELS]
)
@settings(deadline=None, max_examples=10)
@given(data=st.data(), replicas=st.integers(1, 3), micro=st.integers(1, 3), accumulation=st.integers(1, 2))
def test_no_sequence_is_lost_or_seen_twice(model, data, replicas, micro, accumulation):
    own, whole = readers(model, replicas=replicas, micro=micro, accumulation=accumulation)
    for step in range(2):
        cuts = data.draw(
            st.lists(st.integers(1, replicas * micro), min_size=replicas - 1, max_size=replicas - 1).map(
                sorted
            )
        )
        borders = [0, *cuts, replicas * micro]
        for reader, first, end in zip(own, borders, borders[1:], strict=False):
            reader.take(range(first, end))
        for micro_batch in range(accumulation):
            # a replica without any would have nothing to compute
            found = [r.train(step, micro_batch) for r in own if len(r._share)]
            wanted = whole.train(step, micro_batch)
            for part in range(2):
                np.testing.assert_array_equal(np.concatenate([f[part] for f in found]), wanted[part])


@pytest.mark.parametrize("model", MODELS)
def test_a_validation_stays_even(model):
    own, _ = readers(model, replicas=2, micro=2, accumulation=1)
    before = [reader.validation(1) for reader in own]
    own[0].take(range(3))
    own[1].take(range(3, 4))
    for reader, (inputs, targets) in zip(own, before, strict=True):
        np.testing.assert_array_equal(reader.validation(1)[0], inputs)
        np.testing.assert_array_equal(reader.validation(1)[1], targets)
    assert own[0].num_counted(2) == 2 * 2 * 2
