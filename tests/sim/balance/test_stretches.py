"""Which work of a block goes with products, which with units, which with nothing: names of a simulated rank's items."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from twinbed.sim.balance import balancer
from twinbed.sim.balance.stretches import stretches
from twinbed.sim.program import Program
from twinbed.sim.simulate import simulate

LAYERS = 2


@pytest.fixture
def programs(
    make: Callable[..., Any], spec_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> list[Program]:
    """Of ranks before and after units have moved."""
    seen: list[Program] = []

    def kept(program: Program) -> Any:
        seen.append(program)
        return stretches(program)

    monkeypatch.setattr(balancer, "stretches", kept)
    experiment = make(4, cluster_slowdown={1: 4.0}, balance_name="migrate", balance_period=1, steps=4)
    record = simulate(experiment, spec=spec_of(layers=LAYERS, hidden=256, heads=32, sequence=128))
    assert record.result["status"] == "ok", record.result["error"]
    return seen


def of_blocks(names: str, first: str) -> Counter[str]:
    """Of items "phase/layer word" in each block."""
    phases = (name.split("/") for name in names.format(*[first] * 3).split(","))
    return Counter(f"{phase}/block.{i}.{rest}" for phase, rest in phases for i in range(LAYERS))


def test_every_item_of_a_block_is_in_one_of_them(programs: list[Program]) -> None:
    for program in programs:
        attention, ffn, between_attention, between_ffn, around = (
            [program.items[i].parts[0].name for i in part] for part in stretches(program)
        )
        # 2 products of a half: forward, and the gradients of both operands
        assert len(attention) == len(ffn) == 6 * LAYERS
        assert all(name.endswith("multiply") for name in (*attention, *ffn))
        # by place: a bias' gradient of a second product is there too, and one of a first is not
        assert Counter(between_attention) == of_blocks(
            "forward/{} add_bias,forward/core attention,backward/proj sum_tokens,backward/core attention",
            "qkv",
        )
        assert Counter(between_ffn) == of_blocks(
            "forward/{} add_bias,forward/{} activation,backward/fc2 sum_tokens,backward/{} activation", "fc1"
        )
        assert sum(name.endswith("layer_norm") for name in around) == 4 * LAYERS
        assert sum("residual" in name for name in around) == 4 * LAYERS
        assert not any(name.endswith((" pack", " unpack", " join")) for name in around)


def test_copies_of_what_moves_are_there_and_left_out(programs: list[Program]) -> None:
    left_out = 0
    for program in programs:
        copies = {
            item.index
            for item in program.items
            if item.parts and item.parts[0].name.endswith((" pack", " unpack", " join"))
        }
        assert not copies & {i for part in stretches(program) for i in part}
        left_out += len(copies)
    assert left_out
