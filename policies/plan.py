"""The plan vocabulary: what a policy can ask an engine to do with one tensor.

A plan is a small acyclic graph of frozen steps over named mesh axes (see `mesh`). A plain sequence is
the common case: a step without `after` follows the one before it.

The value that flows along a plan is a flat tensor seen as `slices` equal slices of the same layout:

* a gather starts from one slice (this rank's shard) and ends with one slice a rank of the world;
* a reduction starts from one slice for each destination rank and ends with this rank's own slice.

In a layout's plan (`policies.layout`) it is an activation at the border of two parts of the model, with the
local work of the part named in between.

`AllToAll` leaves one part from each peer side by side; `Reduce` adds the parts up.

A layer's plan has operands in its place: tensors with names, which its steps read and write (`Plan.of_operands`).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Final

from ..conf.schema.limits import MAX_CHUNKS

WHOLE: Final = 0  # as a block size: one scale for the whole tensor

GATHER_STREAM: Final = "gather"
REDUCE_STREAM: Final = "reduce"


class ReduceOp(Enum):
    sum = "sum"
    mean = "mean"  # over the whole world, however many hops the sum takes
    max = "max"


class Cut(Enum):
    """What of a piece of local work one rank of a tensor-parallel group does."""

    whole = "whole"  # all of it, as every other rank
    columns = "columns"  # some of the output's features, so some heads or some words: no rank needs another's
    rows = "rows"  # some of the input's features: each rank has a partial sum of the whole output
    tokens = "tokens"  # some tokens of the sequence


class Gradient(Enum):
    """Which product a matrix takes part in."""

    none = "none"  # forward: of the input with the matrix
    input = "input"  # backward: of the output's gradient with the matrix
    weight = "weight"  # backward: of the output's gradient with the input


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One word. `after` holds the positions of the steps it waits for: None means the step before it.

    A collective on another stream than the plan's own runs beside what is issued after it: only steps that wait for it
    do. Local work is done where the plan is carried out, one piece after the other; so is `ReduceScatter`, a ring
    that adds up at each hop.
    """

    stream: str = ""  # "" takes the plan's stream
    after: tuple[int, ...] | None = None
    chunks: int = 1  # the tensor is cut into so many pieces that follow each other in a pipeline
    reads: tuple[str, ...] = ()  # operands
    writes: tuple[str, ...] = ()


# ---- local work


@dataclass(frozen=True, slots=True)
class Quantize(Step):
    """To `bits` per element with one fp32 scale for each `block` elements (symmetric, +-(2^(bits-1) - 1)).

    `exact_own` names the axis of the all-to-all that follows: slices that this rank sends to itself stay
    exact, for only their owner reads them. A gather must not use it: ranks would hold different weights.
    `per_parameter` starts a new block at each parameter's edge, so that a small parameter is not scaled by a
    large neighbour (int4 needs it); without it a slice is one run of blocks.
    """

    bits: int
    block: int
    exact_own: str | None = None
    per_parameter: bool = True

    def __post_init__(self) -> None:
        if self.bits not in (2, 4, 6, 8):
            raise ValueError(f"bits must be one of [2, 4, 6, 8], got {self.bits}")
        if self.block < 0 or self.block % 4:
            raise ValueError(f"block must be a multiple of 4 (0: one scale a tensor), got {self.block}")


@dataclass(frozen=True, slots=True)
class Dequantize(Step):
    """Undo the last `Quantize`.

    `fused`: in one pass with the sum, and the quantization, that follow. Without it the elements of all parts are
    written to memory in fp32, and each step behind is a pass of its own.
    """

    fused: bool = True


@dataclass(frozen=True, slots=True)
class Reduce(Step):
    """Add the parts that an all-to-all brought. `mean` divides once, by the world size."""

    op: ReduceOp = ReduceOp.sum


@dataclass(frozen=True, slots=True)
class Reorder(Step):
    """Permute slices so that those for one local index lie together (2 nodes x 4: 0 4 1 5 2 6 3 7).

    `fused`: by the quantization that follows. Without it the slices are copied.
    """

    fused: bool = True


@dataclass(frozen=True, slots=True)
class StoreCopy(Step):
    """Keep this rank's part of the gathered tensor, cut over `axis`, as the secondary shard (hpZ)."""

    axis: str


@dataclass(frozen=True, slots=True)
class LoadCopy(Step):
    """Start from the secondary shard instead of the primary one."""

    axis: str


@dataclass(frozen=True, slots=True)
class Matmul(Step):
    """The product of one matrix (or of several that share their input), such as "mlp_in"."""

    product: str
    cut: Cut
    gradient: Gradient = Gradient.none


@dataclass(frozen=True, slots=True)
class Compute(Step):
    """Everything else that a model does, such as "attention" or "mlp_norm"; in backward, its gradient."""

    name: str
    cut: Cut
    backward: bool = False


@dataclass(frozen=True, slots=True)
class Slice(Step):
    """Keep this rank's part, cut over `axis`, of a value that all ranks of the axis hold alike."""

    axis: str
    dim: int = 0  # of an operand


@dataclass(frozen=True, slots=True)
class Part(Step):
    """`size` places of an operand along `dim`, from `first` on."""

    first: int
    size: int
    dim: int = -1


@dataclass(frozen=True, slots=True)
class Place(Step):
    """An operand at `first` of `total` places along `dim`, zeros elsewhere.

    `add`: to what the operand that it writes holds already.
    """

    first: int
    total: int
    dim: int = -1
    add: bool = False


@dataclass(frozen=True, slots=True)
class Join(Step):
    """Operands side by side along `dim`."""

    dim: int = -1


@dataclass(frozen=True, slots=True)
class Keep(Step):
    """Of the first `of` places of an operand's last dimension the `size` that pruning keeps: the engine knows which."""

    size: int
    of: int


@dataclass(frozen=True, slots=True)
class Fill(Step):
    """A gradient at the places that a `Keep` took among `of`; what stands at the others is imputed.

    `of_input`: it is that of a product's input, and not that of its weights.
    """

    of: int
    of_input: bool


@dataclass(frozen=True, slots=True)
class Multiply(Step):
    """The product of two operands, matrices over their last dimension and all others taken together.

    `add`: to what the operand that it writes holds already.
    """

    transpose_left: bool = False
    transpose_right: bool = False
    add: bool = False


@dataclass(frozen=True, slots=True)
class Apply(Step):
    """A function of operands by its name (`policies.layout.functions` says of each what it makes of which shapes).

    `axes`: those by which the operand in question is cut, where a function must know which part of it lies here.
    """

    function: str
    number: int = 0
    axes: tuple[str, ...] = ()


# ---- collectives


@dataclass(frozen=True, slots=True)
class Collective(Step):
    """`dim`: of the operand that is gathered or scattered."""

    axis: str
    dim: int = field(default=0, kw_only=True)


@dataclass(frozen=True, slots=True)
class AllGather(Collective):
    """Every rank gets the slices of all, in rank order."""


@dataclass(frozen=True, slots=True)
class ReduceScatter(Collective):
    """Slice i of the sum goes to the i-th rank, by a ring.

    `hop_bits` > 0 re-quantizes the partial sum before each of the ring's sends (the rival that shows why
    qgZ uses an all-to-all: error and latency grow with the ranks).
    """

    op: ReduceOp = ReduceOp.mean
    hop_bits: int = 0
    hop_block: int = 256

    def __post_init__(self) -> None:
        if self.hop_bits not in (0, 2, 4, 6, 8):
            raise ValueError(f"hop_bits must be one of [0, 2, 4, 6, 8], got {self.hop_bits}")
        if self.hop_block < 0 or self.hop_block % 4:
            raise ValueError(
                f"hop_block must be a multiple of 4 (0: one scale a tensor), got {self.hop_block}"
            )


@dataclass(frozen=True, slots=True)
class AllReduce(Collective):
    op: ReduceOp = ReduceOp.mean


@dataclass(frozen=True, slots=True)
class AllToAll(Collective):
    """The i-th of `size(axis)` equal runs of slices goes to the i-th rank of the axis.

    Of an operand, the i-th part along `dim`; those that come are put side by side along `into_dim`.
    """

    into_dim: int = field(default=0, kw_only=True)


@dataclass(frozen=True, slots=True)
class Broadcast(Collective):
    root: int = 0


@dataclass(frozen=True, slots=True)
class ReduceTo(Collective):
    """`tree`: up a binomial tree, each rank but the root sends the whole once; else as the library does it."""

    root: int = 0
    op: ReduceOp = ReduceOp.mean
    tree: bool = False


@dataclass(frozen=True, slots=True)
class Scatter(Collective):
    """`parts[i]` rows (or places along `dim`) of the root's operand go to the i-th rank, one after the other.

    The root's own part is 0, and it has no result; a rank whose part is 0 has nothing to do with it. What others read
    says the other sizes of what they get.
    """

    root: int = 0
    parts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_parts(self.root, self.parts)

    def takes_part(self, index: int) -> bool:
        """Whether the rank at place `index` sends or gets something."""
        return index == self.root or self.parts[index] > 0


@dataclass(frozen=True, slots=True)
class Gather(Collective):
    """Undoes a `Scatter`: `parts[i]` rows of the i-th rank come to the root, which alone has a result.

    What the root reads says the other sizes of what it gets.
    """

    root: int = 0
    parts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_parts(self.root, self.parts)

    def takes_part(self, index: int) -> bool:
        """Whether the rank at place `index` sends or gets something."""
        return index == self.root or self.parts[index] > 0


@dataclass(frozen=True, slots=True)
class SendRecv(Collective):
    """Send to the rank `shift` further along the axis, and receive from the one as far before; a ring.

    At the ends of a pipeline only one of the two happens: who has nothing to send only receives.
    """

    shift: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps in topological order.

    Raises:
        ValueError: If a step waits for itself or a later one, or if steps disagree on the chunks.
    """

    steps: tuple[Step, ...]
    stream: str = GATHER_STREAM

    def __post_init__(self) -> None:
        for i, step in enumerate(self.steps):
            for dep in step.after or ():
                if not 0 <= dep < i:
                    raise ValueError(
                        f"step {i} ({type(step).__name__}) waits for step {dep}; "
                        f"it can wait for {list(range(i))} only"
                    )
            if not 1 <= step.chunks <= MAX_CHUNKS:
                raise ValueError(
                    f"step {i} ({type(step).__name__}): chunks={step.chunks}: must be in [1, {MAX_CHUNKS}]"
                )
        if len({step.chunks for step in self.steps}) > 1:
            raise ValueError(f"all steps of a plan must have the same chunks, got {self!r}")

    @classmethod
    def of_operands(cls, steps: Sequence[Step], stream: str) -> "Plan":
        """A layer's plan: each step waits for the steps that made what it reads.

        A collective on another stream is issued where it stands: after the step before it on the plan's own stream,
        which so limits how many are under way.

        Raises:
            ValueError: If a step has its `after` already.
        """
        made: dict[str, int] = {}
        placed: list[Step] = []
        main: tuple[int, ...] = ()
        for i, step in enumerate(steps):
            if step.after is not None:
                raise ValueError(f"step {i} ({type(step).__name__}) has its after={step.after} already")
            waits = {made[name] for name in step.reads if name in made} | set(main)
            if isinstance(step, Multiply | Place) and step.add:
                waits |= {made[name] for name in step.writes if name in made}
            placed.append(replace(step, after=tuple(sorted(waits))))
            made |= dict.fromkeys(step.writes, i)
            if not cls(tuple(placed), stream).is_beside(i):
                main = (i,)
        return cls(tuple(placed), stream)

    @property
    def operands(self) -> tuple[str, ...]:
        """What the plan reads and does not make, in the order of reading."""
        made: set[str] = set()
        found: dict[str, None] = {}
        for step in self.steps:
            found |= dict.fromkeys(name for name in step.reads if name not in made)
            made |= set(step.writes)
        return tuple(found)

    @property
    def chunks(self) -> int:
        return self.steps[0].chunks if self.steps else 1

    def dependencies(self, i: int) -> tuple[int, ...]:
        """Positions that step `i` waits for."""
        after = self.steps[i].after
        if after is not None:
            return after
        return (i - 1,) if i else ()

    def stream_of(self, i: int) -> str:
        return self.steps[i].stream or self.stream

    def is_beside(self, i: int) -> bool:
        """Whether step `i` is a collective that runs beside what is issued after it."""
        step = self.steps[i]
        adds = isinstance(step, ReduceScatter) or (isinstance(step, ReduceTo) and step.tree)
        return isinstance(step, Collective) and not adds and self.stream_of(i) != self.stream

    def order(self, chunks: int) -> list[tuple[int, int]]:
        """(chunk, step) in the order in which both targets issue them.

        Without collectives beside, chunk after chunk. With them, a pipeline in waves: a wave does of one chunk what
        comes before its first collective beside, of the chunk before it what comes between the first and the
        second, and so on. So each stream has its next message before the last one has arrived.
        """
        stages: list[int] = []  # collectives beside that lie before each step
        for i in range(len(self.steps)):
            stages.append(max((stages[d] + self.is_beside(d) for d in self.dependencies(i)), default=0))
        pairs = itertools.product(range(chunks), range(len(self.steps)))
        return sorted(pairs, key=lambda at: (at[0] + stages[at[1]], stages[at[1]], at[1]))

    def cuts(self, segments: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Where both targets cut a slice into chunks: [start, end) of each, near-equal.

        No block of a quantization lies in two chunks, so a chunked plan sends the same codes and scales as one that
        is not. There are fewer chunks where there are fewer such places.

        Args:
            segments: Elements of each parameter's part in the slice, side by side.
        """
        numel = sum(segments)
        edges = [0]
        for i in range(1, self.chunks):
            edges.append(self._edge(max(edges[-1], numel * i // self.chunks), segments))
        return tuple((a, b) for a, b in itertools.pairwise((*edges, numel)) if b > a)

    def _edge(self, at: int, segments: Sequence[int]) -> int:
        """The first place from `at` on at which no block is cut in two."""
        formats = [(s.block, s.per_parameter) for s in self.steps if isinstance(s, Quantize)]
        formats += [(s.hop_block, True) for s in self.steps if isinstance(s, ReduceScatter) and s.hop_bits]
        whole = (sum(segments),)
        while True:
            ends = [_block_end(at, segments if apart else whole, block) for block, apart in formats]
            if max(ends, default=at) == at:
                return at
            at = max(ends)

    def describe(self) -> str:
        """One line, the same for equal plans: what `decisions.jsonl` holds."""
        return f"{self.stream}: " + ", ".join(_word(step) for step in self.steps)


def _check_parts(root: int, parts: tuple[int, ...]) -> None:
    if not 0 <= root < len(parts) or parts[root] or min(parts) < 0 or not any(parts):
        raise ValueError(
            f"root={root}, parts={parts}: one part for each rank of the axis, 0 of the root, and some rows in all"
        )


def _word(step: Step) -> str:
    shown = []
    for f in fields(step):
        value = getattr(step, f.name)
        if value != f.default:
            shown.append(f"{f.name}={_shown(value)}")
    return f"{type(step).__name__}({', '.join(shown)})"


def _shown(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple) and value and isinstance(value[0], str):
        return "+".join(value)
    return value


def _block_end(at: int, segments: Sequence[int], block: int) -> int:
    """The end of the block that `at` lies in; `at` where a block begins. Each segment begins a block."""
    start = 0
    for numel in segments:
        if start + numel > at:
            size = block or numel
            return min(start + -(-(at - start) // size) * size, start + numel)
        start += numel
    return at
