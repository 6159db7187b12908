"""From a layout and a policy to the engine of this rank."""

from collections.abc import Callable

import torch

from ...conf.schema import Precision
from ...policies.comm import CommPolicy, Placement
from ...policies.layout.parallel import ParallelLayout
from ...policies.mesh import PIPELINE
from ..balance.balanced import Balanced
from ..collectives import backend_of, build_collectives
from ..groups import Groups
from ..interpreter import Interpreter
from ..ledger import Ledger
from ..stack import Stack
from ..wrap import WIRE_DTYPE, wrap_model
from .engine import LayoutEngine, ModelPart
from .layout import lay_out
from .pace import Rate
from .stages import keep_part


def build_layout_engine(
    new_model: Callable[[], Stack],
    *,
    layout: ParallelLayout,
    policy: CommPolicy,
    groups: Groups,
    ledger: Ledger,
    precision: Precision,
    device: torch.device,
    micro: int,
    tokens: int,
    overlap: bool = False,
    rate: Rate | None = None,
    beside: bool = True,
    balanced: Balanced | None = None,
) -> LayoutEngine:
    """The parts of the model that this rank holds, each under `policy` over its replicas.

    Args:
        new_model: Makes the whole model, with the same weights each time; called for each chunk.
        policy: Of the mesh of replicas.
        groups: On a mesh of the layout's axes.
        micro: Sequences of a micro-batch.
        tokens: Of a sequence.
        overlap: As `wrap_model`.
        rate: Of products and attention; None: they take the time that they take.
        beside: Whether layers' collectives run beside computation where plans say so.
        balanced: What of the rank is balanced; told of its blocks.
    """
    collectives = build_collectives(backend_of(device))
    interpreter = Interpreter(groups.of_replicas(), ledger, collectives)
    stage = groups.mesh.index(PIPELINE, groups.rank)
    if balanced is not None:
        balanced.ahead = groups.mesh.num_replicas == 1 or policy.placement is not Placement.sharded
    parts = []
    for chunk in range(layout.chunks):
        model = keep_part(new_model(), layout, stage=stage, chunk=chunk)
        laid = lay_out(
            model,
            layout,
            groups=groups,
            ledger=ledger,
            collectives=collectives,
            micro=micro,
            sequence=tokens,
            stage=stage,
            chunk=chunk,
            rate=rate,
            beside=beside,
            balanced=balanced,
        )
        engine = wrap_model(
            model,
            policy=policy,
            interpreter=interpreter,
            precision=precision,
            device=device,
            overlap=overlap,
            micro_batches=layout.micro_batches,
        )
        parts.append(ModelPart(chunk, model, engine, laid))
    return LayoutEngine(
        parts,
        layout=layout,
        groups=groups,
        ledger=ledger,
        placement=policy.placement,
        micro=micro,
        tokens=tokens,
        dtype=WIRE_DTYPE[precision],
        device=device,
    )
