"""Uneven micro-batches: which sequences of each are this replica's, by what all replicas measured."""

import torch
import torch.distributed as dist

from ...policies.balance import MEASURE_STREAM, BalancePolicy, ReplicasMeasured, ShareSequences, replica_ns
from ...policies.mesh import DATA, PIPELINE, WORLD
from ..groups import Groups
from ..laps import Laps
from ..ledger import Ledger
from .measured import computed_ns
from .room import Room


class SequenceShares:
    """Of one rank; all ranks hold equal ones.

    Args:
        period: Steps between two measurements.
        micro: Sequences of a micro-batch of one replica, in an even split.
        micro_batches: Of a step.
        room: What this rank's memory has left for more of them.

    Attributes:
        counts: [replicas], sequences of a micro-batch that each takes.
    """

    def __init__(
        self,
        policy: BalancePolicy,
        *,
        groups: Groups,
        ledger: Ledger,
        laps: Laps,
        device: torch.device,
        period: int,
        micro: int,
        micro_batches: int,
        room: Room,
    ) -> None:
        self._policy, self._groups, self._ledger, self._laps = policy, groups, ledger, laps
        self._device, self._period, self._room = device, period, room
        self._micro, self._micro_batches = micro, micro_batches
        mesh = groups.mesh
        self._replica_of = [mesh.index(DATA, rank) for rank in range(mesh.num_ranks)]
        self._stage_of = [mesh.index(PIPELINE, rank) for rank in range(mesh.num_ranks)]
        self._replica = self._replica_of[groups.rank]
        self.counts = (micro,) * mesh.data
        self._steps_ns: list[int] = []  # computed, of each step since the last decision
        self._num_measured = 0
        self._first_lap = self._first_span = 0

    @property
    def mine(self) -> range:
        """Of the sequences of all replicas' micro-batches, this one's."""
        first = sum(self.counts[: self._replica])
        return range(first, first + self.counts[self._replica])

    @property
    def weight(self) -> float:
        """What a mean over this replica's sequences counts in the mean over all, relative to an even split. All
        sequences have as many labelled tokens.
        """
        return self.counts[self._replica] / self._micro

    def step_done(self, step: int) -> bool:
        """After the optimizer step of step `step`, on all ranks: measure; whether shares are others from now on."""
        self._laps.lap("step")
        self._ledger.at(iteration=step, phase="step", layer="")
        self._measure()
        if (step + 1) % self._period:
            return False
        event = self._exchange(step)
        self._steps_ns.clear()
        answer = self._policy.decide(event)
        self._ledger.decided_balance(event, answer)
        before = self.counts
        for action in answer or ():
            if not isinstance(action, ShareSequences):
                raise ValueError(
                    f"balancing policy {self._policy.name!r} answers {action}: must be ShareSequences"
                )
            self._check(action)
            self.counts = action.counts
        return self.counts != before

    def _measure(self) -> None:
        laps, first = self._laps.laps, self._ledger.num_spans
        computed = computed_ns(laps[self._first_lap :], self._ledger.spans_from(self._first_span))
        self._first_lap, self._first_span = len(laps), first
        self._num_measured += 1
        if self._num_measured == 2:  # in a run's first step kernels are chosen and memory is fetched
            self._steps_ns.clear()
        self._steps_ns.append(computed)

    def _exchange(self, step: int) -> ReplicasMeasured:
        mean_ns = sum(self._steps_ns) // len(self._steps_ns)
        room = max(0, self._room.beside(self.counts[self._replica]))
        own = torch.tensor([mean_ns, room], dtype=torch.int64, device=self._device)
        world = self._groups[WORLD]
        found = own.new_empty(world.size, own.numel())
        with self._ledger.collective(
            op="all_gather",
            axis=WORLD,
            group=world.ranks,
            payload_bytes=found.numel() * found.element_size(),
            stream=MEASURE_STREAM,
            layer="",
        ):
            dist.all_gather_single(found.view(-1), own, group=world.handle)
        took_ns = [[0] * (max(self._stage_of) + 1) for _ in self.counts]
        rooms = [self._micro * len(self.counts)] * len(self.counts)
        for replica, stage, (ns, room) in zip(self._replica_of, self._stage_of, found.tolist(), strict=True):
            took_ns[replica][stage] = max(took_ns[replica][stage], ns)
            rooms[replica] = min(rooms[replica], room)
        return ReplicasMeasured(
            step + 1, tuple(replica_ns(stages, self._micro_batches) for stages in took_ns), tuple(rooms)
        )

    def _check(self, action: ShareSequences) -> None:
        total = self._micro * len(self.counts)
        if len(action.counts) != len(self.counts) or sum(action.counts) != total or min(action.counts) < 1:
            raise ValueError(
                f"balancing policy {self._policy.name!r} answers {action}: must be {len(self.counts)} numbers >= 1 of "
                f"the sum {total}"
            )
