"""An engine whose replicas take different numbers of sequences of each micro-batch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ...policies.balance import MEASURE_STREAM
from ...policies.mesh import DATA, WORLD
from ..costs import Costs
from ..engines import EngineModel, Setup, State, Written
from ..executor import Segment
from ..interpreter import Transfer
from ..offload import Offload
from ..program import MAIN, Item, Program

MEASURED_BYTES = (
    16  # of one rank: what it computed and by how many sequences it could take more, 64-bit integers
)


class UnevenBatches:
    """Writes the programs of each replica as the engine of its number of sequences does. Their collectives are the
    same, those within a replica of another size.
    """

    def __init__(self, setup: Setup, make: Callable[[Setup], EngineModel]) -> None:
        self._setup, self._make = setup, make
        self._micro = setup.experiment.batch.micro
        self._engines: dict[int, EngineModel] = {}
        self._written: dict[tuple[int, bool, State, bool], Written] = {}
        even = self.engine(self._micro)
        self.mesh = even.mesh
        self.unit_bytes: Mapping[str, int] = even.unit_bytes
        self.offload: Offload | None = None
        self.even = (self._micro,) * self.mesh.data
        self._replica_of = [self.mesh.index(DATA, rank) for rank in range(self.mesh.num_ranks)]

    def engine(self, count: int) -> EngineModel:
        """Of replicas that take so many sequences."""
        if count not in self._engines:
            setup = self._setup
            batch = replace(setup.experiment.batch, micro=count)
            experiment = replace(setup.experiment, batch=batch)
            costs = setup.costs if count == self._micro else Costs(experiment, setup.spec, setup.policy)
            self._engines[count] = self._make(replace(setup, experiment=experiment, costs=costs))
        return self._engines[count]

    def write(self, *, validation: bool, before: State) -> Written:
        """Evenly shared out, and measured."""
        return self.write_shares(self.even, validation=validation, before=before, measures=not validation)

    def write_shares(
        self, counts: Sequence[int], *, validation: bool, before: State, measures: bool
    ) -> Written:
        """Args:
        counts: [replicas], sequences of a micro-batch. A validation is evenly shared out.
        measures: Ranks tell each other what they measured when the step is over.
        """
        own = self.even if validation else counts
        written = {n: self._write(n, validation, before, measures) for n in dict.fromkeys(own)}
        programs: dict[int, Program] = {}
        last: Program | None = None
        segments = {n: Segment(0, validation, each.programs) for n, each in written.items()}
        for rank, replica in enumerate(self._replica_of):
            program = segments[own[replica]].program(rank)
            if program is not last:
                last = programs[rank] = program
        first = written[own[0]]
        return Written(programs, list(first.decided), first.after)

    def _write(self, count: int, validation: bool, before: State, measures: bool) -> Written:
        key = (count, validation, before, measures)
        if key not in self._written:
            written = self.engine(count).write(validation=validation, before=before)
            for program in {id(each): each for each in written.programs.values()}.values():
                _count_sequences(program, count)
                if measures:
                    self._tell(program)
            self._written[key] = written
        return self._written[key]

    def _tell(self, program: Program) -> None:
        ranks = self.mesh.num_ranks
        transfer = Transfer("all_gather", WORLD, ranks, ranks * MEASURED_BYTES, MEASURED_BYTES)
        last = {item.worker: item.index for item in program.items}
        after = tuple(index for worker, index in last.items() if worker != MAIN)
        index = len(program.items)
        program.items.append(
            Item(index, MAIN, MEASURE_STREAM, "step", "", after, transfer=transfer, tag=("measured",))
        )


def _count_sequences(program: Program, count: int) -> None:
    """Say of all computation of how many sequences it is."""
    for item in program.items:
        if any(part.work.kind == "compute" for part in item.parts):
            item.parts = tuple(
                replace(part, work=part.work._replace(amount=count)) if part.work.kind == "compute" else part
                for part in item.parts
            )
