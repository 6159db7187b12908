"""What a stage does after its last pass: gradients summed over all that hold them, and the optimizer."""

from dataclasses import dataclass, replace

from ...conf.schema import ExperimentConf, Precision
from ...policies.layout import StepGradientsReady
from ...policies.mesh import PIPELINE, TENSOR
from ...policies.plan import AllReduce, SendRecv
from ..interpreter import Interpreted, Transfer, Work
from ..program import COMPUTE, LIBRARY, MAIN, Writer
from .model import LayoutModel
from .parts import FLOAT_BYTES
from .stage import TENSOR_STREAM, unit_name


@dataclass(frozen=True, slots=True)
class Reductions:
    """Collectives over the replicas: of gradients before the optimizer, of weights after it."""

    gradients: Interpreted | None
    weights: Interpreted | None


class StageEnding:
    """Writes it behind the passes. In Megatron's order: norms' gradients, replicas, the tied embedding, clipping."""

    def __init__(
        self,
        writer: Writer,
        model: LayoutModel,
        stage: int,
        experiment: ExperimentConf,
        waits: tuple[int, ...],
    ) -> None:
        self._writer = writer
        self._model = model
        self._stage = stage
        self._experiment = experiment
        self._waits = waits  # of the next item on the main worker

    def write(self, reductions: Reductions) -> None:
        self._replicated_gradients()
        if reductions.gradients is not None:
            self._over_replicas(reductions.gradients, "backward", "gradients")
        self._tied_gradients()
        self._clip()
        work = Work("layout", f"step/{self._slowest()}")
        self._writer.local(MAIN, COMPUTE, "step", unit_name(self._stage), "step", work, self._take_waits())
        if reductions.weights is not None:
            self._over_replicas(reductions.weights, "step", "weights")

    def _slowest(self) -> int:
        """The stage whose optimizer counts: clipping joins all, and the largest stage's step is the longest.

        That is as a rule the first stage, which alone begins the next step at once.
        """
        joined = self._clips and self._model.layout.stages > 1
        stages = range(self._model.layout.stages) if joined else (self._stage,)
        return max(stages, key=self._model.num_parameters)

    def _replicated_gradients(self) -> None:
        plan = self._model.ask(StepGradientsReady(self._stage, "replicated"))
        numel = self._model.num_replicated(self._stage)
        if plan is None or not numel:
            return
        nbytes = numel * FLOAT_BYTES
        for step in plan.steps:
            if not isinstance(step, AllReduce):
                raise ValueError(f"plan '{plan.describe()}': replicated gradients take an AllReduce only")
            size = self._model.mesh.size(step.axis)
            transfer = Transfer("all_reduce", step.axis, size, nbytes, nbytes, numel, FLOAT_BYTES)
            self._transfer(TENSOR_STREAM, "backward", transfer, ("replicated", self._stage))

    def _over_replicas(self, what: Interpreted, phase: str, name: str) -> None:
        after = self._take_waits()
        self._waits = self._writer.plan(
            what, phase, unit_name(self._stage), worker=None, after=after, tag=(name, self._stage)
        )

    def _tied_gradients(self) -> None:
        plan = self._model.ask(StepGradientsReady(self._stage, "embedding"))
        if plan is None:
            return
        numel = self._model.table_numel()
        nbytes = numel * FLOAT_BYTES
        after = self._take_waits()
        for step in plan.steps:
            if isinstance(step, SendRecv):
                other = self._model.layout.stages - 1 - self._stage
                ends = []
                for op, sender, peer in (("send", self._stage, step.shift), ("recv", other, -step.shift)):
                    way = Transfer(op, step.axis, self._model.layout.stages, nbytes, nbytes, peer=peer)
                    if op == "recv":
                        way = replace(way, peer=step.shift)
                    worker, tag = f"embedding_{op}", ("embedding", sender)
                    ends.append(
                        self._writer.transfer(worker, PIPELINE, "backward", "embedding", way, after, tag=tag)
                    )
                after = tuple(ends)
        moved = 3 * nbytes  # two read, one written
        work = Work("traffic", "reduce", 0, moved)
        self._writer.local(MAIN, COMPUTE, "backward", "embedding", "add embedding gradients", work, after)

    @property
    def _clips(self) -> bool:
        return bool(self._experiment.train.gradient_clipping) or self._experiment.precision is Precision.fp16

    def _clip(self) -> None:
        """The norm of all gradients of a replica; under fp16 it also tells whether to skip the step."""
        if not self._clips:
            return
        for axis in (TENSOR, PIPELINE):
            size = self._model.mesh.size(axis)
            if size > 1:
                norm = Transfer("all_reduce", axis, size, FLOAT_BYTES, FLOAT_BYTES, 1, FLOAT_BYTES)
                where = self._stage if axis == TENSOR else 0
                self._transfer(LIBRARY, "step", norm, ("clip", axis, where))

    def _transfer(self, stream: str, phase: str, transfer: Transfer, tag: tuple[object, ...]) -> None:
        unit = "" if stream == LIBRARY else unit_name(self._stage)
        self._writer.transfer(MAIN, stream, phase, unit, transfer, self._take_waits(), tag=tag)

    def _take_waits(self) -> tuple[int, ...]:
        """What the next item waits for: what was noted, and the end of the main worker."""
        waits, self._waits = self._waits, ()
        return (*waits, *self._writer.last(MAIN))
