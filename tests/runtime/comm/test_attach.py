"""`twinbed.runtime.attach`: a policy in somebody else's loop."""

import pytest


@pytest.mark.distributed
def test_own_loop_keeps_its_losses(launch):
    """As without us where nothing is quantized; with evaluations, clipping and a load midway."""
    for rank, found in enumerate(launch("ranks_attach", "own_loop", 4)):
        for name in ("zero3", "hpz"):
            assert found[name] == pytest.approx(found["plain"], abs=1e-6), name
        assert found["zero3"] == found["hpz"]
        assert found["zeropp"] == pytest.approx(found["plain"], abs=0.2)
        assert found["zeropp"] != found["plain"]
        assert found["zero3 copy"] == 0
        # Two slices of 64 elements of the root and two of 46 of each block, fp32.
        assert found["hpz copy"] == found["zeropp copy"] == 2 * (64 + 3 * 46) * 4
        units = ["root", "block 0", "block 1", "block 2"]
        names = [unit.replace("block ", "blocks.") for unit in units]
        step = [
            *((0, "forward", name, "all_gather", "world") for name in names),
            *((0, "backward", name, "all_gather", "hpz") for name in (names[0], names[3], names[2])),
            *((0, "backward", names[3], "all_to_all", axis) for axis in ("local", "node")),
        ]
        assert found["zeropp rows"][: len(step)] == step, rank
        evaluated = [row for row in found["zeropp rows"] if row[:2] == (0, "eval")]
        assert evaluated == [(0, "eval", name, "all_gather", "world") for name in names]
        assert (0, "backward", "", "all_reduce", "world") in found["zeropp rows"]  # clip_grad_norm_


@pytest.mark.distributed
def test_hugging_face_model(launch):
    pytest.importorskip("transformers")
    for found in launch("ranks_attach", "hugging_face", 2):
        assert found["losses"][-1] < 0.5 * found["losses"][0]
        assert found["units"] == ["root", "transformer.h.0", "transformer.h.1"]
        assert found["iterations"] == 11
        assert any("zero_quantized_gradients has no effect on one node" in said for said in found["warnings"])
        assert set(found["warnings"]) <= set(found["warned"])


@pytest.mark.distributed
def test_refusals_name_the_way_out(launch):
    for said in launch("ranks_attach", "refusals", 2):
        unwrapped, unknown, whole, overlap, nothing, nodes = said
        assert "comm=None is no policy; give the name of one" in nothing
        assert "fully_shard" in unwrapped
        assert "zero4" in unknown
        assert "zeropp" in unknown
        assert "ddp" in whole
        assert "comm.overlap" in overlap
        assert "LOCAL_WORLD_SIZE" in nodes


@pytest.mark.distributed
def test_each_of_two_models_has_its_own_collectives_in_its_ledger(launch):
    for found in launch("ranks_attach", "two_models", 2):
        for name in ("a", "b"):
            assert found[f"{name} in {name}"]
            assert found[f"{name} in both"] == found[f"{name} in {name}"]
