"""What ranks do in the launcher's tests: functions that a case names as its kind."""

import os
import signal
import time

import torch
import torch.distributed as dist


def add_up(case, context):
    """Sum the ranks and write the sum where rank 0 is told to."""
    context.beat(0)
    total = torch.tensor(float(context.rank))
    dist.all_reduce(total)
    if context.rank == 0:
        (context.case_folder(case) / "sum.txt").write_text(str(total.item()))


def fault(case, context):
    """Collectives without end; one rank does what `options` says in step 3."""
    for step in range(1000):
        context.beat(step)
        if context.rank == case.options["rank"] and step == 3:
            _do(case.options["fault"])
        dist.all_reduce(torch.zeros(1000))


def fill(case, context):
    """Write more than the disk holds."""
    context.beat(0)
    if context.rank == 0:
        (context.case_folder(case) / "big").write_bytes(bytes(10**7))
    dist.barrier()


def _do(fault):
    if fault == "raise":
        raise ValueError("optimizer.lr=-1: must be > 0")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "exit":
        os._exit(7)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "sleep":
        time.sleep(600)


def nan_gradient(case, context):
    """Train; in step 2 the gradient of one parameter becomes NaN on the last rank, from the middle of block 3 on."""
    from twinbed.conf.compose import load_experiment
    from twinbed.runtime.trainer import Trainer

    trainer = Trainer(load_experiment(case.experiment), context)
    finish = trainer.engine.finish_gradients

    def spoiled():
        finish()
        if context.heartbeat.step == 2 and context.rank == context.num_ranks - 1:
            gradient = dict(trainer.engine.model.named_parameters())["blocks.0.fc1.weight"].grad
            getattr(gradient, "_local_tensor", gradient).view(-1)[3 * 256 + 5 :].fill_(float("nan"))

    trainer.engine.finish_gradients = spoiled
    trainer.run(context.case_folder(case), name=case.name)
