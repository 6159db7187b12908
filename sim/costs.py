"""How long local work takes on one rank: from a probe where it measured, else from the device's roofline."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ..conf.model_flop import recompute_flop
from ..conf.model_spec import ModelSpec, num_parameters
from ..conf.schema import ClusterConf, Engine, ExperimentConf, Precision, Recompute
from ..policies.comm import CommPolicy
from ..policies.comm.memory import state_bytes
from .device import Device, Tally
from .interpreter import FP32_BYTES, PASSES, REQUANTIZE, SUM, Work
from .layers import block_modules, block_work, kernels_of
from .optimizer import pass_bytes
from .root_layers import embed_work, head_work

if TYPE_CHECKING:
    from .layout.costs import LaidCosts
    from .megatron.costs import LayoutCosts

EMBED, HEAD = "embed", "head"  # the root's computation before and after the blocks

# Bytes a parameter: the norm reads the gradient, scaling reads and writes it
CLIP_PASS_BYTES = 12


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
        self.offload = experiment.offload
        self._sequence = experiment.batch.sequence or spec.sequence
        self._known: dict[Work, int] = {}
        self.device = Device(
            self.cluster.device,
            element_bytes=experiment.precision.element_bytes,
            num_devices=self.cluster.num_ranks,
        )
        self.kernels = kernels_of(experiment)
        self._slowdowns: dict[str, float] = {}
        self._others: dict[int, Costs] = {}  # of other numbers of sequences
        self._op_keys: dict[tuple[str, str], str] = {}
        self.codec_scale = 1.0  # of encoding and decoding, from `host.codec_step_ns`
        self._check_probe()

    def ns(self, work: Work) -> int:
        """Wall time of `work` on one rank while all ranks do the same."""
        known = self._known.get(work)
        if known is None:
            of = self._of_sequences(work)
            found = max(0, round(self._find(work))) if of is self else of.ns(work)
            known = self._known[work] = found
        return known

    def slept_ns(self, work: Work) -> int:
        """The part of `ns` that leaves the core free: computation that is slept out to a rate."""
        rate = self.cluster.emulated_flops_per_s
        if rate is None or work.kind != "compute":
            return 0
        of = self._of_sequences(work)
        if of is not self:
            return of.slept_ns(work)
        return round(self.tally(work.key).flop / rate * 1e9)

    def _of_sequences(self, work: Work) -> "Costs":
        """Of micro-batches of another size; what was measured of `batch.micro` sequences takes in proportion."""
        batch, count = self._experiment.batch, work.amount
        if work.kind != "compute" or count in (0, batch.micro):
            return self
        if count not in self._others:
            host = self.cluster.host
            probed = {
                key: round(ns * count / batch.micro) if "/" in key else ns
                for key, ns in host.compute_ns.items()
            }
            cluster = replace(self.cluster, host=replace(host, compute_ns=probed))
            experiment = replace(
                self._experiment, cluster=cluster, batch=replace(batch, micro=count, global_sequences=None)
            )
            self._others[count] = Costs(experiment, self._spec, self._policy)
        return self._others[count]

    @cached_property
    def computing(self) -> float:
        """The share of a step in which a rank of a pipeline computes, bubbles left out; 1 without one."""
        layout = self.laid.model.layout if self.laid is not None else None
        if layout is None or layout.stages == 1:
            return 1.0
        passes = layout.micro_batches * layout.chunks
        return passes / (passes + layout.stages - 1)

    def tally(self, key: str) -> Tally:
        """What the computation of one unit takes of the device; `key` is such as "forward/block.0".

        "forward/block.0#out" is a part of it: what leads up to one linear product or norm, and the residual
        behind it. The parts of "forward" add up to one forward pass, those of "backward" to one backward pass
        without what is recomputed. Where a layout shares the model out, "forward/block.0#3" is the fourth step.
        """
        if self.laid is not None:
            return self.laid.tally(key)
        if "#" in key:
            return self._part(key)
        phase, _, unit = key.partition("/")
        kind, _, layer = unit.partition(".")
        known = self._tallies
        if layer and int(layer) % 2 == 0:
            return known.get(f"{phase}/{kind}.even", known[f"{phase}/{kind}"])
        return known[f"{phase}/{kind}"]

    def _part(self, key: str) -> Tally:
        unit, _, name = key.partition("#")
        forward, backward = self._parts[name]
        return forward if unit.startswith("forward/") else backward

    @cached_property
    def _parts(self) -> dict[str, tuple[Tally, Tally]]:
        """Of a block, by the linear product or norm that ends each: forward and backward."""
        parts: dict[str, tuple[Tally, Tally]] = {}
        forward, backward, last = Tally(), Tally(), ""
        for module in block_modules(
            self._spec,
            self.device,
            sequence=self._sequence,
            micro=self._experiment.batch.micro,
            kernels=self.kernels,
        ):
            forward, backward = forward + module.forward, backward + module.backward
            ends = module.linear or module.name.startswith("norm")
            if ends or (module.name.startswith("residual") and last):
                before = parts.get(last, (Tally(), Tally())) if not ends else (Tally(), Tally())
                last = module.name if ends else last
                parts[last] = (before[0] + forward, before[1] + backward)
                forward, backward = Tally(), Tally()
        return parts

    def slowdown(self, work: Work) -> float:
        """How many times as long `work` takes while a collective runs; what was probed holds that already."""
        if work.kind != "compute" or not self.slows_down:
            return 1.0
        of = self._of_sequences(work)
        if of is not self:
            return of.slowdown(work)
        known = self._slowdowns.get(work.key)
        if known is None:
            known = self._slowdowns[work.key] = self.device.slowdown(self.tally(work.key))
        return known

    @cached_property
    def slows_down(self) -> bool:
        """Whether any computation takes longer while a collective runs."""
        device = self.cluster.device
        return self.engine_copies and (device.busy_slowdown > 1 or device.collective_sms > 0)

    def op_ns(self, op: str, axis: str, message_bytes: int) -> int:
        """The fixed cost of one collective: between two measured sizes on a line, beyond them as at the nearest."""
        key = self._op_keys.get((op, axis)) or self._op_key(op, axis)
        points = self._op_points.get(key)
        if points is None:
            return self.cluster.host.op_ns.get(key, 0)
        sizes, costs_ns = points
        return round(float(np.interp(message_bytes, sizes, costs_ns)))

    def _op_key(self, op: str, axis: str) -> str:
        key = f"{op}/{axis}"
        if self.laid is not None and self.cluster.host.op_ns:
            known = (*self._op_points, *self.cluster.host.op_ns)
            key = next((each for each in self.laid.alike(op, axis) if each in known), key)
        self._op_keys[op, axis] = key
        return key

    @cached_property
    def _op_points(self) -> dict[str, tuple[list[int], list[int]]]:
        """Sizes and fixed costs by "op/axis", of the keys of `host.op_ns` that name a size."""
        found: dict[str, list[tuple[int, int]]] = {}
        for key, cost_ns in self.cluster.host.op_ns.items():
            kind, _, size = key.rpartition("/")
            if size.isdigit():
                found.setdefault(kind, []).append((int(size), cost_ns))
        return {
            kind: ([size for size, _ in sorted(points)], [cost for _, cost in sorted(points)])
            for kind, points in found.items()
        }

    @cached_property
    def engine_copies(self) -> bool:
        """Whether FSDP's own copies are work of their own: a probed computation holds them already."""
        return not self.cluster.host.compute_ns and self.cluster.emulated_flops_per_s is None

    def _find(self, work: Work) -> float:
        if work.kind == "compute":
            return self._compute_ns(work.key)
        if work.kind == "step":
            return self._step_ns() * (work.amount / self.stepped_elements if work.key else 1.0)
        if work.kind == "layout":
            return self._layout.ns(work)
        if work.kind == "fixed":
            return work.amount
        host = self.cluster.host
        if work.kind == "traffic":
            kernel = Work("decode", REQUANTIZE, work.bits)
            probed = work.key == "fused" and any(
                key in host.codec_ns_per_element for key in self._probed_keys(kernel)
            )  # then it was measured with the rest of its kernel
            scale = self.codec_scale if work.key in PASSES else 1.0
            return 0.0 if probed else scale * self._memory_ns(work.amount)
        if not work.amount:
            return 0.0
        for key in self._probed_keys(work):
            if key in host.codec_ns or key in host.codec_ns_per_element:
                each = host.codec_ns_per_element.get(key, 0.0)
                return self.codec_scale * (host.codec_ns.get(key, 0) + each * work.amount)
        fused = work.key in (SUM, REQUANTIZE)
        element = FP32_BYTES if work.key else self._experiment.precision.element_bytes
        moved = work.amount * (work.bits / 8 + (0 if fused else element))
        launched = not (fused and work.kind == "encode")  # with the decoding
        return self._memory_ns(moved) + (self.cluster.device.launch_ns if launched else 0)

    @staticmethod
    def _probed_keys(work: Work) -> list[str]:
        """Of `host.codec_ns`, the first that there is. 2 and 6 bits stand for 4 and 8."""
        keys = [f"{work.kind}{bits}" for bits in (work.bits, {2: 4, 6: 8}.get(work.bits, work.bits))]
        return [f"{work.key}_{key}" for key in keys] + keys if work.key == REQUANTIZE else keys

    @cached_property
    def laid(self) -> "LaidCosts | None":
        """Of ranks that share the work of a replica under engine=fsdp2; None: there are none."""
        if self._experiment.engine is not Engine.fsdp2 or self._ranks_a_replica == 1:
            return None
        from .layout.costs import LaidCosts

        return LaidCosts(self._experiment, self._spec, self.device, self.kernels)

    @cached_property
    def _layout(self) -> "LayoutCosts":
        """Of what engine=megatron asks for; other engines do not import it."""
        from .megatron.costs import LayoutCosts

        return LayoutCosts(self._experiment, self._spec, self)

    def _memory_ns(self, nbytes: float) -> float:
        return self.device.memory_ns(nbytes)

    def _compute_ns(self, key: str) -> float:
        if self.laid is not None:
            return self.laid.ns(key, slept_ns=self.slept_ns(Work("compute", key)))
        probed = self.cluster.host.compute_ns
        phase, _, unit = key.partition("/")
        kind = unit.partition(".")[0]
        slept = self.slept_ns(Work("compute", key))
        if not probed:
            emulated = self.cluster.emulated_flops_per_s is not None
            return slept if emulated else self.device.time_ns(self.tally(key))
        for name in (key, f"{phase}/{kind}"):
            if name in probed:
                return max(slept, probed[name])
        if kind != HEAD:
            return slept
        # the probe gives the root as one: what its embedding does not sleep is the head's
        return max(slept, probed.get(f"{phase}/root", 0) - self.slept_ns(Work("compute", f"{phase}/{EMBED}")))

    def _step_ns(self) -> float:
        if "step" in self.cluster.host.compute_ns:
            return self.cluster.host.compute_ns["step"]
        per_parameter = pass_bytes(self._experiment.optimizer)
        if self._experiment.train.gradient_clipping or self._experiment.precision is Precision.fp16:
            per_parameter += CLIP_PASS_BYTES
        return self._memory_ns(self.stepped_elements * per_parameter)

    @cached_property
    def stepped_elements(self) -> int:
        """Parameters that one rank steps."""
        # state_bytes with 1 byte a parameter counts them
        held, ranks = num_parameters(self._spec), self.cluster.num_ranks
        if self.laid is not None:
            held, ranks = self.laid.model.num_parameters(), self.laid.model.mesh.num_replicas
        return state_bytes(self._policy, num_parameters=held, num_ranks=ranks, optimizer_bytes=1).optimizer

    @cached_property
    def _tallies(self) -> dict[str, Tally]:
        spec, device, micro, kernels = self._spec, self.device, self._experiment.batch.micro, self.kernels
        sequence, recompute = self._sequence, self._experiment.recompute
        by_layer = recompute is Recompute.selective_layer
        odd, *even = (
            block_work(
                spec,
                device,
                sequence=sequence,
                micro=micro,
                recompute=recompute.value,
                kernels=kernels,
                layer=layer,
            )
            for layer in ((1, 0) if by_layer else (1,))
        )
        embed = embed_work(spec, device, sequence=sequence, micro=micro, kernels=kernels)
        head = head_work(spec, device, sequence=sequence, micro=micro, kernels=kernels)
        tallies = {
            "forward/block": odd.forward,
            "backward/block": odd.recomputed + odd.backward,
            "forward/embed": embed[0],
            "backward/embed": embed[1],
            "forward/head": head[0],
            "backward/head": head[1],
        }
        for work in even:
            tallies["backward/block.even"] = work.recomputed + work.backward
        return tallies

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
        return 3 * forward * self._experiment.batch.accumulation // self._ranks_a_replica

    def hardware_flop(self) -> int:
        """`model_flop` with what is recomputed."""
        batch = self._experiment.batch
        again = recompute_flop(
            self._spec,
            sequence=self._sequence,
            recompute=self._experiment.recompute.value,
            micro=batch.micro,
        )
        return self.model_flop() + again * batch.accumulation // self._ranks_a_replica

    @property
    def _ranks_a_replica(self) -> int:
        """Ranks that share the work of one replica of the model."""
        return self._experiment.parallel.ranks_a_replica


def with_value(cluster: ClusterConf, key: str, value: Any) -> ClusterConf:
    """`cluster` with one key changed, such as "device.launch_ns" or "parts.0.device.launch_ns".

    Raises:
        ValueError: If there is no such key.
    """
    try:
        changed: ClusterConf = _changed(cluster, key.split("."), value)
    except (AttributeError, IndexError, ValueError) as err:
        raise ValueError(f"cluster.guesses has {key!r}, which is no key of a cluster") from err
    return changed


def _changed(conf: Any, names: Sequence[str], value: Any) -> Any:
    name, *rest = names
    if isinstance(conf, list):
        inner = conf[int(name)]
        return [_changed(each, rest, value) if each is inner else each for each in conf]
    found = getattr(conf, name)
    fields: dict[str, Any] = {name: _changed(found, rest, value) if rest else value}
    return replace(conf, **fields)
