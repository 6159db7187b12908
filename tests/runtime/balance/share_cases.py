"""What ranks do in the tests of uneven shares: functions that a case names as its kind."""

from dataclasses import replace

import torch

from twinbed.conf.compose import load_experiment
from twinbed.policies.balance import ShareSequences
from twinbed.runtime.outcome import write_outcome
from twinbed.runtime.trainer import Trainer


class Told:
    """Answers what it was told, whatever was measured: counts by the steps that are done."""

    name = "told"

    def __init__(self, by_step):
        self._by_step = by_step

    def decide(self, event):
        counts = self._by_step.get(str(event.step))
        return None if counts is None else (ShareSequences(tuple(counts)),)


def train(case, context):
    """Train with the shares that `options` tell, or at the `rates` of ranks; write the record, and if asked for the
    whole gradients of each step, of every rank.
    """
    experiment = load_experiment(case.experiment)
    if "rates" in case.options:
        rate = case.options["rates"][context.rank]
        experiment = replace(experiment, cluster=replace(experiment.cluster, emulated_flops_per_s=rate))
    trainer = Trainer(experiment, context, folder=context.case_folder(case))
    if "shares" in case.options:
        trainer.shares._policy = Told(case.options["shares"])
    apply, found = trainer._apply, []

    def kept(rate, scale):
        found.append({name: g.clone() for name, g in trainer.engine.full_gradients().items()})
        return apply(rate, scale)

    if case.options.get("gradients"):
        trainer._apply = kept
    try:
        report = trainer.run(context.case_folder(case), name=case.name)
    finally:
        trainer.close()
    if found:
        torch.save(found, context.case_folder(case) / f"gradients.{context.rank}.pt")
    write_outcome(case, context, trainer.experiment, trainer.spec, report)
