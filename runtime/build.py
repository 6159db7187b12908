"""From an experiment to the engine that trains its model on this rank."""

import torch

from ..conf.model_spec import ModelSpec
from ..conf.schema import ExperimentConf
from ..policies.comm import CommPolicy
from ..policies.layout import ParallelLayout
from .balance.balanced import Balanced
from .collectives import backend_of, build_collectives
from .groups import Groups
from .interpreter import Interpreter
from .layout.build import build_layout_engine
from .layout.pace import Rate
from .ledger import Ledger
from .models import Models
from .offload.host import host_memory
from .wrap import CommEngine, wrap_model


def build_engine(
    experiment: ExperimentConf,
    spec: ModelSpec,
    models: Models,
    *,
    layout: ParallelLayout | None,
    policy: CommPolicy,
    groups: Groups,
    ledger: Ledger,
    device: torch.device,
    overlap: bool,
    rate: Rate | None,
    balanced: Balanced | None,
) -> CommEngine:
    """
    Args:
        layout: None: every rank has the whole model.
        policy: Of the mesh of replicas.
        overlap: Whether to communicate beside computation, where `comm.overlap` and plans say so.
        rate, balanced: As of `build_layout_engine`; of no effect without a layout.
    """
    thread = experiment.comm.overlap and overlap
    if layout is None:
        return wrap_model(
            models.new(),
            policy=policy,
            interpreter=Interpreter(groups, ledger, build_collectives(backend_of(device))),
            precision=experiment.precision,
            device=device,
            overlap=thread,
            micro_batches=experiment.batch.accumulation,
            host_memory=host_memory(experiment.offload),
        )
    return build_layout_engine(
        models.new,
        layout=layout,
        policy=policy,
        groups=groups,
        ledger=ledger,
        precision=experiment.precision,
        device=device,
        micro=experiment.batch.micro,
        tokens=experiment.batch.sequence or spec.sequence,
        overlap=thread,
        rate=rate,
        beside=overlap,
        balanced=balanced,
    )
