"""How long the steps of a rank's layers take: on a device by their shapes, on a local cluster as a probe measured."""

from collections.abc import Iterator
from dataclasses import dataclass

from ...conf.model_spec import ModelSpec
from ...conf.schema import ExperimentConf
from ...policies.layout import Direction
from ...policies.mesh import LOCAL, NODE, WORLD
from ..balance.share import Share
from ..costs import EMBED, HEAD
from ..device import Device, Tally
from ..interpreter import Transfer
from ..layers import Kernels
from .model import LaidModel
from .shapes import BEFORE, BEHIND, BLOCK

_ALIKE = {"reduce_tree": ("reduce", "broadcast"), "scatter": ("broadcast",), "gather": ("broadcast",)}

ENDS = {EMBED: BEFORE, HEAD: BEHIND}


class LaidCosts:
    """Keys are those of `computation`: "forward/block.0#3", a step of a unit's computation, or all of it without "#3";
    "#3@1", where the work differs by the place on the sequence axis; "#3%2:512:0.0:0.0:0.0:0.0", of a rank with a share
    of its own (`balance.share`).

    Of a probe, `host.compute_ns` has the whole of a unit's local work, "forward/block.0" or "forward/block" and, of the
    root, "forward/embed" and "forward/head" or both as "forward/root". Its steps share it out as the device's model has
    them: of an even split, which other shares are measured by. Without a probe a rate (`emulated_flops_per_s`) says how
    long products take, or the device. With both, the products take what they take at the rate, and the other steps
    share out what was measured beyond that.

    Raises:
        ValueError: If the layout does not fit the cluster or the model.
    """

    def __init__(self, experiment: ExperimentConf, spec: ModelSpec, device: Device, kernels: Kernels) -> None:
        self.model = LaidModel(experiment, spec, device, kernels)
        self._device = device
        self._probed = experiment.cluster.host.compute_ns
        self._rate = experiment.cluster.emulated_flops_per_s
        self._whole: dict[tuple[str, str], _Modelled] = {}

    def tally(self, key: str) -> Tally:
        unit, _, rest = key.partition("#")
        rest, _, share = rest.partition("%")
        number, _, place = rest.partition("@")
        direction, _, where = unit.partition("/")
        of = Share.parse(share) if share else None
        steps = self.model.steps(ENDS.get(where, BLOCK), Direction(direction), of)
        if number:
            step = steps[int(number)]
            found = step.by_place[int(place)] if place else step.what
            assert isinstance(found, Tally), f"{key} is a collective"
            return found
        total = Tally()
        for step in steps:
            if isinstance(step.what, Tally):
                total += step.what
        return total

    def ns(self, key: str, *, slept_ns: int) -> float:
        """Wall time of a step on one rank; `slept_ns`: what it takes at the emulated rate."""
        if not self._probed:
            return slept_ns if self._rate is not None else self._device.time_ns(self.tally(key))
        unit = key.partition("#")[0]
        direction, _, where = unit.partition("/")
        kind = where.partition(".")[0]
        alike = [where]
        names = [unit, f"{direction}/{kind}"]
        if where in ENDS and not any(name in self._probed for name in names):
            names, alike = [f"{direction}/root"], list(ENDS)
        measured = next((self._probed[name] for name in names if name in self._probed), None)
        if measured is None:
            return slept_ns
        parts = [self._modelled(direction, each) for each in alike]
        beyond_ns = max(0.0, measured - sum(part.slept_ns for part in parts))
        whole_ns = sum(part.awake_ns for part in parts)
        own_ns = 0.0 if slept_ns and "#" in key else self._awake_ns(key)
        return slept_ns + (beyond_ns * own_ns / whole_ns if whole_ns else 0.0)

    def alike(self, op: str, axis: str) -> Iterator[str]:
        """Keys of `host.op_ns` that stand for a collective over a layout's axis, nearest first: a probe knows the axes
        of data parallelism.
        """
        mesh = self.model.mesh
        inside = all(len({mesh.node_of(rank) for rank in group}) == 1 for group in mesh.groups(axis))
        for name in (op, *_ALIKE.get(op, ())):
            for other in (axis, LOCAL if inside else NODE, WORLD):
                yield f"{name}/{other}"

    def _awake_ns(self, key: str) -> float:
        """Of a step that no rate stretches, or of the steps of a whole unit that none does."""
        if "#" in key:
            return self._device.time_ns(self.tally(key))
        direction, _, where = key.partition("/")
        return self._modelled(direction, where).awake_ns

    def _modelled(self, direction: str, where: str) -> "_Modelled":
        """What all steps of a unit come to."""
        at = (direction, ENDS.get(where, BLOCK))
        if at not in self._whole:
            slept_ns = awake_ns = 0.0
            for step in self.model.steps(at[1], Direction(direction)):
                if isinstance(step.what, Transfer):
                    continue
                if self._rate is not None and step.what.flop:
                    slept_ns += step.what.flop / self._rate * 1e9
                else:
                    awake_ns += self._device.time_ns(step.what)
            self._whole[at] = _Modelled(slept_ns, awake_ns)
        return self._whole[at]


@dataclass(frozen=True, slots=True)
class _Modelled:
    """Of a unit: what its products take at a rate, and the rest by the device's model (without a rate, all of it)."""

    slept_ns: float
    awake_ns: float
