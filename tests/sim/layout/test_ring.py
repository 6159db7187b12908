"""Ring attention in the simulator: volumes by the closed form, and a causal ring's uneven work."""

from collections import Counter

import pytest

from twinbed.conf.schema import Attention, Backend, IntraNodeConf, KernelsConf
from twinbed.policies.layout import Direction
from twinbed.policies.layout.tokens import causal_work
from twinbed.sim.costs import Costs
from twinbed.sim.layout.shapes import BLOCK
from twinbed.sim.run import Run
from twinbed.sim.simulate import make_engine, simulate

B, S, H, FP32 = 4, 16, 64, 4
RING = {"sequence_mode": "ring"}


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("zigzag", [True, False])
def test_keys_and_values_go_round(make, spec_of, n, zigzag):
    """In units of b s h / n: 2 (n - 1) forward, and 4 (n - 1) backward, where their gradients go round too."""
    record = simulate(make(n, sequence=n, zigzag=zigzag, **RING), spec=spec_of(), fold=False)
    rows = [r for r in record.ledger if r.iteration == 0 and r.layer == "block.0.core"]
    assert {(r.stream, r.op, r.axis) for r in rows} == {("ring", "send", "sequence")}
    unit = B * S * H // n * FP32
    for rank in range(n):
        sent = Counter()
        for r in rows:
            if r.rank == rank:
                sent[r.phase] += r.wire_bytes
        assert sent == {"forward": 2 * (n - 1) * unit, "backward": 4 * (n - 1) * unit}


def test_contiguous_ranks_run_programs_of_their_own_and_zigzag_ones_the_same(make, spec_of):
    spec = spec_of()
    for zigzag, programs in ((True, 1), (False, 4)):
        run = Run(make(8, sequence=4, zigzag=zigzag, **RING), spec, None, False, make_engine)
        distinct = {id(p) for p in run.segments[0].programs.values()}
        assert len(distinct) == programs


@pytest.mark.parametrize("zigzag", [True, False])
def test_operations_are_shared_out_as_the_mask_has_them(make, spec_of, zigzag):
    """Together those of the whole square; each rank's in proportion to what its tokens see."""
    model = Costs(make(4, sequence=4, zigzag=zigzag, **RING), spec_of(), None).laid.model
    for direction, times in (("forward", 1), ("backward", 2)):
        steps = [s for s in model.steps(BLOCK, Direction(direction)) if s.by_place]
        own = [sum(step.by_place[place].flop for step in steps) for place in range(4)]
        assert sum(own) == times * 4 * B * S * S * H
        whole = causal_work(4, zigzag)
        assert [flop / sum(own) for flop in own] == pytest.approx([work / sum(whole) for work in whole])


def test_a_contiguous_ring_waits_for_its_last_rank(make, spec_of):
    """Where attention is nearly all there is, at an emulated rate: rank 3 of four has 7/4 of the mean work."""
    keys = {"cluster_emulated_flops_per_s": 1e8, "steps": 1, "cluster_backend": Backend.nccl}
    keys |= {"cluster_intra_node": IntraNodeConf(bandwidth_Bps=1e15, latency_ns=0), "sequence": 4}
    spec = spec_of(layers=1, hidden=8, heads=1, vocab=2, sequence=512, ffn=8)
    took = {
        zigzag: simulate(make(4, micro=1, zigzag=zigzag, **keys, **RING), spec=spec).result["iteration_s"][
            "mean"
        ]
        for zigzag in (True, False)
    }
    assert 1.3 < took[False] / took[True] < 1.76


@pytest.mark.parametrize("backend", [Backend.nccl, Backend.gloo])
@pytest.mark.parametrize("zigzag", [True, False])
def test_folded_equals_step_by_step(make, spec_of, backend, zigzag):
    inner = IntraNodeConf(bandwidth_Bps=1e6, latency_ns=0)
    experiment = make(
        4, sequence=4, zigzag=zigzag, cluster_backend=backend, cluster_intra_node=inner, steps=1, **RING
    )
    apart, folded = (
        simulate(experiment, spec=spec_of(), fold=f).result["iteration_s"]["mean"] for f in (False, True)
    )
    assert folded == pytest.approx(apart, rel=1e-6 if backend is Backend.nccl else 0.05)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_ring_self_attention_as_published(make, spec_of, n):
    """Li et al. 2021, section 3.2: in units of b s h / n, 2 (n - 1) forward and 6 (n - 1) backward; kernels that keep
    scores keep [s / n, s] of each head, whose share is 1 / n of the whole.
    """
    keys = {"sequence": n, "sequence_mode": "rsa"}
    spec = spec_of(family="bert", extra={"head": "masked_lm"}, tied_embeddings=True)
    record = simulate(make(n, **keys), spec=spec, fold=False)
    unit, sent = B * S * H // n * FP32, Counter()
    for row in record.ledger:
        if row.iteration == 0 and row.rank == 0 and row.layer == "block.0.attention.self.core":
            sent[row.phase] += row.wire_bytes
    assert sent == {"forward": 2 * (n - 1) * unit, "backward": 6 * (n - 1) * unit}
    kept = {}
    for attention in Attention:
        kernels = KernelsConf(attention=attention)
        experiment = make(n, cluster_backend=Backend.nccl, kernels=kernels, **keys)
        kept[attention] = Costs(experiment, spec, None).laid.model.saved_bytes(BLOCK)
    assert kept[Attention.unfused] - kept[Attention.flash] == B * 8 * (S // n) * S * FP32


def test_ring_self_attention_as_published_is_not_causal(make, spec_of):
    with pytest.raises(
        ValueError, match=r"parallel\.sequence_mode=rsa with model\.family=gpt.*use sequence_mode=ring"
    ):
        simulate(make(4, sequence=4, sequence_mode="rsa"), spec=spec_of())
