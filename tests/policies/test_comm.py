"""Communication policies: what each answers, what depends on the cluster, and the memory it needs."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinbed.conf.schema import CommConf, GradientPath, HpzLifetime
from twinbed.policies.comm import (
    GradientsReady,
    Phase,
    Placement,
    WeightsChanged,
    WeightsNeeded,
    ZeroComm,
    build_comm,
    describe_action,
    describe_event,
    parse_event,
)
from twinbed.policies.comm.memory import state_bytes
from twinbed.policies.plan import AllGather, AllReduce, AllToAll, Broadcast, Plan, ReduceScatter, ReduceTo

FORWARD = WeightsNeeded("block.0", Phase.forward, copy_valid=False)
BACKWARD = WeightsNeeded("block.0", Phase.backward, copy_valid=True)


def zeropp(**keys: object) -> CommConf:
    return CommConf(
        **{
            "name": "zeropp",
            "zero_quantized_weights": True,
            "zero_hpz_partition_size": None,
            "zero_quantized_gradients": True,
        }
        | keys  # type: ignore[arg-type]
    )


def words(plan: Plan | None) -> list[str]:
    return [type(step).__name__ for step in plan.steps] if plan else []


def test_zeropp_is_the_papers_plans() -> None:
    policy, warnings = build_comm(zeropp(), num_ranks=8, ranks_per_node=4)
    assert warnings == ()
    assert describe_action(policy.decide(FORWARD)) == (
        "gather: Quantize(bits=8, block=2048, per_parameter=False), AllGather(axis=world), Dequantize(), "
        "StoreCopy(axis=hpz)"
    )
    assert describe_action(policy.decide(BACKWARD)) == "gather: LoadCopy(axis=hpz), AllGather(axis=hpz)"
    hop = ["Quantize", "AllToAll", "Dequantize", "Reduce"]
    assert words(policy.decide(GradientsReady("block.0", 0, 1))) == ["Reorder", *hop, *hop]


def test_zero3_gathers_twice_and_reduces_each_micro_batch() -> None:
    policy, _ = build_comm(CommConf(name="zero3"), num_ranks=4, ranks_per_node=2)
    assert policy.decide(FORWARD) == Plan((AllGather(axis="world"),), "gather")
    assert policy.decide(BACKWARD) == policy.decide(FORWARD)
    assert policy.decide(GradientsReady("root", 0, 3)) == Plan((ReduceScatter(axis="world"),), "reduce")
    assert policy.reshard_after_forward


@pytest.mark.parametrize(
    ("conf", "placement", "step"),
    [
        (CommConf(name="ddp", zero_stage=0), Placement.replicated, AllReduce),
        (CommConf(name="ps", zero_stage=0, parameter_server=True), Placement.server, ReduceTo),
        (CommConf(name="zero1", zero_stage=1), Placement.sharded, ReduceScatter),
    ],
)
def test_below_zero2_only_the_last_micro_batch_is_reduced(
    conf: CommConf, placement: Placement, step: type
) -> None:
    policy, _ = build_comm(conf, num_ranks=4, ranks_per_node=2)
    assert policy.placement is placement
    assert policy.decide(GradientsReady("root", 0, 2)) is None
    plan = policy.decide(GradientsReady("root", 1, 2))
    assert plan is not None
    assert [type(s) for s in plan.steps] == [step]
    assert not policy.reshard_after_forward


def test_only_a_parameter_server_publishes() -> None:
    server, _ = build_comm(
        CommConf(name="ps", zero_stage=0, parameter_server=True), num_ranks=4, ranks_per_node=2
    )
    ddp, _ = build_comm(CommConf(name="ddp", zero_stage=0), num_ranks=4, ranks_per_node=2)
    assert server.decide(WeightsChanged("root")) == Plan((Broadcast(axis="world"),), "gather")
    assert ddp.decide(WeightsChanged("root")) is None


def test_copy_that_lives_until_the_step_serves_later_forwards() -> None:
    again = WeightsNeeded("root", Phase.forward, copy_valid=True)
    paper, _ = build_comm(zeropp(), num_ranks=4, ranks_per_node=2)
    today, _ = build_comm(zeropp(hpz_lifetime=HpzLifetime.step), num_ranks=4, ranks_per_node=2)
    assert "AllGather(axis=world)" in describe_action(paper.decide(again))
    assert describe_action(today.decide(again)) == "gather: LoadCopy(axis=hpz), AllGather(axis=hpz)"


def test_rivals_of_qgz() -> None:
    ring, _ = build_comm(zeropp(gradient_path=GradientPath.ring), num_ranks=4, ranks_per_node=2)
    assert "ReduceScatter(axis=world, hop_bits=4)" in describe_action(ring.decide(GradientsReady("b", 0, 1)))
    one, _ = build_comm(zeropp(gradient_path=GradientPath.one_hop), num_ranks=4, ranks_per_node=2)
    assert "AllToAll(axis=world)" in describe_action(one.decide(GradientsReady("b", 0, 1)))
    whole, _ = build_comm(zeropp(gradient_block=0), num_ranks=4, ranks_per_node=2)
    assert "block=0" in describe_action(whole.decide(GradientsReady("b", 0, 1)))


def test_hpz_on_one_node_has_no_effect_and_says_so() -> None:
    policy, warnings = build_comm(
        CommConf(name="hpz", zero_hpz_partition_size=8), num_ranks=8, ranks_per_node=8
    )
    assert policy.hpz_size == 1
    assert any("zero_hpz_partition_size=8 has no effect" in w for w in warnings)


def test_hpz_wider_than_a_node_warns() -> None:
    policy, warnings = build_comm(
        CommConf(name="hpz", zero_hpz_partition_size=16), num_ranks=32, ranks_per_node=8
    )
    assert policy.hpz_size == 16
    assert any("spans nodes of 8 ranks" in w for w in warnings)


def test_hpz_that_does_not_divide_names_both() -> None:
    with pytest.raises(ValueError, match=r"zero_hpz_partition_size=3 must divide the world size 8"):
        build_comm(CommConf(name="hpz", zero_hpz_partition_size=3), num_ranks=8, ranks_per_node=4)


def test_qgz_on_one_node_falls_back_and_says_so() -> None:
    policy, warnings = build_comm(zeropp(), num_ranks=4, ranks_per_node=4)
    assert words(policy.decide(GradientsReady("b", 0, 1))) == ["ReduceScatter"]
    assert any("no effect on one node" in w for w in warnings)


def test_memory_of_100b_parameters_on_1024_gpus() -> None:
    """ZeRO++, section 3.2: 9.0x ZeRO-3, and plain data parallelism 113.8x that."""
    n = 100_000_000_000
    zero3 = ZeroComm(name="zero3")
    hpz = ZeroComm(name="hpz", hpz_size=16, ranks_per_node=16)
    ddp = ZeroComm(name="ddp", zero_stage=0)
    of = [state_bytes(p, num_parameters=n, num_ranks=1024) for p in (zero3, hpz, ddp)]
    assert of[0].total == 1_562_500_000
    assert of[1].secondary_shard == 12_500_000_000
    assert of[2].total == 1_600_000_000_000
    assert of[1].total / of[0].total == pytest.approx(9.0)
    assert of[2].total / of[1].total == pytest.approx(113.8, abs=0.05)


def test_zero_stages_shard_one_state_after_the_other() -> None:
    totals = [
        state_bytes(ZeroComm(name="z", zero_stage=s), num_parameters=1024, num_ranks=4) for s in range(4)
    ]
    assert [t.total for t in totals] == [16 * 1024, (4 + 3) * 1024, (2 + 0.5 + 3) * 1024, 4 * 1024]


@given(unit=st.sampled_from(["root", "block.0", "block.17"]), valid=st.booleans(), k=st.integers(1, 9))
def test_events_survive_the_log(unit: str, valid: bool, k: int) -> None:
    for event in (
        WeightsNeeded(unit, Phase.backward, valid),
        GradientsReady(unit, k - 1, k),
        WeightsChanged(unit),
    ):
        assert parse_event(describe_event(event)) == event


def test_a_policy_of_your_own_is_loaded_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from twinbed.policies.comm import ZeroComm\n"
        "def Mine(*, num_ranks, ranks_per_node):\n"
        "    return ZeroComm(name=f'mine of {num_ranks}', ranks_per_node=ranks_per_node)\n"
    )
    policy, _ = build_comm(CommConf(name="x", policy=f"{file}:Mine"), num_ranks=4, ranks_per_node=2)
    assert policy.name == "mine of 4"


@pytest.mark.parametrize("name", ["nowhere", "no.such.module:X", "twinbed.policies.comm:NoSuchName"])
def test_a_policy_that_cannot_be_loaded_is_named(name: str) -> None:
    with pytest.raises(ValueError, match="comm.policy="):
        build_comm(CommConf(name="x", policy=name), num_ranks=4, ranks_per_node=2)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"zero_stage": 4}, "comm.zero_stage=4"),
        ({"zero_stage": 2, "zero_quantized_weights": True}, "comm.zero_quantized_weights=True"),
        ({"zero_stage": 1, "zero_hpz_partition_size": 2}, "comm.zero_hpz_partition_size=2"),
        ({"weight_bits": 5}, "comm.weight_bits=5"),
        ({"gradient_block": 7}, "comm.gradient_block=7"),
        ({"gradient_bits": [4]}, "comm.gradient_bits="),
        ({"gradient_chunks": 0}, "comm.gradient_chunks=0: must be in"),
        ({"parameter_server": True}, "comm.zero_stage=3"),
    ],
)
def test_impossible_keys_are_named(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CommConf(name="x", **keys)  # type: ignore[arg-type]


def test_the_node_copy_is_quantized_only_with_quantized_weights() -> None:
    both, _ = build_comm(zeropp(quantize_node_copy=True), num_ranks=4, ranks_per_node=2)
    assert describe_action(both.decide(BACKWARD)) == (
        "gather: LoadCopy(axis=hpz), Quantize(bits=8, block=2048, per_parameter=False), AllGather(axis=hpz), "
        "Dequantize()"
    )
    plain, _ = build_comm(
        zeropp(quantize_node_copy=True, zero_quantized_weights=False), num_ranks=4, ranks_per_node=2
    )
    assert describe_action(plain.decide(BACKWARD)) == "gather: LoadCopy(axis=hpz), AllGather(axis=hpz)"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "os:getcwd",
            r"comm.policy='os:getcwd' cannot be made with num_ranks=4 and ranks_per_node=2: TypeError",
        ),
        ("builtins:dict", r"comm.policy='builtins:dict' makes a dict, which is no policy: it lacks \['name'"),
        ("os:nothing", "comm.policy='os:nothing' cannot be loaded: AttributeError"),
        (
            "broken.py:Any",
            r"comm.policy='.*broken.py:Any' cannot be loaded: ZeroDivisionError: division by zero",
        ),
    ],
)
def test_a_policy_of_ones_own_that_cannot_be_made(name, message, tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    where = str(tmp_path / name) if name.startswith("broken") else name
    with pytest.raises(ValueError, match=message):
        build_comm(CommConf(name="own", policy=where), num_ranks=4, ranks_per_node=2)


def test_chunks_give_each_hop_a_stream() -> None:
    policy, warnings = build_comm(zeropp(gradient_chunks=4), num_ranks=8, ranks_per_node=4)
    assert warnings == ()
    plan = policy.decide(GradientsReady("b", 0, 1))
    assert plan is not None
    assert plan.chunks == 4
    streams = [plan.stream_of(i) for i, s in enumerate(plan.steps) if isinstance(s, AllToAll)]
    assert streams == ["reduce_local", "reduce_node"]
    assert [plan.is_beside(i) for i in range(9)].count(True) == 2
    assert "chunks=4" in describe_action(plan)
    one_hop, _ = build_comm(
        zeropp(gradient_chunks=2, gradient_path=GradientPath.one_hop), num_ranks=8, ranks_per_node=4
    )
    assert "AllToAll(stream=reduce_world, chunks=2, axis=world)" in describe_action(
        one_hop.decide(GradientsReady("b", 0, 1))
    )


def test_kernels_that_are_not_fused_are_said_in_the_plan() -> None:
    policy, _ = build_comm(zeropp(fused_kernels=False), num_ranks=8, ranks_per_node=4)
    action = describe_action(policy.decide(GradientsReady("b", 0, 1)))
    assert action.startswith("reduce: Reorder(fused=False), Quantize(")
    assert action.count("Dequantize(fused=False)") == 2
    assert "fused" not in describe_action(policy.decide(FORWARD))


@pytest.mark.parametrize(
    ("keys", "ranks_per_node", "why"),
    [
        ({"zero_quantized_gradients": False}, 2, "gradients are not quantized"),
        ({}, 4, "gradients are not quantized"),
        ({"gradient_path": GradientPath.ring}, 2, "a ring is not cut"),
    ],
)
def test_chunks_and_fusing_without_effect_are_said(
    keys: dict[str, object], ranks_per_node: int, why: str
) -> None:
    conf = zeropp(gradient_chunks=2, fused_kernels=False, **keys)
    _, warnings = build_comm(conf, num_ranks=4, ranks_per_node=ranks_per_node)
    for key in ("gradient_chunks=2", "fused_kernels=False"):
        assert any(f"comm.{key} has no effect: {why}" in w for w in warnings)
