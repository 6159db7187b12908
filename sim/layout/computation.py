"""A unit's computation as items of a program: the steps of its layers, with the collectives between and beside them."""

from collections import Counter
from collections.abc import Sequence

from ...policies.balance import Half
from ...policies.layout import Direction
from ..balance.lending import Lending
from ..interpreter import Transfer, Work
from ..program import COMPUTE, MAIN, Writer
from .costs import ENDS
from .model import LaidModel, LaidStep
from .operands import RECEIPTS
from .shapes import BLOCK

BESIDE = "layer"  # begins the names of workers that carry out what runs beside the main one


class LayersOf:
    """Writes it (`rules.Layers`). Local work and collectives that block are the main worker's, in the order of issue;
    each other stream has workers that take turns, each first in, first out.
    """

    def __init__(
        self, model: LaidModel, place: int = 0, *, at_a_time: int = 1, lending: Lending | None = None
    ) -> None:
        """Args:
        place: Of the ranks that run the program, on the sequence axis.
        lending: What moves of blocks, and what of them is computed here; None: an even share.
        at_a_time: Collectives of a stream that may be under way together: each process group of gloo has two threads.
        """
        self._model = model
        self._place = place
        self._at_a_time = at_a_time
        self._issued: Counter[str] = Counter()
        self._shifts = 0
        self._lending = lending if lending is not None else Lending()

    def write(
        self, writer: Writer, phase: str, unit: str, key: str, waits: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Args:
        key: Such as "forward/block.0"; works are numbered behind it, "forward/block.0#3".
        """
        direction, _, where = key.partition("/")
        lending, way = self._lending, Direction(direction)
        share = lending.share(unit)
        steps = self._model.steps(ENDS.get(where, BLOCK), way, share)
        waits = lending.begin(writer, way, phase, unit, waits)
        begin = (*waits, *writer.last(MAIN))
        index: list[int] = []
        waited: set[int] = set()
        ends = _ends_of_halves(steps) if way is Direction.backward and lending.work.movements else {}
        for number, step in enumerate(steps):
            after = tuple(index[at] for at in step.after) if step.after else begin
            if step.half is not None and way is Direction.forward:
                after = lending.before(writer, phase, unit, step.half, after)
            waited.update(step.after)
            layer = f"{unit}.{step.path}"
            if isinstance(step.what, Transfer):
                worker = self._beside(step) if step.beside else MAIN
                # both ends of a ring's messages are items of each rank, and meet at the number of the first
                tag = None
                if step.what.peer:
                    self._shifts += step.pair < 0  # the send of a pair comes first
                    tag = ("shift", self._shifts)
                stream = step.stream.removesuffix(RECEIPTS)
                index.append(writer.transfer(worker, stream, phase, layer, step.what, after, tag=tag))
            else:
                own = f"@{self._place}" if step.by_place else ""
                of_share = f"%{share}" if share is not None else ""
                work = Work("compute", f"{key}#{number}{own}{of_share}")
                index.append(
                    writer.local(
                        MAIN,
                        COMPUTE,
                        phase,
                        unit,
                        f"{phase}/{layer} {step.name}",
                        work,
                        after,
                        product=step.product,
                        half=step.half,
                    )
                )
            if number in ends:
                lending.after(writer, phase, unit, ends[number])
        waits = tuple(index[at] for at in range(len(index)) if at not in waited) or waits
        return lending.end(writer, way, phase, unit, waits)

    def _beside(self, step: LaidStep) -> str:
        """The worker that carries it out. Messages of a ring need no thread: they are the one worker's, in order."""
        stream = f"{BESIDE}/{step.stream}"
        if isinstance(step.what, Transfer) and step.what.peer:
            return stream
        self._issued[stream] += 1
        turn = self._issued[stream] % self._at_a_time
        return f"{stream}.{turn}" if turn else stream


def _ends_of_halves(steps: Sequence[LaidStep]) -> dict[int, Half]:
    """By position, the last local step of the layer in which the gradients of a half become complete."""
    last_product = {step.half: number for number, step in enumerate(steps) if step.half is not None}
    found = {}
    for half, at in last_product.items():
        own = [
            i for i, s in enumerate(steps) if s.path == steps[at].path and not isinstance(s.what, Transfer)
        ]
        found[own[-1]] = half
    return found
