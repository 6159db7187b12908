"""How much of a long training is progress, when nodes fail and work since the last checkpoint is lost."""

import math
from dataclasses import dataclass

from ..conf.schema import GoodputConf


@dataclass(frozen=True, slots=True)
class Goodput:
    """Shares of wall time; they add up to 1."""

    useful: float
    checkpoint: float  # writing checkpoints
    lost: float  # work done again, and restarts
    interval_s: float  # of useful work between two checkpoints
    failures_per_day: float

    def plain(self) -> dict[str, float]:
        return {
            "useful": self.useful,
            "checkpoint": self.checkpoint,
            "lost": self.lost,
            "interval_s": self.interval_s,
            "failures_per_day": self.failures_per_day,
        }


def goodput_of(conf: GoodputConf, *, num_nodes: int) -> Goodput | None:
    """For a cluster of `num_nodes`; None where no MTBF is given."""
    if conf.node_mtbf_h is None:
        return None
    return goodput(
        mtbf_s=conf.node_mtbf_h * 3600 / num_nodes,
        checkpoint_s=conf.checkpoint_s,
        restart_s=conf.restart_s,
        interval_s=conf.interval_s,
    )


def goodput(
    *, mtbf_s: float, checkpoint_s: float, restart_s: float = 0.0, interval_s: float | None = None
) -> Goodput:
    """Expected shares of wall time under failures that come at random (Daly 2006, equation 20).

    Args:
        mtbf_s: Mean time between failures of the whole system.
        checkpoint_s: Time that training stands still for one checkpoint.
        restart_s: From a failure until training goes on.
        interval_s: Useful work between two checkpoints; None: the best one, `best_interval_s`.

    Raises:
        ValueError: If a time is negative, or one that must be positive is 0.
    """
    if mtbf_s <= 0:
        raise ValueError(f"mtbf_s={mtbf_s:g} must be > 0")
    if checkpoint_s < 0 or restart_s < 0:
        raise ValueError(f"checkpoint_s={checkpoint_s:g} and restart_s={restart_s:g} must be >= 0")
    if interval_s is None:
        if not checkpoint_s:
            raise ValueError(
                "checkpoint_s=0 makes any interval_s > 0 worse than a shorter one; give interval_s"
            )
        interval_s = best_interval_s(mtbf_s, checkpoint_s)
    if interval_s <= 0:
        raise ValueError(f"interval_s={interval_s:g} must be > 0")
    # wall time of one interval and its checkpoint, with all that is lost and done again
    exponent = (interval_s + checkpoint_s) / mtbf_s
    if exponent + restart_s / mtbf_s > 700:  # beyond the range of a double: it never gets there
        return Goodput(0.0, 0.0, 1.0, interval_s, 86400 / mtbf_s)
    wall_s = mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1(exponent)
    useful, checkpoint = interval_s / wall_s, checkpoint_s / wall_s
    return Goodput(useful, checkpoint, 1.0 - useful - checkpoint, interval_s, 86400 / mtbf_s)


def best_interval_s(mtbf_s: float, checkpoint_s: float) -> float:
    """Useful work between checkpoints that wastes least (Daly 2006, equation 37; Young 1974 is its first term)."""
    if checkpoint_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = checkpoint_s / (2 * mtbf_s)
    return math.sqrt(2 * checkpoint_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint_s
