"""A product of parallel dimensions over one model: which rank holds what of each layer, and what moves when."""

from dataclasses import dataclass, field, replace

from ...conf.model_spec import ModelSpec
from ...conf.schema import ParallelConf
from ..mesh import DATA, PIPELINE, SEQUENCE, Dims, divisors
from ..partition import even_split
from ..plan import Plan, Reduce, ReduceOp, SendRecv
from .border import Border, Cut
from .common import common_plan
from .layers import Kind, Layer, LayerRuns, Role
from .modes import Sizes, TensorMode, build_mode
from .modes.megatron import Megatron
from .outline import Outline, outline
from .policy import Direction, LayoutEvent, PassEnded, StepGradientsReady
from .schedule import Pass, check_schedule, stage_passes
from .sequence import AttentionPlans

PIPELINE_STREAM = "library"  # torch.distributed.pipelining sends and receives

ROOT = "root"


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """One layout of one model. Same events, same plans, on every rank.

    Args:
        mode: Of the tensor groups.
        dims: All axes of the mesh.
        sequence: Ranks over which the tokens of a sequence lie, apart from the tensor groups; 1: none.
        attention: Plans of attention over them.
        chunks: Parts of the model that a stage holds.
        stage_layers: Blocks of each stage; (): equal numbers.
    """

    mode: TensorMode
    dims: Dims
    sequence: int
    attention: AttentionPlans
    stages: int
    chunks: int
    schedule: str
    micro_batches: int
    num_layers: int
    tied: bool
    outline: Outline
    stage_layers: tuple[int, ...] = ()
    _known: dict[LayoutEvent | LayerRuns, Plan | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def name(self) -> str:
        shown = [f"{name}{size}" for name, size in self.dims if size > 1]
        return f"{self.mode.name}:{'x'.join(shown) or '1'}"

    @property
    def tensor(self) -> int:
        """Ranks that share each matrix."""
        ranks = 1
        for _, size in self.mode.dims:
            ranks *= size
        return ranks

    @property
    def is_plain(self) -> bool:
        """Whether there is data parallelism alone."""
        return self.tensor * self.sequence * self.stages == 1

    # ---- what lies where

    def layers(self, stage: int, chunk: int) -> range:
        """Blocks of a chunk of a stage: part chunk * stages + stage of as many runs, which are equal unless
        `stage_layers` says otherwise.
        """
        if self.stage_layers:
            first = sum(self.stage_layers[:stage])
            return range(first, first + self.stage_layers[stage])
        each = self.num_layers // (self.stages * self.chunks)
        first = (chunk * self.stages + stage) * each
        return range(first, first + each)

    def is_first(self, stage: int, chunk: int) -> bool:
        return stage == 0 and chunk == 0

    def is_last(self, stage: int, chunk: int) -> bool:
        return stage == self.stages - 1 and chunk == self.chunks - 1

    def units(self, stage: int, chunk: int) -> tuple[tuple[str, tuple[Layer, ...]], ...]:
        """(unit, its layers) in the order of forward; the root comes before the blocks, and behind them."""
        found: list[tuple[str, tuple[Layer, ...]]] = []
        if self.is_first(stage, chunk):
            found.append((ROOT, self.outline.before))
        found += [(f"block.{i}", self.outline.block) for i in self.layers(stage, chunk)]
        if self.is_last(stage, chunk):
            found.append((ROOT, self.outline.behind))
        return tuple(found)

    def parameter_cuts(self, layer: Layer) -> dict[str, Cut]:
        """Of "weight" and "bias", as torch lays them out. A table of positions and a token are cut in their last
        dimension, which `Cut.dims` has last: ((), ..., features).
        """
        features = layer.input.features
        match layer.kind:
            case Kind.linear | Kind.tied | Kind.embedding:
                cuts = self.mode.cuts(layer.kind, layer.role, layer.input)
                weight = replace(cuts.weight, sections=layer.sections)
                return {"weight": weight, "bias": replace(cuts.bias, sections=layer.sections)}
            case Kind.layer_norm | Kind.rms_norm:
                return {"weight": Cut((features,)), "bias": Cut((features,))}
            case Kind.positions:
                return {"weight": Cut(((), features))}
            case Kind.first_token:
                return {"weight": Cut(((), (), features))}
            case Kind.patches:
                return {"weight": Cut((features,)), "bias": Cut((features,))}
            case _:
                return {}

    # ---- what happens

    def passes(self, stage: int) -> tuple[Pass, ...]:
        """What a stage runs in one step, in the order of torch.distributed.pipelining."""
        return stage_passes(
            self.schedule,
            stage=stage,
            stages=self.stages,
            chunks=self.chunks,
            micro_batches=self.micro_batches,
            megatron=False,
        )

    def decide(self, event: LayoutEvent | LayerRuns) -> Plan | None:
        """The plan that answers `event`; None if each rank computes with what it holds, or nothing moves."""
        if event not in self._known:
            self._known[event] = self._decide(event)
        return self._known[event]

    def questions(self) -> tuple[LayerRuns, ...]:
        """Every distinct event of the model's layers, in the order of forward: what both targets ask in each step."""
        layers = (*self.outline.before, *self.outline.block, *self.outline.behind)
        ways = (Direction.forward, Direction.backward)
        return tuple(dict.fromkeys(layer.runs(way) for layer in layers for way in ways))

    def _decide(self, event: LayoutEvent | LayerRuns) -> Plan | None:
        if isinstance(event, LayerRuns):
            return self._layer(event)
        if isinstance(event, PassEnded):
            part = event.chunk * self.stages + event.stage
            if self.stages == 1 or part == (0 if event.backward else self.stages * self.chunks - 1):
                return None
            return Plan((SendRecv(axis=PIPELINE, shift=-1 if event.backward else 1),), PIPELINE_STREAM)
        if isinstance(event, StepGradientsReady) and event.what == "embedding":
            return self._tied_gradient(event.stage)
        return None

    def _layer(self, event: LayerRuns) -> Plan | None:
        if event.kind is Kind.attention and self.sequence > 1:
            return self.attention.plan(event)
        if event.kind in (Kind.linear, Kind.tied, Kind.embedding):
            return self.mode.plan(event) if self.tensor > 1 else None
        beside = (SEQUENCE,) if self.sequence > 1 else ()
        return common_plan(event, beside=beside, copies=self.sequence)

    def _tied_gradient(self, stage: int) -> Plan | None:
        """A matrix that the first and the last stage hold: they exchange what they have, and add it up."""
        if not self.tied or self.stages == 1 or stage not in (0, self.stages - 1):
            return None
        shift = self.stages - 1 if stage == 0 else 1 - self.stages
        return Plan((SendRecv(axis=PIPELINE, shift=shift), Reduce(op=ReduceOp.sum)), "reduce")


def build_parallel(
    conf: ParallelConf,
    spec: ModelSpec,
    *,
    num_ranks: int,
    micro: int,
    micro_batches: int,
    sequence: int,
    uneven: bool = False,
) -> ParallelLayout:
    """The layout that `conf` describes, with every size that must divide checked.

    Args:
        uneven: Stages may have different numbers of blocks: about equal ones where `conf.stage_layers` is null.
        micro: Sequences of a micro-batch, of one replica of the model.
        micro_batches: Of a step.
        sequence: Tokens of a sequence.

    Raises:
        ValueError: Naming the keys, both numbers and what would be legal.
    """
    mode = build_mode(conf)
    if conf.tensor == 1:  # of one rank all are alike, and only 1D's borders name no axis
        mode = Megatron(1)
    dims = layout_dims(conf, mode, num_ranks=num_ranks)
    apart = dict(dims).get(SEQUENCE, 1)
    parts = mode.vocab_parts
    sizes = Sizes(
        batch=micro,
        tokens=sequence // apart,
        hidden=spec.hidden,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        ffn=spec.ffn,
        vocab=_padded(spec.vocab or spec.classes, parts),
    )
    attention = AttentionPlans(
        conf.sequence_mode, size=apart, zigzag=conf.zigzag and conf.sequence_mode == "ring" and _causal(spec)
    )
    if conf.sequence_mode == "rsa" and apart > 1 and _causal(spec):
        raise ValueError(
            f"parallel.sequence_mode=rsa with model.family={spec.family}: its tokens must see all others (bert); use "
            "sequence_mode=ring or ulysses"
        )
    if spec.family == "vit" and conf.sequence > 1:
        raise ValueError(
            f"parallel.sequence={conf.sequence} with model.family=vit: must be 1; the class token, of which the loss "
            "is, would lie on one rank alone"
        )
    if conf.tensor > 1:
        mode.check(sizes)
    attention.check(tokens=sequence, heads=spec.heads, kv_heads=spec.kv_heads, features=_feature_parts(mode))
    check_schedule(
        conf.pipeline_schedule,
        stages=conf.pipeline,
        chunks=conf.virtual_stages,
        micro_batches=micro_batches,
    )
    stage_layers = _stage_layers(conf, spec.layers, uneven=uneven)
    if not stage_layers and spec.layers % (conf.pipeline * conf.virtual_stages):
        raise ValueError(
            f"parallel.pipeline={conf.pipeline} times parallel.virtual_stages={conf.virtual_stages} must divide "
            f"model.layers={spec.layers}; their product can be one of {divisors(spec.layers)}, or give "
            "parallel.stage_layers"
        )
    if conf.pipeline > 1 and micro_batches < conf.pipeline:
        raise ValueError(
            f"batch.accumulation={micro_batches} must be >= parallel.pipeline={conf.pipeline}: "
            "torch.distributed.pipelining wants a micro-batch for each stage"
        )
    laid = _with_borders(outline(spec), mode, parts)
    return ParallelLayout(
        mode=mode,
        dims=dims,
        sequence=apart,
        attention=attention,
        stages=conf.pipeline,
        chunks=conf.virtual_stages,
        schedule=conf.pipeline_schedule,
        micro_batches=micro_batches,
        num_layers=spec.layers,
        tied=spec.tied_embeddings,
        outline=laid,
        stage_layers=stage_layers,
    )


def _stage_layers(conf: ParallelConf, layers: int, *, uneven: bool) -> tuple[int, ...]:
    """Of each stage; (): equal numbers."""
    given = conf.stage_layers
    if given is not None and sum(given) != layers:
        raise ValueError(
            f"parallel.stage_layers={list(given)} has {sum(given)} blocks: must be model.layers={layers} of them"
        )
    if given is not None:
        return tuple(given)
    if not uneven:
        return ()
    if layers < conf.pipeline:
        raise ValueError(
            f"parallel.pipeline={conf.pipeline} must be at most model.layers={layers}: each stage holds a block"
        )
    return even_split(layers, conf.pipeline)


def layout_dims(conf: ParallelConf, mode: TensorMode, *, num_ranks: int) -> Dims:
    """All axes of the mesh, in the order of `parallel.order`.

    Raises:
        ValueError: If their product is not the number of ranks.
    """
    if conf.sequence_mode == "megatron" and conf.sequence not in (1, conf.tensor):
        raise ValueError(
            f"parallel.sequence={conf.sequence} must be 1 or parallel.tensor={conf.tensor}: with "
            "parallel.sequence_mode=megatron the ranks of a tensor group share the tokens"
        )
    if conf.sequence_mode == "megatron" and conf.sequence > 1 and conf.tensor_mode != "1d":
        raise ValueError(
            f"parallel.sequence={conf.sequence} with parallel.sequence_mode=megatron and parallel.tensor_mode="
            f"{conf.tensor_mode}: needs tensor_mode=1d; the others cut activations as it is, so use ring or ulysses"
        )
    apart = conf.sequence if conf.sequence_mode != "megatron" else 1
    model = conf.tensor * conf.pipeline * apart
    said = f"parallel.tensor={conf.tensor} times parallel.pipeline={conf.pipeline}"
    if apart > 1:
        said += f" times parallel.sequence={apart}"
    if num_ranks % model:
        raise ValueError(
            f"{said} is {model}, which must divide the {num_ranks} ranks of the cluster; the product can be one of "
            f"{divisors(num_ranks)}"
        )
    data = num_ranks // model
    if conf.data not in (-1, data):
        raise ValueError(
            f"parallel.data={conf.data} times {said} is {conf.data * model}, and the cluster has {num_ranks} ranks: "
            f"parallel.data must be -1 or {data}"
        )
    sizes: dict[str, Dims] = {
        "tensor": mode.dims if conf.tensor > 1 else (),
        "sequence": ((SEQUENCE, apart),) if apart > 1 else (),
        "data": ((DATA, data),),
        "pipeline": ((PIPELINE, conf.pipeline),) if conf.pipeline > 1 else (),
    }
    return tuple(dim for axis in conf.order for dim in sizes[axis])


def _with_borders(plain: Outline, mode: TensorMode, vocab_parts: int) -> Outline:
    """The same layers, each with the borders before and behind it, and vocabularies padded."""
    before, border = _through(plain.before, Border(), mode, vocab_parts)
    block, after = _through(plain.block, border, mode, vocab_parts)
    if after != border:
        raise ValueError(
            f"tensor mode {mode.name!r}: a block begins with the border '{border}' and ends with '{after}'; "
            "its last product must restore what it began with"
        )
    behind, _ = _through(plain.behind, border, mode, vocab_parts)
    return Outline(before, block, behind)


def _through(
    layers: tuple[Layer, ...], border: Border, mode: TensorMode, vocab_parts: int
) -> tuple[tuple[Layer, ...], Border]:
    found = []
    for layer in layers:
        given = mode.outer if layer.kind in (Kind.embedding, Kind.patches) else border
        output = given
        if layer.kind in (Kind.linear, Kind.tied):
            output = mode.cuts(layer.kind, layer.role, given).output
        if layer.kind is Kind.embedding:
            layer = replace(layer, features_in=_padded(layer.features_in, vocab_parts))
        is_head = layer.kind is Kind.tied or (layers[-1].kind is Kind.loss and layer is layers[-2])
        if is_head:
            layer = replace(layer, features_out=_padded(layer.features_out, vocab_parts))
        found.append(replace(layer, input=given, output=output))
        border = output
    return tuple(found), border


def _padded(size: int, parts: int) -> int:
    return -(-size // parts) * parts


def _causal(spec: ModelSpec) -> bool:
    return spec.family not in ("bert", "vit")


def _feature_parts(mode: TensorMode) -> int:
    """In how many parts heads are cut."""
    sizes = dict(mode.dims)
    parts = 1
    for axis in mode.cuts(Kind.linear, Role.columns, mode.outer).output.features:
        parts *= sizes[axis]
    return parts
