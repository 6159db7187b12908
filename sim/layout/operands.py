"""What a layer's plan comes to on one rank: the shapes of its operands, local work, and collectives with sizes.

This is the simulator's interpreter of plans over named operands. It needs no device: `work` says how long local work
takes.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final

from ...conf.model_flop import Matmul
from ...policies.layout.functions import SAME, WIDE, Made, Shape, results
from ...policies.mesh import Mesh
from ...policies.plan import (
    AllGather,
    AllReduce,
    AllToAll,
    Apply,
    Broadcast,
    Collective,
    Fill,
    Gather,
    Join,
    Keep,
    Multiply,
    Part,
    Place,
    Plan,
    ReduceScatter,
    ReduceTo,
    Scatter,
    SendRecv,
    Slice,
    Step,
)
from ..interpreter import FP32_BYTES, Transfer, Work

MULTIPLY: Final = "multiply"
PRUNING: Final = ("keep", "fill")  # steps that a product over fewer columns takes beside
RECEIPTS: Final = "/recv"  # ends the stream of a ring's receipts, which do not wait for its sends


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor on one rank."""

    shape: Shape
    element_bytes: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.element_bytes


@dataclass(frozen=True, slots=True)
class LocalStep:
    """Work on one rank. `name`: MULTIPLY, or the function that is applied.

    `nbytes`: read and written, each operand once. Of a product: `product`, and over how many of its m or k the tokens
    of a micro-batch lie.
    """

    name: str
    nbytes: int
    reads: tuple[Operand, ...]
    writes: tuple[Operand, ...]
    number: int = 0
    product: Matmul | None = None
    tokens: int = 0

    @property
    def flop(self) -> int:
        """Of products; attention's are counted where its heads are known."""
        return self.product.flop if self.product is not None else 0


@dataclass(frozen=True, slots=True)
class OperandStep:
    """`after`: positions of the steps that must end first. `beside`: only those wait for it that name it.

    `pair`: the position of the send of a receipt, which has the same tag; -1: none.
    """

    what: LocalStep | Transfer
    stream: str
    after: tuple[int, ...]
    beside: bool = False
    pair: int = -1


@dataclass(frozen=True, slots=True)
class Followed:
    """A plan's steps in the order of issue, and all operands that there are behind it."""

    steps: tuple[OperandStep, ...]
    operands: Mapping[str, Operand]


def follow(plan: Plan, operands: Mapping[str, Operand], mesh: Mesh, *, place: int = 0) -> Followed:
    """Shapes and sizes of all steps.

    Args:
        operands: Those that the plan starts from, by name.
        place: Of the rank in the group of a scatter or gather.

    Raises:
        ValueError: Naming the plan, if an operand is not there, does not divide, or does not fit the others.
    """
    return _Walk(plan, operands, mesh, place).follow()


class _Walk:
    def __init__(self, plan: Plan, operands: Mapping[str, Operand], mesh: Mesh, place: int) -> None:
        self._plan, self._place = plan, place
        self._operands = dict(operands)
        self._mesh = mesh
        self._steps: list[OperandStep] = []
        # what stands for a step; a step without work hands on those that it waits for
        self._ends: list[tuple[int, ...]] = []

    def follow(self) -> Followed:
        for i, step in enumerate(self._plan.steps):
            if step.chunks != 1:
                raise self._error(step, f"chunks={step.chunks}: a plan over operands has 1")
            waits = dict.fromkeys(at for dep in self._plan.dependencies(i) for at in self._ends[dep])
            self._ends.append(self._step(i, step, tuple(waits)))
        return Followed(tuple(self._steps), self._operands)

    def _step(self, i: int, step: Step, after: tuple[int, ...]) -> tuple[int, ...]:
        stream, beside = self._plan.stream_of(i), self._plan.is_beside(i)
        match step:
            case Slice():
                self._write(step, (self._slice(step),))
                return after  # a view
            case Part() | Place() | Join() | Keep() | Fill():
                return self._add(self._copy(step), stream, after)
            case Multiply():
                return self._add(self._multiply(step), stream, after)
            case Apply():
                return self._add(self._apply(step), stream, after)
            case SendRecv():
                return self._send(step, stream, after, beside=beside)
            case Scatter() | Gather():
                moved = self._parts(step)
                return self._add(moved, stream, after, beside=beside) if moved is not None else after
            case Collective():
                transfer = self._collective(step)
                return self._add(transfer, stream, after, beside=beside) if transfer is not None else after
        raise self._error(step, "the simulator does not know it among a layer's steps")

    def _add(
        self, what: LocalStep | Transfer, stream: str, after: tuple[int, ...], *, beside: bool = False
    ) -> tuple[int, ...]:
        self._steps.append(OperandStep(what, stream, after, beside))
        return (len(self._steps) - 1,)

    # ---- local work

    def _slice(self, step: Slice) -> Operand:
        (operand,) = self._read(step, 1)
        return self._cut(step, operand, step.dim, self._size(step))

    def _copy(self, step: Part | Place | Join | Keep | Fill) -> LocalStep:
        read = self._read(step, len(step.reads))
        shape = list(read[0].shape)
        if isinstance(step, Part):
            if step.first + step.size > shape[step.dim]:
                raise self._error(
                    step, f"takes places up to {step.first + step.size} of shape {read[0].shape}"
                )
            shape[step.dim] = step.size
        elif isinstance(step, Place):
            if step.first + shape[step.dim] > step.total:
                raise self._error(step, f"shape {read[0].shape} does not fit at {step.first} of {step.total}")
            shape[step.dim] = step.total
        elif isinstance(step, Keep):
            if not step.size <= step.of <= shape[-1]:
                raise self._error(step, f"takes {step.size} of {step.of} places of shape {read[0].shape}")
            shape[-1] = step.size
        elif isinstance(step, Fill):
            if shape[-1] > step.of:
                raise self._error(step, f"shape {read[0].shape} does not fit into {step.of} places")
            shape[-1] = step.of
        else:
            shape[step.dim] = sum(operand.shape[step.dim] for operand in read)
        made = replace(read[0], shape=tuple(shape))
        moved = 2 * min(made.nbytes, sum(operand.nbytes for operand in read))
        if isinstance(step, Place):
            moved += read[0].nbytes if step.add else made.nbytes - read[0].nbytes
        elif isinstance(step, Fill):  # the others are written too
            moved += made.nbytes - read[0].nbytes
        self._write(step, (made,))
        return LocalStep(type(step).__name__.lower(), moved, tuple(read), (made,))

    def _multiply(self, step: Multiply) -> LocalStep:
        left, right = self._read(step, 2)
        if not left.shape or not right.shape:
            raise self._error(step, f"takes matrices, got shapes {left.shape} and {right.shape}")
        rows, inner = prod(left.shape[:-1]), left.shape[-1]
        leading: Shape = left.shape[:-1]
        tokens = rows
        if step.transpose_left:
            rows, inner, leading = inner, rows, left.shape[-1:]
        out, other = right.shape[-1], prod(right.shape[:-1])
        if step.transpose_right:
            out, other = other, out
        if inner != other:
            raise self._error(
                step, f"shapes {left.shape} and {right.shape} do not fit: {inner} meets {other}"
            )
        made = Operand((*leading, out), left.element_bytes)
        moved = left.nbytes + right.nbytes + made.nbytes
        if step.add:
            (name,) = step.writes
            if self._operands.get(name) != made:
                raise self._error(step, f"adds {made} to {name!r}, which is {self._operands.get(name)}")
            moved += made.nbytes
        self._write(step, (made,))
        product = Matmul(MULTIPLY, rows, out, inner)
        return LocalStep(MULTIPLY, moved, (left, right), (made,), product=product, tokens=tokens)

    def _apply(self, step: Apply) -> LocalStep:
        read = self._read(step, len(step.reads))
        try:
            found = results(step.function, [operand.shape for operand in read])
        except (ValueError, IndexError, TypeError) as err:
            shapes = [operand.shape for operand in read]
            raise self._error(step, f"of shapes {shapes}: {err}") from err
        made = tuple(Operand(each.shape, _element_bytes(each, read)) for each in found)
        self._write(step, made)
        moved = sum(operand.nbytes for operand in (*read, *made))
        return LocalStep(step.function, moved, tuple(read), made, number=step.number)

    # ---- collectives

    def _collective(self, step: Collective) -> Transfer | None:
        """None: a group of one rank, or an empty message."""
        (operand,) = self._read(step, 1)
        size, nbytes = self._size(step), operand.nbytes
        made, transfer = operand, None
        match step:
            case AllGather():
                made = self._joined(step, operand, step.dim, size)
                transfer = Transfer("all_gather", step.axis, size, size * nbytes, nbytes)
            case ReduceScatter():
                if step.hop_bits:
                    raise self._error(step, f"hop_bits={step.hop_bits}: operands are not quantized")
                made = self._cut(step, operand, step.dim, size)
                add = Work("traffic", "add", 0, 3 * made.nbytes)
                transfer = Transfer("reduce_scatter", step.axis, size, nbytes, made.nbytes, hop=((), (add,)))
            case AllReduce():
                transfer = self._whole(step, "all_reduce", operand, size)
            case ReduceTo():
                transfer = self._whole(
                    step, "reduce_tree" if step.tree else "reduce", operand, size, step.root
                )
            case Broadcast():
                transfer = self._whole(step, "broadcast", operand, size, step.root)
            case AllToAll():
                part = self._cut(step, operand, step.dim, size)
                made = self._joined(step, part, step.into_dim, size)
                transfer = Transfer("all_to_all", step.axis, size, nbytes, part.nbytes)
            case _:
                raise self._error(step, "the simulator does not know it among a layer's collectives")
        self._write(step, (made,))
        return transfer if size > 1 and nbytes else None

    def _parts(self, step: Scatter | Gather) -> Transfer | None:
        """None: this rank has nothing to do with it."""
        (operand,) = self._read(step, 1)
        size, here = self._size(step), self._place == step.root
        if len(step.parts) != size:
            raise self._error(step, f"parts={step.parts}: the axis has {size} ranks")
        if not step.takes_part(self._place):
            return None
        shape = list(operand.shape)
        row_bytes = operand.nbytes // shape[step.dim]
        if here == isinstance(step, Gather):  # it gets something
            shape[step.dim] = sum(step.parts) if here else step.parts[self._place]
            self._write(step, (replace(operand, shape=tuple(shape)),))
        parts = tuple(rows * row_bytes for rows in step.parts)
        op = "gather" if isinstance(step, Gather) else "scatter"
        return Transfer(op, step.axis, size, sum(parts), max(parts), root=step.root, parts=parts)

    def _size(self, step: Slice | Collective) -> int:
        try:
            return self._mesh.size(step.axis)
        except ValueError as err:
            raise self._error(step, str(err)) from err

    def _whole(self, step: Collective, op: str, operand: Operand, size: int, root: int = 0) -> Transfer:
        if not 0 <= root < size:
            raise self._error(step, f"root={root} is not in its group; use one of [0, {size - 1}]")
        nbytes = operand.nbytes
        return Transfer(op, step.axis, size, nbytes, nbytes, operand.numel, operand.element_bytes, root)

    def _send(self, step: SendRecv, stream: str, after: tuple[int, ...], *, beside: bool) -> tuple[int, ...]:
        """Both ends: to the rank `shift` further along the ring, and from the one as far before."""
        read = self._read(step, len(step.reads))
        self._write(step, tuple(read))
        size = self._size(step)
        nbytes = sum(operand.nbytes for operand in read)
        if not step.shift % size or not nbytes:
            return after
        at = len(self._steps)
        for op, shift in (("send", step.shift), ("recv", -step.shift)):
            receives = op == "recv"
            transfer = Transfer(op, step.axis, size, nbytes, nbytes, peer=shift, listed=not receives)
            # a rank waits for its neighbour's message and not for its own to have gone
            where = f"{stream}{RECEIPTS}" if receives else stream
            self._steps.append(
                OperandStep(transfer, where, after, beside or receives, at if receives else -1)
            )
        return (at, at + 1)

    # ---- operands

    def _read(self, step: Step, count: int) -> Sequence[Operand]:
        for name in step.reads:
            if name not in self._operands:
                raise self._error(
                    step, f"reads {name!r}, which is not there; there are {sorted(self._operands)}"
                )
        if len(step.reads) != count:
            raise self._error(step, f"reads {list(step.reads)}, and takes {count}")
        return [self._operands[name] for name in step.reads]

    def _write(self, step: Step, made: Sequence[Operand]) -> None:
        if len(step.writes) != len(made):
            raise self._error(step, f"writes {list(step.writes)}, and makes {len(made)}")
        self._operands |= dict(zip(step.writes, made, strict=True))

    def _cut(self, step: Step, operand: Operand, dim: int, parts: int) -> Operand:
        shape = list(operand.shape)
        if not -len(shape) <= dim < len(shape):
            raise self._error(step, f"dim={dim} of shape {operand.shape}: there is no such dimension")
        if shape[dim] % parts:
            raise self._error(step, f"dim={dim} of shape {operand.shape} does not divide by {parts} ranks")
        shape[dim] //= parts
        return replace(operand, shape=tuple(shape))

    def _joined(self, step: Step, operand: Operand, dim: int, parts: int) -> Operand:
        shape = list(operand.shape)
        if not -len(shape) <= dim < len(shape):
            raise self._error(step, f"dim={dim} of shape {operand.shape}: there is no such dimension")
        shape[dim] *= parts
        return replace(operand, shape=tuple(shape))

    def _error(self, step: Step, what: str) -> ValueError:
        return ValueError(f"plan '{self._plan.describe()}': {type(step).__name__}: {what}")


def _element_bytes(made: Made, read: Sequence[Operand]) -> int:
    if made.kind == WIDE:
        return FP32_BYTES
    return (read[0] if made.kind == SAME else read[-1]).element_bytes


def beside_bytes(plan: Plan, operands: Mapping[str, Operand], kept: Collection[str]) -> int:
    """The most that a plan holds at a time of what it makes, each until it is read last; `kept` left out."""
    last = {name: i for i, step in enumerate(plan.steps) for name in (*step.reads, *step.writes)}
    held: dict[str, int] = {}
    most = 0
    for i, step in enumerate(plan.steps):
        if not isinstance(step, Slice):  # a view
            held |= {
                name: operands[name].nbytes for name in step.writes if name in operands and name not in kept
            }
        most = max(most, sum(held.values()))
        held = {name: nbytes for name, nbytes in held.items() if last[name] > i}
    return most
