"""The published rows that ship, against every limit that `twinbed-validate` holds them to."""

import pytest

from twinbed.sim.validate.command import ROWS
from twinbed.sim.validate.evaluated import Evaluator
from twinbed.sim.validate.gates import GATES, judge
from twinbed.sim.validate.rows import read_folder


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_shipped_rows_hold_every_limit() -> None:
    evaluator = Evaluator()
    judged = {name for gate in GATES for name in gate.tables}
    tables = {
        name: [evaluator.evaluate(row) for row in rows]
        for name, rows in read_folder(ROWS).items()
        if name in judged
    }
    verdicts = judge(tables)
    assert len(verdicts) == len(GATES)
    assert [verdict.sentence for verdict in verdicts if verdict.missed] == []
