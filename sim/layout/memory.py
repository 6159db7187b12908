"""What one rank of a layout holds: its part of the model, and of what a micro-batch keeps."""

from ...conf.model_spec import ModelSpec
from ...conf.schema import ExperimentConf
from ...policies.layout import Direction
from ..device import Device, Tally
from ..layers import BlockWork, kernels_of
from .model import LaidModel
from .shapes import BEHIND, BLOCK


def of_one_rank(experiment: ExperimentConf, spec: ModelSpec) -> tuple[int, int, tuple[list[BlockWork], float]]:
    """(parameters, ranks that hold the same ones, what each block keeps and what lies behind the blocks).

    A layer with a plan keeps what its backward reads of its forward; gathered factors are among that (3D). What lies
    between is cut as the activation is.
    """
    device = Device(experiment.cluster.device, element_bytes=experiment.precision.element_bytes)
    model = LaidModel(experiment, spec, device, kernels_of(experiment))
    tallies = [
        sum((s.what for s in model.steps(BLOCK, way) if isinstance(s.what, Tally)), Tally())
        for way in (Direction.forward, Direction.backward)
    ]
    block = BlockWork(
        forward=tallies[0],
        recomputed=Tally(),
        backward=tallies[1],
        saved_bytes=model.saved_bytes(BLOCK),
        working_bytes=model.working_bytes(BLOCK),
    )
    kept = ([block] * spec.layers, model.saved_bytes(BEHIND))
    return model.num_parameters(), model.mesh.num_replicas, kept
