"""ddp, ps, ZeRO 1-3 and ZeRO++ as one parametrised family (arXiv 1910.02054; 2306.10209, section 3)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...conf.schema import GradientPath
from ..mesh import HPZ, LOCAL, NODE, WORLD
from ..plan import (
    GATHER_STREAM,
    REDUCE_STREAM,
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Dequantize,
    LoadCopy,
    Plan,
    Quantize,
    Reduce,
    ReduceOp,
    ReduceScatter,
    ReduceTo,
    Reorder,
    Step,
    StoreCopy,
)
from .policy import CommEvent, GradientsReady, Phase, Placement, WeightsChanged, WeightsNeeded


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroComm:
    """The family; `build_comm` makes one from a config and resolves what depends on the cluster.

    Inter-node volume of a step with k micro-batches, in units of M (bytes of the weights on the wire,
    many nodes): ddp and zero1 2, zero2 k + 1, zero3 3k, ZeRO++ 0.75k; with `copy_outlives_micro_batch`
    0.5 + 0.25k.
    """

    name: str
    zero_stage: int = 3
    parameter_server: bool = False
    weight_bits: int = 0  # 0: gathers are not quantized
    weight_block: int = 2048
    hpz_size: int = 1
    quantize_node_copy: bool = False
    copy_outlives_micro_batch: bool = False
    gradient_path: GradientPath | None = None  # None: gradients are not quantized
    gradient_bits: Sequence[int] = field(default=(4, 4))
    gradient_block: int = 256
    gradient_chunks: int = 1  # pieces that follow each other through the hops
    fused_kernels: bool = True
    ranks_per_node: int = 1
    _answers: dict[tuple[object, ...], Plan | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def placement(self) -> Placement:
        if self.parameter_server:
            return Placement.server
        return Placement.sharded if self.zero_stage else Placement.replicated

    @property
    def reshard_after_forward(self) -> bool:
        return self.zero_stage == 3

    def decide(self, event: CommEvent) -> Plan | None:
        """The answer is the same for every unit, and made once."""
        key: tuple[object, ...] = ()
        if isinstance(event, WeightsNeeded):
            key = (event.phase, event.copy_valid)
        elif isinstance(event, GradientsReady):
            key = (event.micro_batch, event.num_micro_batches)
        if key not in self._answers:
            self._answers[key] = self._answer(event)
        return self._answers[key]

    def _answer(self, event: CommEvent) -> Plan | None:
        if isinstance(event, WeightsNeeded):
            return self._gather(event)
        if isinstance(event, GradientsReady):
            return self._reduce(event)
        return self._publish(event)

    def _gather(self, event: WeightsNeeded) -> Plan | None:
        if self.placement is not Placement.sharded:
            return None
        serves = event.phase is Phase.backward or self.copy_outlives_micro_batch
        if self.hpz_size > 1 and event.copy_valid and serves:
            inside: tuple[Step, ...] = (AllGather(axis=HPZ),)
            if self.quantize_node_copy:
                inside = self._quantized(inside)
            return Plan((LoadCopy(axis=HPZ), *inside), GATHER_STREAM)
        steps = self._quantized((AllGather(axis=WORLD),))
        if self.hpz_size > 1:
            steps = (*steps, StoreCopy(axis=HPZ))
        return Plan(steps, GATHER_STREAM)

    def _quantized(self, steps: tuple[Step, ...]) -> tuple[Step, ...]:
        """qwZ around a gather, if it is on."""
        if not self.weight_bits:
            return steps
        quantize = Quantize(bits=self.weight_bits, block=self.weight_block, per_parameter=False)
        return (quantize, *steps, Dequantize())

    def _reduce(self, event: GradientsReady) -> Plan | None:
        last = event.micro_batch == event.num_micro_batches - 1
        if self.zero_stage < 2 and not last:
            return None  # gradients add up on this rank until the last micro-batch
        if self.parameter_server:
            return Plan((ReduceTo(axis=WORLD),), REDUCE_STREAM)
        if self.zero_stage == 0:
            return Plan((AllReduce(axis=WORLD),), REDUCE_STREAM)
        if self.gradient_path is None:
            return Plan((ReduceScatter(axis=WORLD),), REDUCE_STREAM)
        first, second = self.gradient_bits[0], self.gradient_bits[-1]
        if self.gradient_path is GradientPath.ring:
            ring = ReduceScatter(axis=WORLD, hop_bits=first, hop_block=self.gradient_block)
            return Plan((ring,), REDUCE_STREAM)
        if self.gradient_path is GradientPath.one_hop:
            return Plan(self._hop(WORLD, first, ReduceOp.mean), REDUCE_STREAM)
        if self.ranks_per_node == 1:
            return Plan(self._hop(NODE, first, ReduceOp.mean), REDUCE_STREAM)
        hops = self._hop(LOCAL, first, ReduceOp.sum) + self._hop(NODE, second, ReduceOp.mean)
        reorder = Reorder(fused=self.fused_kernels, chunks=self.gradient_chunks)
        return Plan((reorder, *hops), REDUCE_STREAM)

    def _hop(self, axis: str, bits: int, op: ReduceOp) -> tuple[Step, ...]:
        """In chunks each hop has a stream of its own: a chunk is in the node while the one before it is between nodes,
        and the kernels of others run beside both.
        """
        chunks = self.gradient_chunks
        stream = f"{REDUCE_STREAM}_{axis}" if chunks > 1 else ""
        return (
            Quantize(bits=bits, block=self.gradient_block, exact_own=axis, chunks=chunks),
            AllToAll(axis=axis, stream=stream, chunks=chunks),
            Dequantize(fused=self.fused_kernels, chunks=chunks),
            Reduce(op=op, chunks=chunks),
        )

    def _publish(self, event: WeightsChanged) -> Plan | None:
        return Plan((Broadcast(axis=WORLD),), GATHER_STREAM) if self.parameter_server else None
