"""How long local work takes on one rank: from a probe where it measured, else from the device's roofline."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..conf.model_flop import Matmul, block_matmuls, recompute_flop, root_matmuls
from ..conf.model_spec import ModelSpec, num_parameters
from ..conf.schema import ClusterConf, ExperimentConf, Precision, Recompute
from ..policies.comm import CommPolicy
from ..policies.comm.memory import state_bytes
from .interpreter import Work

# Reads and writes of one [tokens, hidden] tensor in a block's forward, apart from matmuls: layer norms 2,
# attention's layout 6, residuals 3.5, GELU 8 (on 4 hidden); and of one [heads, sequence, tokens] tensor:
# softmax with mask 6.
ELEMENTWISE_PASSES = 19.5
SOFTMAX_PASSES = 6.0

# Kernels of a block's forward that are no matmul: two norms, softmax, mask, activation, two residuals, a
# transpose
OTHER_KERNELS = 8

# Root matmuls that come before the blocks; all others follow them
EMBED, HEAD = "embed", "head"  # the root's computation before and after the blocks
BEFORE_BLOCKS = ("patch", "embedding_in")

# Bytes that AdamW moves a parameter: reads gradient, weight and two moments, writes weight and moments, all
# fp32
ADAMW_PASS_BYTES = 28
SGD_PASS_BYTES = 12
MOMENTUM_PASS_BYTES = 8
CLIP_PASS_BYTES = 12  # the norm reads the gradient, scaling reads and writes it


@dataclass(frozen=True, slots=True)
class Tally:
    """What a stretch of computation takes of a device."""

    flop: int = 0
    seconds_at_peak: float = 0.0  # matmuls, each bounded by its operations or its bytes
    nbytes: float = 0.0  # of memory-bound kernels
    kernels: int = 0

    def times(self, factor: int) -> "Tally":
        return Tally(
            factor * self.flop, factor * self.seconds_at_peak, factor * self.nbytes, factor * self.kernels
        )

    def plus(self, other: "Tally") -> "Tally":
        return Tally(
            self.flop + other.flop,
            self.seconds_at_peak + other.seconds_at_peak,
            self.nbytes + other.nbytes,
            self.kernels + other.kernels,
        )


class Costs:
    """Durations on one cluster.

    compute: `host.compute_ns` by its key, or the key of the unit's kind ("forward/block"), but never less
    than what is slept out to `emulated_flops_per_s`; without a probe that alone, or the roofline. If the root
    is given in one, its time goes to its head. Codecs: `host.codec_ns` + `host.codec_ns_per_element`, 2 bits
    as 4 and 6 as 8 where they were not measured; else their bytes over `device.memory_Bps`.

    Raises:
        ValueError: If the probe gives compute of some units and not of others.
    """

    def __init__(self, experiment: ExperimentConf, spec: ModelSpec, policy: CommPolicy) -> None:
        self.cluster: ClusterConf = experiment.cluster
        self._experiment = experiment
        self._spec = spec
        self._policy = policy
        self._sequence = experiment.batch.sequence or spec.sequence
        self._known: dict[Work, int] = {}
        self.codec_scale = 1.0  # of encoding and decoding, from `host.codec_step_ns`
        self._check_probe()

    def ns(self, work: Work) -> int:
        """Wall time of `work` on one rank while all ranks do the same."""
        known = self._known.get(work)
        if known is None:
            known = self._known[work] = max(0, round(self._find(work)))
        return known

    def slept_ns(self, work: Work) -> int:
        """The part of `ns` that leaves the core free: computation that is slept out to a rate."""
        rate = self.cluster.emulated_flops_per_s
        if rate is None or work.kind != "compute":
            return 0
        phase, _, unit = work.key.partition("/")
        return round(self._tallies[f"{phase}/{unit.partition('.')[0]}"].flop / rate * 1e9)

    def op_ns(self, op: str, axis: str) -> int:
        return self.cluster.host.op_ns.get(f"{op}/{axis}", 0)

    @cached_property
    def engine_copies(self) -> bool:
        """Whether FSDP's own copies are work of their own: a probed computation holds them already."""
        return not self.cluster.host.compute_ns and self.cluster.emulated_flops_per_s is None

    def _find(self, work: Work) -> float:
        if work.kind == "compute":
            return self._compute_ns(work.key)
        if work.kind == "step":
            return self._step_ns()
        host = self.cluster.host
        if work.kind == "traffic":
            # a probe times the sum that follows a decoding with it, as one kernel does both
            fused = work.key == "reduce" and host.codec_ns_per_element
            return 0.0 if fused else self._memory_ns(work.amount)
        if not work.amount:
            return 0.0
        for bits in (work.bits, {2: 4, 6: 8}.get(work.bits, work.bits)):
            key = f"{work.kind}{bits}"
            if key in host.codec_ns or key in host.codec_ns_per_element:
                probed = host.codec_ns.get(key, 0) + host.codec_ns_per_element.get(key, 0.0) * work.amount
                return self.codec_scale * probed
        element = self._experiment.precision.element_bytes
        return self._memory_ns(work.amount * (element + work.bits / 8)) + self.cluster.device.launch_ns

    def _memory_ns(self, nbytes: float) -> float:
        return nbytes / self.cluster.device.memory_Bps * 1e9

    def _compute_ns(self, key: str) -> float:
        probed = self.cluster.host.compute_ns
        phase, _, unit = key.partition("/")
        kind = unit.partition(".")[0]
        slept = self.slept_ns(Work("compute", key))
        if not probed:
            emulated = self.cluster.emulated_flops_per_s is not None
            return slept if emulated else self._roofline_ns(self._tallies[f"{phase}/{kind}"])
        for name in (key, f"{phase}/{kind}"):
            if name in probed:
                return max(slept, probed[name])
        if kind != HEAD:
            return slept
        # the probe gives the root as one: what its embedding does not sleep is the head's
        return max(slept, probed.get(f"{phase}/root", 0) - self.slept_ns(Work("compute", f"{phase}/{EMBED}")))

    def _roofline_ns(self, tally: Tally) -> float:
        device = self.cluster.device
        matmul_ns = tally.seconds_at_peak / device.matmul_efficiency * 1e9
        return matmul_ns + self._memory_ns(tally.nbytes) + tally.kernels * device.launch_ns

    def _step_ns(self) -> float:
        if "step" in self.cluster.host.compute_ns:
            return self.cluster.host.compute_ns["step"]
        optimizer = self._experiment.optimizer
        per_parameter = ADAMW_PASS_BYTES
        if optimizer.name == "sgd":
            per_parameter = SGD_PASS_BYTES + (MOMENTUM_PASS_BYTES if optimizer.momentum else 0)
        if self._experiment.train.gradient_clipping or self._experiment.precision is Precision.fp16:
            per_parameter += CLIP_PASS_BYTES
        # state_bytes with 1 byte a parameter counts the parameters that this rank steps
        owned = state_bytes(
            self._policy,
            num_parameters=num_parameters(self._spec),
            num_ranks=self.cluster.num_ranks,
            optimizer_bytes=1,
        ).optimizer
        return self._memory_ns(owned * per_parameter)

    @cached_property
    def _tallies(self) -> dict[str, Tally]:
        spec, micro, sequence = self._spec, self._experiment.batch.micro, self._sequence
        element = self._experiment.precision.element_bytes
        tokens = micro * sequence
        passes = ELEMENTWISE_PASSES * tokens * spec.hidden + SOFTMAX_PASSES * spec.heads * sequence * tokens
        other = Tally(nbytes=passes * element, kernels=OTHER_KERNELS)
        block = self._matmuls(block_matmuls(spec, sequence=sequence, micro=micro)).plus(other)
        root = root_matmuls(spec, sequence=sequence, micro=micro)
        # token and position are looked up and added
        lookup = Tally(nbytes=3.0 * tokens * spec.hidden * element, kernels=2)
        # the head's norm, and a loss in fp32 that reads the logits twice and writes them once
        classes = spec.vocab if spec.head in ("lm", "masked_lm", "pretraining") else spec.classes
        loss = Tally(nbytes=2.0 * tokens * spec.hidden * element + 12.0 * tokens * classes, kernels=4)
        embed = self._matmuls([m for m in root if m.kind in BEFORE_BLOCKS]).plus(lookup)
        head = self._matmuls([m for m in root if m.kind not in BEFORE_BLOCKS]).plus(loss)
        again = 1 if self._experiment.recompute is Recompute.full else 0
        return {
            "forward/block": block,
            "backward/block": block.times(2 + again),
            "forward/embed": embed,
            "backward/embed": embed.times(2),
            "forward/head": head,
            "backward/head": head.times(2),
        }

    def _matmuls(self, products: Any) -> Tally:
        device, element = self.cluster.device, self._experiment.precision.element_bytes
        total = Tally()
        for p in products:
            assert isinstance(p, Matmul)
            moved = p.num * element * (p.m * p.k + p.k * p.n + p.m * p.n)
            # bytes are not slowed by the matmul's efficiency, which divides the whole later
            at_peak = max(p.flop / device.flop_per_s, moved / device.memory_Bps * device.matmul_efficiency)
            total = total.plus(Tally(p.flop, at_peak, 0.0, 1))
        return total

    def _check_probe(self) -> None:
        probed = self.cluster.host.compute_ns
        if not probed:
            return
        for phase in ("forward", "backward"):
            named = [f"{phase}/block.{i}" for i in range(self._spec.layers)]
            missing = [key for key in named if key not in probed]
            if missing and f"{phase}/block" not in probed:
                raise ValueError(
                    f"cluster.host.compute_ns lacks {missing[0]!r}; give it, or {phase + '/block'!r} for all "
                    "blocks, or leave compute_ns empty for the device's roofline"
                )

    def model_flop(self) -> int:
        """Operations of one rank's step: forward and backward, without recomputation."""
        forward = self._tallies["forward/embed"].flop + self._tallies["forward/head"].flop
        forward += self._spec.layers * self._tallies["forward/block"].flop
        return 3 * forward * self._experiment.batch.accumulation

    def hardware_flop(self) -> int:
        """`model_flop` with what is recomputed."""
        batch = self._experiment.batch
        again = recompute_flop(
            self._spec,
            sequence=self._sequence,
            recompute=self._experiment.recompute.value,
            micro=batch.micro,
        )
        return self.model_flop() + again * batch.accumulation


def with_value(cluster: ClusterConf, key: str, value: Any) -> ClusterConf:
    """`cluster` with one key changed, such as "device.launch_ns".

    Raises:
        ValueError: If there is no such key.
    """
    part, _, name = key.rpartition(".")
    target = getattr(cluster, part, None) if part else cluster
    if target is None or not hasattr(target, name):
        raise ValueError(f"cluster.guesses has {key!r}, which is no key of a cluster")
    changed: Any = replace(target, **{name: value})
    parts: dict[str, Any] = {part: changed}
    return replace(cluster, **parts) if part else changed
