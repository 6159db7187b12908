"""What ranks do in test_runs.py: functions that a case names as its kind."""

import os
from typing import Any

from twinbed.conf.compose import load_experiment
from twinbed.policies.balance import GroupMeasured, Half, Migrate, Prune
from twinbed.runtime.balance.movements import Movements
from twinbed.runtime.outcome import write_outcome
from twinbed.runtime.trainer import Trainer

ANSWERS = {
    "lends": (Migrate(0, 1, Half.attention, 1), Migrate(0, 2, Half.ffn, 3)),
    "prunes": (Prune(0, 0.5),),
    "both": (Prune(0, 0.25), Migrate(0, 3, Half.ffn, 2)),
    "columns": (Prune(0, 0.5), Migrate(0, 1, Half.attention, 3), Migrate(0, 1, Half.ffn, 5)),
    "nothing": (),
    "too many": (Migrate(0, 1, Half.attention, 9),),
}


class Scripted:
    name = "scripted"
    predicted_speedup = 1.25

    def __init__(self, answers: dict[str, str], differ: bool) -> None:
        self._answers, self._differ = answers, differ

    def decide(self, event: Any) -> Any:
        if not isinstance(event, GroupMeasured):
            return None
        if self._differ:
            return (Prune(0, 0.5),)
        answer = self._answers.get(str(event.step))
        return None if answer is None else ANSWERS[answer]


def scripted(case: Any, context: Any) -> None:
    """Train under a policy that answers what `options` say, by step; one rank may do something else in a movement."""
    options = case.options
    policy = Scripted(options.get("answers", {}), options.get("differs") == context.rank)
    trainer = Trainer(load_experiment(case.experiment), context, balance=policy)
    fault = options.get("fault")
    if fault is not None and context.rank == options["rank"]:
        begin = Movements.begin

        def fails(self: Movements, plan: Any, rows: Any, **more: Any) -> Any:
            if context.heartbeat.step == options["step"] and plan.stream == options["stream"]:
                if fault == "exit":
                    os._exit(7)
                raise RuntimeError("this helper has had enough")
            return begin(self, plan, rows, **more)

        Movements.begin = fails  # type: ignore[method-assign]
    try:
        report = trainer.run(context.case_folder(case), name=case.name)
    finally:
        trainer.close()
    write_outcome(case, context, trainer.experiment, trainer.spec, report)
