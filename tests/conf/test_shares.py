"""What cannot be shared out unevenly is refused before anything starts, naming key, value and what would be legal."""

import pytest

from twinbed.conf.compose import compose
from twinbed.policies.layout import layout_of

RUN = ("target=runtime", "cluster.nodes=1", "cluster.devices_per_node=4", "comm=ddp")
PIPED = (*RUN, "parallel.pipeline=2", "batch.accumulation=2", "model.layers=4")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((*RUN, "balance=batch", "batch.micro=1"), "batch.micro=1 with balance=batch: must be > 1"),
        (
            (*RUN, "balance=batch", "batch.micro=2", "parallel.tensor=4"),
            "balance=batch with one replica of the model: needs data parallelism",
        ),
        (
            (
                *RUN,
                "balance=batch",
                "batch.micro=4",
                "parallel.tensor=4",
                "parallel.tensor_mode=2d",
                "cluster.nodes=2",
            ),
            "parallel.tensor_mode=2d with balance=batch: must be 1d",
        ),
        (
            (*RUN, "balance=batch", "batch.micro=2", "offload=disk", "comm=zero3"),
            "offload=disk with balance=batch: must be none",
        ),
        (
            (*RUN, "balance=batch", "batch.micro=2", "cluster.backend=nccl"),
            "cluster.backend=nccl with balance=batch and target=runtime: must be gloo, or target=sim",
        ),
        (
            ("target=sim", "balance=batch", "batch.micro=2", "engine=deepspeed"),
            "balance=batch needs engine=fsdp2, got engine=deepspeed",
        ),
        (
            (*RUN, "balance=batch", "batch.micro=2", "balance.slack=1"),
            r"balance.slack=1.0: must be in \[0, 1\)",
        ),
        ((*RUN, "balance=batch", "batch.micro=2", "balance.period=0"), "balance.period=0: must be >= 1"),
        ((*RUN, "balance=layers"), "parallel.pipeline=1 with balance=layers: must be > 1"),
        (
            (*PIPED, "balance=layers", "parallel.virtual_stages=2", "parallel.pipeline_schedule=interleaved"),
            "parallel.virtual_stages=2 with balance=layers: must be 1",
        ),
        (
            (*PIPED, "balance=layers", "parallel.stage_layers=[3,1]"),
            r"parallel.stage_layers=\[3, 1\] with balance=layers: must be null",
        ),
        (
            (*PIPED, "parallel.stage_layers=[4]"),
            r"stage_layers=\[4\]: must be null or parallel.pipeline=2 numbers",
        ),
        (
            (*PIPED, "parallel.stage_layers=[4,0]"),
            r"stage_layers=\[4, 0\]: must be null or parallel.pipeline=2",
        ),
        (
            (*PIPED, "parallel.stage_layers=[2,2]", "parallel.virtual_stages=2"),
            "must be null with parallel.virtual_stages=2",
        ),
    ],
)
def test_it_is_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        compose(overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            (*PIPED, "parallel.stage_layers=[2,1]"),
            r"parallel.stage_layers=\[2, 1\] has 3 blocks: must be model.layers=4",
        ),
        ((*PIPED, "model.layers=5"), "must divide model.layers=5.*or give parallel.stage_layers"),
        (
            (*PIPED, "model.layers=1", "balance=layers"),
            "parallel.pipeline=2 must be at most model.layers=1",
        ),
    ],
)
def test_a_split_that_does_not_fit(overrides, message):
    def lay_out():
        composed = compose(overrides)
        layout_of(composed.experiment, composed.spec)

    with pytest.raises(ValueError, match=message):
        lay_out()


def test_a_split_that_does_not_divide():
    composed = compose([*PIPED, "model.layers=5", "balance=layers"])
    layout = layout_of(composed.experiment, composed.spec)
    assert [list(layout.layers(stage, 0)) for stage in range(2)] == [[0, 1, 2], [3, 4]]
    composed = compose([*PIPED, "model.layers=5", "parallel.stage_layers=[1,4]"])
    layout = layout_of(composed.experiment, composed.spec)
    assert [list(layout.layers(stage, 0)) for stage in range(2)] == [[0], [1, 2, 3, 4]]


def test_what_has_no_effect_is_said():
    composed = compose([*PIPED, "balance=layers", "balance.period=3"])
    assert any("balance.period=3 has no effect with balance=layers" in each for each in composed.warnings)
    with_split = compose(
        ["target=sim", "engine=megatron", "parallel.pipeline=2", "parallel.stage_layers=[2,2]"]
    )
    assert any("parallel.stage_layers" in each and "no effect" in each for each in with_split.warnings)


def test_that_a_split_stays_is_said():
    composed = compose([*PIPED, "balance=layers"])
    assert any("the split stays for the whole run" in each for each in composed.warnings)
