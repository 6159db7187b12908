"""Bytes of model states that one rank holds under a policy (ZeRO, section 3; ZeRO++, section 3.2)."""

from dataclasses import dataclass

from .policy import CommPolicy, Placement


@dataclass(frozen=True, slots=True)
class StateBytes:
    parameters: int
    gradients: int
    optimizer: int
    secondary_shard: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.secondary_shard


def state_bytes(
    policy: CommPolicy,
    *,
    num_parameters: int,
    num_ranks: int,
    element_bytes: int = 2,
    optimizer_bytes: int = 12,
    zero_stage: int | None = None,
) -> StateBytes:
    """States per rank, in bytes.

    Args:
        num_parameters: Of the whole model.
        element_bytes: Of a weight and of a gradient (2: mixed precision).
        optimizer_bytes: A parameter, with the fp32 master copy (12: Adam in mixed precision).
        zero_stage: Which states are sharded; by default what the policy's placement says.
    """
    if zero_stage is None:
        zero_stage = int(getattr(policy, "zero_stage", 3 if policy.placement is Placement.sharded else 0))
    cut = [num_ranks if zero_stage >= stage else 1 for stage in (3, 2, 1)]
    copy = num_parameters * element_bytes // policy.hpz_size if policy.hpz_size > 1 else 0
    return StateBytes(
        parameters=num_parameters * element_bytes // cut[0],
        gradients=num_parameters * element_bytes // cut[1],
        optimizer=num_parameters * optimizer_bytes // cut[2],
        secondary_shard=copy,
    )
