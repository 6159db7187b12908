"""One experiment as its layout sees it: what each stage holds, what each pass runs, and what follows it."""

from functools import cached_property

from ...conf.model_flop import block_matmuls
from ...conf.model_spec import ModelSpec, parameters
from ...conf.schema import ExperimentConf
from ...policies.layout import (
    LayoutEvent,
    MegatronLayout,
    PassEnded,
    build_layout,
    describe_layout_event,
)
from ...policies.mesh import DATA, PIPELINE, TENSOR, Mesh
from ...policies.plan import Plan
from ..device import Device
from ..interpreter import LocalWork, Work
from ..layers import Kernels
from .parts import Parts, Sent
from .timing import PassKind, PassSteps


class LayoutModel:
    """Layout, mesh and sizes of one experiment.

    Raises:
        ValueError: If the layout does not fit the cluster or the model, naming the keys.
    """

    def __init__(self, experiment: ExperimentConf, spec: ModelSpec, device: Device, kernels: Kernels) -> None:
        conf, cluster, batch = experiment.parallel, experiment.cluster, experiment.batch
        self.spec = spec
        sequence = batch.sequence or spec.sequence
        self.layout: MegatronLayout = build_layout(
            conf,
            num_ranks=cluster.num_ranks,
            micro_batches=batch.accumulation,
            layers=spec.layers,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            ffn=spec.ffn,
            vocab=spec.vocab or spec.classes,
            sequence=sequence,
            tied=spec.tied_embeddings,
            recompute=experiment.recompute.value,
        )
        data = cluster.num_ranks // (conf.tensor * conf.pipeline)
        self.mesh = Mesh.of(cluster, 1, ((TENSOR, conf.tensor), (DATA, data), (PIPELINE, conf.pipeline)))
        self.decided: list[tuple[str, str]] = []  # (event, action), each distinct event once
        self.parts = Parts(
            spec,
            device,
            self.layout,
            sequence=sequence,
            micro=batch.micro,
            sequence_parallel=self.layout.sequence,
            recompute=experiment.recompute.value,
            kernels=kernels,
        )
        self.steps = PassSteps(self.parts, self.ask)
        self._asked: dict[LayoutEvent, Plan | None] = {}
        self._kinds: dict[tuple[int, int, bool], PassKind] = {}
        self._local_works: dict[tuple[int, int, Work], LocalWork] = {}
        self._sends: dict[tuple[int, int, bool], Sent | None] = {}

    def ask(self, event: LayoutEvent) -> Plan | None:
        """The layout's answer, which is logged when an event comes first."""
        if event not in self._asked:
            plan = self._asked[event] = self.layout.decide(event)
            action = plan.describe() if plan is not None else "nothing"
            self.decided.append((describe_layout_event(event), action))
        return self._asked[event]

    # ---- passes

    def part(self, stage: int, chunk: int) -> int:
        """Position of a chunk among all of the model."""
        return chunk * self.layout.stages + stage

    @property
    def last_part(self) -> int:
        return self.layout.stages * self.layout.chunks - 1

    def kind(self, stage: int, chunk: int, backward: bool) -> PassKind:
        """What a pass of a stage runs."""
        key = (stage, chunk, backward)
        known = self._kinds.get(key)
        if known is None:
            part = self.part(stage, chunk)
            sent = self.received(stage, chunk, backward)
            blocks = len(self.layout.layers(stage, chunk))
            behind = sent.behind if sent is not None else ()
            known = PassKind(backward, blocks, part == 0, part == self.last_part, behind)
            self._kinds[key] = known
        return known

    def sent(self, stage: int, chunk: int, backward: bool) -> Sent | None:
        """What goes to another stage after a pass; None: nothing does."""
        key = (stage, chunk, backward)
        if key not in self._sends:
            plan = self.ask(PassEnded(stage, chunk, backward))
            self._sends[key] = self.parts.send(plan) if plan is not None else None
        return self._sends[key]

    def received(self, stage: int, chunk: int, backward: bool) -> Sent | None:
        """What the pass before has sent to this one; None: it needs nothing of another stage."""
        before = self.part(stage, chunk) + (1 if backward else -1)
        if not 0 <= before <= self.last_part:
            return None
        stages = self.layout.stages
        return self.sent(before % stages, before // stages, backward)

    def local_work(self, micro_batch: int, chunk: int, phase: str, work: Work) -> LocalWork:
        """The named work of a pass, one object for all stages where it is the same."""
        key = (micro_batch, chunk, work)
        known = self._local_works.get(key)
        if known is None:
            known = self._local_works[key] = LocalWork(f"{phase} {micro_batch}.{chunk}", work)
        return known

    # ---- parameters of one rank

    def num_parameters(self, stage: int) -> int:
        """Elements that one rank of a stage holds."""
        total = self._embedding_numel(stage) + self.num_replicated(stage)
        return total + self._num_layers(stage) * self._block_numel[0]

    def num_replicated(self, stage: int) -> int:
        """Those of them that all ranks of a tensor group hold alike: norms, and biases after a sum."""
        root = self._outside_numel
        ends = (root[0] if stage == 0 else 0) + (root[1] if stage == self.layout.stages - 1 else 0)
        return self._num_layers(stage) * self._block_numel[1] + ends

    def table_numel(self) -> int:
        """One rank's part of the word table, which the last stage has too if it is tied."""
        return -(-self._words // self.layout.tensor) * self.spec.embedding_width

    @property
    def _words(self) -> int:
        return self.spec.vocab or self.spec.classes

    def _num_layers(self, stage: int) -> int:
        return sum(len(self.layout.layers(stage, chunk)) for chunk in range(self.layout.chunks))

    def _embedding_numel(self, stage: int) -> int:
        stages = self.layout.stages
        copies = (stage == 0) + (stage == stages - 1) if stages > 1 or not self.spec.tied_embeddings else 1
        return copies * self.table_numel()

    @cached_property
    def _block_numel(self) -> tuple[int, int]:
        """(cut, whole) elements of a block on one rank."""
        spec, t = self.spec, self.layout.tensor
        products = [
            p for p in block_matmuls(spec, sequence=1) if p.kind not in ("scores", "context", "router")
        ]
        matrices = sum(p.k * p.n for p in products)
        biases = (spec.heads + 2 * spec.kv_heads) * spec.head_dim * spec.qkv_bias + spec.ffn * spec.mlp_bias
        whole = parameters(spec)[1].numel - matrices - biases
        return -(-(matrices + biases) // t), whole

    @cached_property
    def _outside_numel(self) -> tuple[int, int]:
        """Elements outside the blocks and the word tables, whole on each rank: (first stage, last stage)."""
        spec = self.spec
        tables = (1 if spec.tied_embeddings else 2) * self._words * spec.embedding_width
        norm = spec.hidden * (2 if spec.qkv_bias else 1)
        rest = max(0, parameters(spec)[0].numel - tables)
        return max(0, rest - norm), min(rest, norm)
