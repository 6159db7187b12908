"""What DeepSpeed's ZeRO-3 holds beside its states: gathered weights, by the coordinator's own count, and gradients."""

from ...conf.model_spec import ModelSpec
from ...conf.schema import ExperimentConf
from .coordinator import Coordinator
from .modules import network


def buffer_bytes(experiment: ExperimentConf, spec: ModelSpec) -> tuple[int, int]:
    """The most weights gathered at a time, and the gradients that wait for their reduction.

    Weights count from the hook that asks for them until one drops them. Gradients: those of one bucket, or of one
    parameter that is larger, while the next are computed.
    """
    conf, element = experiment.deepspeed, experiment.precision.element_bytes
    found = network(spec, experiment.recompute)
    numel = [parameter.numel for parameter in found.parameters]
    coordinator = Coordinator(found, conf)
    live = most = sum(numel[at] for at in coordinator.persistent)
    for stop in coordinator.micro_batch():
        live += sum(numel[at] for at in (*stop.fetched, *stop.prefetched))
        most = max(most, live)
        live -= sum(numel[at] for at in stop.released)
    bucket = min(conf.reduce_bucket_size, sum(numel))
    return element * most, element * (max(bucket, *numel) + max(numel))
