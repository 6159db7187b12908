"""A tensor group in closed form: ranks of known slowness compute what a policy answers, and it is told their times."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from twinbed.conf.model_spec import spec_from_keys
from twinbed.conf.schema import BalanceConf
from twinbed.policies.balance import (
    Assignment,
    BalanceEvent,
    BlockWork,
    GroupMeasured,
    Half,
    block_work,
    describe_balance_actions,
)
from twinbed.policies.balance.build import build_balance
from twinbed.policies.balance.costs import predicted_ns
from twinbed.policies.balance.speeds import kept_share

PLENTY = 1 << 40  # bytes
OVERHEAD = 0.04  # of ranks that prune, by the time of their own units

# Four ranks of 16 units in each half, for times that are counted by hand
RANKS, OWN = 4, 16
SIXTEEN = BlockWork(
    ranks=RANKS,
    blocks=2,
    tokens=8,
    units=dict.fromkeys(Half, OWN),
    unit_numel=dict.fromkeys(Half, 128),
    unit_features=dict.fromkeys(Half, 1),
    unit_flop=dict.fromkeys(Half, 2 * 8 * 128),
    hidden=64,
    element_bytes=4,
)


def work_of(ranks: int, *, heads: int = 64, blocks: int = 2, hidden: int = 1024) -> BlockWork:
    keys = {"family": "gpt", "layers": blocks, "hidden": hidden, "heads": heads, "vocab": 64, "sequence": 64}
    return block_work(spec_from_keys(keys), ranks=ranks, blocks=blocks, micro=8, sequence=64, element_bytes=4)


def measured(
    step: int,
    slowness: Sequence[float],
    assignment: Assignment,
    *,
    noise: float = 0.0,
    rng: np.random.Generator | None = None,
    free_bytes: int = PLENTY,
    overhead: float = OVERHEAD,
) -> GroupMeasured:
    """Times in proportion to what each rank computed, and what pruning takes beside.

    Args:
        noise: Standard deviation of each rank's own.
    """
    work = assignment.work
    times = []
    for half in Half:
        off = np.ones(work.ranks) if rng is None else np.maximum(0.3, 1 + noise * rng.normal(size=work.ranks))
        shares = [kept_share(assignment, half, rank) for rank in range(work.ranks)]
        times.append(
            tuple(
                round(
                    slow
                    * off[rank]
                    * (
                        assignment.computed(half, rank) * shares[rank]
                        + (overhead * work.units[half] if shares[rank] < 1 else 0)
                    )
                    * work.unit_flop[half]
                    * 1e-2
                )
                for rank, slow in enumerate(slowness)
            )
        )
    return GroupMeasured(step, times[0], times[1], (free_bytes,) * work.ranks)


@dataclass
class Group:
    """Ranks with one policy."""

    work: BlockWork
    conf: BalanceConf
    noise: float = 0.0
    seed: int = 0
    free_bytes: int = PLENTY
    overhead: float = OVERHEAD
    log: list[tuple[BalanceEvent, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.policy = build_balance(self.conf, self.work)
        self.assignment = Assignment(self.work)
        self._rng = np.random.default_rng(self.seed) if self.noise else None

    def tell(self, event: BalanceEvent) -> bool:
        """Whether the answer changed what is in force."""
        answer = self.policy.decide(event)
        self.log.append((event, describe_balance_actions(answer)))
        if answer is None:
            return False
        self.assignment = Assignment(self.work, answer)
        return True

    def period(self, slowness: Sequence[float]) -> bool:
        return self.tell(
            measured(
                len(self.log),
                slowness,
                self.assignment,
                noise=self.noise,
                rng=self._rng,
                free_bytes=self.free_bytes,
                overhead=self.overhead,
            )
        )

    def periods(self, phases: Sequence[Sequence[float]]) -> Iterator[bool]:
        for slowness in phases:
            yield self.period(slowness)

    def true_speedup(self, slowness: Sequence[float]) -> float:
        """Of products over an even split, by real speeds, movement free."""
        unit_ns = {half: [slow * self.work.unit_flop[half] for slow in slowness] for half in Half}
        even = predicted_ns(Assignment(self.work), unit_ns, {})
        return even / predicted_ns(self.assignment, unit_ns, {}, self.overhead)
