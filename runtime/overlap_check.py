"""Whether reductions may be queued. Imports no torch."""

from collections.abc import Sequence

from ..conf.schema import Precision
from ..policies.comm import CommPolicy, GradientsReady


def check_overlap(
    policy: CommPolicy, units: Sequence[str], *, precision: Precision, micro_batches: int
) -> None:
    """Refuse what a queued reduction would spoil: gradients that are read again before it has ended.

    FSDP2 keeps the reduction's output as the gradient at once. Under fp16 it divides it afterwards; a second
    reduction into the same gradient adds it up.

    Raises:
        ValueError: Naming the keys, and what would do.
    """
    if precision is Precision.fp16:
        raise ValueError(
            "comm.overlap=true with precision=fp16: FSDP2 divides a gradient before its reduction has "
            "ended; use bf16, or comm.overlap=false"
        )
    early = any(
        policy.decide(GradientsReady(unit, index, micro_batches)) is not None
        for unit in units
        for index in range(micro_batches - 1)
    )
    if early:
        raise ValueError(
            f"comm.overlap=true with batch.accumulation={micro_batches}: {policy.name!r} reduces every "
            "micro-batch, and FSDP2 adds up gradients whose reduction has not ended; use accumulation 1, or "
            "comm.overlap=false"
        )
