"""What ranks do in test_training.py: trainings that are killed in the middle of a write."""

import os
import signal

from twinbed.conf.compose import load_experiment
from twinbed.runtime.offload.data_file import DataFile
from twinbed.runtime.trainer import Trainer


def killed(case, context):
    """Train; one rank is killed while it writes its `writes`-th chunk from step `step` on."""
    trainer = Trainer(load_experiment(case.experiment), context, folder=context.case_folder(case))
    write, done = DataFile.write_chunk, []

    def write_or_die(self, region, index):
        if context.rank == case.options["rank"] and context.heartbeat.step >= case.options["step"]:
            done.append(index)
            if len(done) == case.options["writes"]:
                with self.path.open("r+b") as file:  # half of it is there
                    file.seek(8192)
                    file.write(b"torn")
                os.kill(os.getpid(), signal.SIGKILL)
        return write(self, region, index)

    DataFile.write_chunk = write_or_die
    trainer.run(context.case_folder(case), name=case.name)
