"""What ranks do in test_pipeline.py: functions that a case names as its kind."""

import os
import signal
import time


def fault(case, context):
    """Train; in step 2, before its third pass, one rank does what `options` says."""
    from twinbed.conf.compose import load_experiment
    from twinbed.runtime.trainer import Trainer

    trainer = Trainer(load_experiment(case.experiment), context)
    begins, seen = trainer.engine.pass_begins, []

    def spoiled(which):
        begins(which)
        if context.heartbeat.step != 2 or context.rank != case.options["rank"]:
            return
        seen.append(which)
        if len(seen) == 3:
            (context.folder / "fault.txt").write_text(str(time.monotonic()))
            if case.options["fault"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ArithmeticError(f"stage of rank {context.rank} fails in {which}")

    trainer.engine.pass_begins = spoiled
    trainer.run(context.case_folder(case), name=case.name)
