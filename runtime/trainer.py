"""The training loop of one rank."""

import math
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..conf.compose import load_experiment, model_spec
from ..conf.model_spec import ModelSpec
from ..conf.schema import ExperimentConf
from ..policies.balance import BalancePolicy
from ..policies.balance.build import balanced_work
from ..policies.comm import build_comm
from ..policies.layout import layout_of, replicas_of
from ..policies.mesh import DATA, Mesh
from .balance.balancer import Balancer
from .balance.batch import SequenceShares
from .balance.build import build_balancer, build_rate, build_sequence_shares
from .balance.stages import split_stages
from .balance.straggle import build_straggler
from .build import build_engine
from .case import Case
from .checkpoint import (
    CHECKPOINTS,
    find_checkpoint,
    load_checkpoint,
    prepare_optimizer_state,
    save_checkpoint,
)
from .dispatch import activate
from .failure import ElsewhereError
from .feed import build_feed
from .held import HeldMemory
from .interfaces import interface_since, read_interface
from .laps import Laps
from .layout.engine import LayoutEngine
from .learning_rate import learning_rate
from .ledger import LIBRARY_STREAM, Ledger
from .loss_scale import LossScale, build_loss_scale
from .memory import PeakMemory, keep_freed_memory, return_freed_memory
from .metrics import MetricsWriter, StepMetrics
from .micro_batches import MicroBatches, nothing
from .models import Models
from .offload.build import build_disk_offload
from .offload.disk import DiskOffload
from .optim.build import build_optimizer
from .optim.trust import TrustRatioOptimizer
from .outcome import write_outcome
from .report import Progress, RankReport, rank_report
from .worker import WorkerContext
from .wrap import CommEngine


def run_training(case: Case, context: WorkerContext) -> None:
    """Train as the case says and write its record (rank 0)."""
    trainer = Trainer(load_experiment(case.experiment), context, folder=context.case_folder(case))
    try:
        report = trainer.run(context.case_folder(case), name=case.name, tensorboard=case.tensorboard)
    finally:
        trainer.close()
    write_outcome(case, context, trainer.experiment, trainer.spec, report)


class Trainer:
    """Model, data, optimizer and communication engine of one rank.

    Args:
        experiment: Its cluster must be the ranks that run.
        context: This rank.
        overlap: False: nothing is communicated beside computation, whatever `comm.overlap` and plans say.
        folder: Of the run, for what is offloaded to disk where offload.path does not say.
        undisturbed: No rank is made slow and nothing is balanced, whatever `cluster.slowdown` and `balance` say.
        balance: In place of the policy that `balance` describes.
    """

    def __init__(
        self,
        experiment: ExperimentConf,
        context: WorkerContext,
        *,
        overlap: bool = True,
        folder: Path | None = None,
        undisturbed: bool = False,
        balance: BalancePolicy | None = None,
    ) -> None:
        self.context = context
        self.spec: ModelSpec = model_spec(experiment)
        self.progress = Progress()
        device = context.device
        synchronize = torch.cuda.synchronize if device.type == "cuda" else None
        self.laps = Laps(synchronize)
        self.straggler = None if undisturbed else build_straggler(experiment.cluster, context.rank)

        layout = layout_of(experiment, self.spec)
        seen = replicas_of(experiment)
        policy, _ = build_comm(experiment.comm, num_ranks=seen.num_ranks, ranks_per_node=seen.ranks_per_node)
        mesh = Mesh.of(experiment.cluster, policy.hpz_size, layout.dims if layout is not None else ())
        groups = context.groups(mesh)
        self.replicas, self._replica = mesh.data, mesh.index(DATA, context.rank)
        self.feed = build_feed(
            experiment, self.spec, layout=layout, mesh=mesh, rank=context.rank, device=device
        )
        self._split = split_stages(
            experiment,
            self.spec,
            layout,
            groups=groups,
            device=device,
            feed=self.feed,
            straggler=self.straggler,
            synchronize=synchronize,
        )
        if self._split is not None:
            experiment = self._split.experiment
            layout = layout_of(experiment, self.spec)
        self.experiment = experiment

        self.ledger = Ledger(rank=context.rank, mesh=mesh)
        activate(self.ledger)
        work = None if undisturbed else balanced_work(experiment, self.spec, layout)
        rate = build_rate(
            experiment.cluster,
            self.straggler,
            device=device,
            measured=work is not None,
            synchronize=synchronize,
        )
        self.balancer: Balancer | None = None
        if work is not None:
            self.balancer = build_balancer(
                experiment, work, policy=balance, groups=groups, ledger=self.ledger, rate=rate, device=device
            )
        self._models = Models(
            experiment,
            self.spec,
            device=device,
            straggler=self.straggler,
            clock=self.laps,
            synchronize=synchronize,
        )
        self.engine: CommEngine = build_engine(
            experiment,
            self.spec,
            self._models,
            layout=layout,
            policy=policy,
            groups=groups,
            ledger=self.ledger,
            device=device,
            overlap=overlap,
            rate=rate,
            balanced=self.balancer.balanced if self.balancer is not None else None,
        )

        self.optimizer = build_optimizer(
            experiment.optimizer,
            list(self.engine.parameters()),
            all_reduce=self.engine.sum_norms,
            holders=self.engine.holders(),
        )
        self.offload = build_disk_offload(
            experiment,
            self.spec,
            engine=self.engine,
            optimizer=self.optimizer,
            ledger=self.ledger,
            folder=folder,
            rank=context.rank,
        )
        if self.offload is not None:
            return_freed_memory()
        else:
            prepare_optimizer_state(self.optimizer)
        self._held = HeldMemory(self.engine, self.optimizer, self.offload)
        self.shares: SequenceShares | None = None
        if not undisturbed:
            self.shares = build_sequence_shares(
                experiment,
                self.spec,
                groups=groups,
                ledger=self.ledger,
                laps=self.laps,
                held=self._held,
                ranks_per_node=context.ranks_per_node,
                device=device,
            )

        self.loss_scale: LossScale | None = build_loss_scale(experiment)
        self.first_step = 0
        if experiment.train.resume_from is not None:
            self._resume(Path(experiment.train.resume_from))
        if self.offload is not None:
            self._begin_on_disk(self.offload)

    def run(self, folder: Path, *, name: str, tensorboard: bool = False) -> RankReport:
        """Train to the last step; files of the run go to `folder`."""
        experiment, context, train = self.experiment, self.context, self.experiment.train
        peak = PeakMemory(context.device)
        self.ledger.at(phase="setup", layer="")
        dist.barrier()
        before = read_interface()
        writer = MetricsWriter(
            folder,
            first_step=self.first_step,
            steps=experiment.steps,
            name=name,
            active=context.rank == 0,
            tensorboard=tensorboard,
        )
        with writer:
            if self.balancer is not None:
                self.balancer.run_begins(self.first_step)
            if self._split is not None:
                self.ledger.at(iteration=self.first_step)
                self.ledger.decided_balance(self._split.event, self._split.answer)
            for step in range(self.first_step, experiment.steps):
                context.beat(step)
                with self._measuring(step):
                    metrics = self.step(step)
                if train.eval_every and (step + 1) % train.eval_every == 0:
                    metrics.validation_loss, metrics.validation_accuracy = self.validate(step)
                self.ledger.at(iteration=step, phase="setup", layer="")
                if train.save_every and (step + 1) % train.save_every == 0:
                    self._save(folder, step + 1)
                writer.write(metrics)
            dist.barrier()
            report = rank_report(
                context,
                self.progress,
                laps=self.laps.laps,
                ledger=self.ledger,
                held=self._held,
                peak_bytes=peak.read_bytes(),
                interface=interface_since(before),
                loss_scale=self.loss_scale,
                balance=self.balancer.report if self.balancer is not None else None,
                offload=self.offload,
            )
            if self.offload is not None:
                self.offload.finish()
        return report

    def _measuring(self, step: int) -> AbstractContextManager[object]:
        """Counts what the first step keeps for backward, if its time is not measured. Offloaded weights change places
        between forward and backward, and would pass for others.
        """
        conf = self.experiment
        wanted = conf.warmup_steps >= 1 or self.shares is not None  # which must know what a sequence keeps
        if step > self.first_step or not wanted or conf.offload.active:
            return nullcontext()
        return self._held.watch(self._models)

    def step(self, step: int) -> StepMetrics:
        """One optimizer step; raises if gradients are not finite where no loss scale can help."""
        experiment, batch = self.experiment, self.experiment.batch
        scale = self.loss_scale.scale if self.loss_scale is not None else 1.0
        weight = self.shares.weight if self.shares is not None else 1.0
        rate = learning_rate(
            step, peak=experiment.optimizer.lr, steps=experiment.steps, conf=experiment.train
        )
        if self.straggler is not None:
            self.straggler.step_begins(step)
        if self.balancer is not None:
            self.balancer.step_begins(step)
        start_ns = self.laps.start()
        self.ledger.at(iteration=step)
        if self.offload is not None:
            self.offload.begins("train")
        losses = self.engine.run_step(
            MicroBatches(
                count=batch.accumulation,
                read=lambda index: self.feed.train(step, index),
                factor=scale * weight / batch.accumulation,
                clock=self.laps,
                begins=lambda index: self._tell_dropout(step, index),
                before_last_backward=self.offload.settle if self.offload is not None else nothing,
            )
        )
        self.ledger.at(iteration=step, phase="step", layer="")
        norm, skipped = self._apply(rate, scale)
        self.engine.after_optimizer_step()  # after a skipped step too: all ranks must go the same way
        self.engine.zero_grad()
        if self.balancer is not None:
            self.balancer.step_ends(step)
        if self.offload is not None:
            self.offload.stepped(step + 1, self._notes)
        if self.shares is not None and self.shares.step_done(step):
            self.feed.take(self.shares.mine)
            self.engine.take_sequences(len(self.shares.mine))
        end_ns = self.laps.stop("step")
        self.progress.steps_ns.append((start_ns, end_ns))
        seconds = (end_ns - start_ns) / 1e9
        sequences = self.replicas * batch.micro * batch.accumulation
        metrics = StepMetrics(
            step=step,
            loss=float(losses.mean()),
            learning_rate=rate,
            gradient_norm=norm if norm is not None and math.isfinite(norm) else None,
            loss_scale=scale if self.loss_scale is not None else None,
            skipped=skipped,
            iteration_s=seconds,
            tokens_per_s=sequences * (batch.sequence or self.spec.sequence) / seconds,
        )
        self.progress.loss_weights.append(weight)
        self.progress.metrics.append(metrics)
        return metrics

    def validate(self, step: int) -> tuple[float, float | None]:
        """Over the validation batches of all ranks: the mean loss, and of a classifier the share told right."""
        self.ledger.at(iteration=step, phase="eval", layer="")
        if self.offload is not None:
            self.offload.begins("eval")
        batches = self.experiment.train.eval_batches
        both = self.engine.evaluate(MicroBatches(count=batches, read=self.feed.validation))
        classifies = self.spec.family == "vit"
        total = both if classifies else both[:1].clone()
        total[0] /= batches * self.replicas
        self.ledger.at(iteration=step, phase="eval", layer="")
        if self.context.num_ranks > 1:
            with self.ledger.span(LIBRARY_STREAM, "all_reduce of the loss"):
                dist.all_reduce(total)
        if not classifies:
            return float(total), None
        counted = self.feed.num_counted(batches)
        given = batches * self.replicas * self.experiment.batch.micro
        return float(total[0]) * given / counted, float(total[1]) / counted

    def close(self) -> None:
        """Let go of threads and hooks."""
        self.engine.close()
        if self.straggler is not None:
            self.straggler.close()
        if self.offload is not None:
            self.offload.close()
            keep_freed_memory()  # the next case of a launch begins as the first one did
        activate(None)

    def _apply(self, rate: float, scale: float) -> tuple[float | None, bool]:
        """Clip and step; (gradient norm, whether the step was skipped)."""
        self._held.count_gradients()
        clipping = self.experiment.train.gradient_clipping
        if self.loss_scale is not None:
            gradients = [_local(p.grad) for p in self.engine.parameters() if p.grad is not None]
            if gradients:
                torch._foreach_mul_(gradients, 1 / scale)
            norm = self.engine.clip_gradients(clipping or math.inf)
            overflow = norm is not None and not math.isfinite(norm)
            self.loss_scale.update(overflow=overflow)
            if overflow:
                if isinstance(self.optimizer, TrustRatioOptimizer):
                    self.optimizer.skip_step()
                return norm, True
        else:
            norm = self.engine.clip_gradients(clipping) if clipping else None
            if norm is None or not math.isfinite(norm):
                self.engine.check_finite()  # names the parameter, if it is this rank's
                if norm is not None:
                    raise ElsewhereError(f"the gradient norm is {norm}; the parameter is on another rank")
        if self.optimizer is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            if self.offload is not None:
                self.offload.step()
            else:
                with self._stepping():
                    self.optimizer.step()
        return norm, False

    def _stepping(self) -> AbstractContextManager[object]:
        if self.balancer is None or self.optimizer is None:
            return nullcontext()
        assert isinstance(self.engine, LayoutEngine), "ranks of a tensor group are balanced"
        return self.balancer.stepping(self.engine.named_parameters(), self.optimizer)

    def _tell_dropout(self, step: int, micro_batch: int) -> None:
        """Masks follow from where a sequence stands in the step, whoever has it."""
        micro = self.experiment.batch.micro
        mine = self.shares.mine.start if self.shares is not None else self._replica * micro
        first = micro_batch * self.replicas * micro + mine
        self._models.tell_dropout(step=step, first_sequence=first)

    def _save(self, folder: Path, step: int) -> None:
        with self.offload.saving() if self.offload is not None else nullcontext() as planner:
            saved = save_checkpoint(
                folder / CHECKPOINTS,
                step=step,
                experiment=self.experiment,
                engine=self.engine,
                optimizer=self.optimizer,
                loss_scale=self.loss_scale.state() if self.loss_scale is not None else None,
                rank=self.context.rank,
                planner=planner,
            )
        self.progress.checkpoints.append(str(saved.relative_to(folder)))

    def _resume(self, path: Path) -> None:
        self.ledger.at(phase="setup", layer="")
        found = find_checkpoint(path)
        with self.offload.loading() if self.offload is not None else nullcontext() as planner:
            load_checkpoint(
                found,
                experiment=self.experiment,
                engine=self.engine,
                optimizer=self.optimizer,
                planner=planner,
            )
        if self.loss_scale is not None and found.loss_scale is not None:
            self.loss_scale.load(found.loss_scale)
        self.first_step = found.step

    def _begin_on_disk(self, offload: DiskOffload) -> None:
        self.first_step = offload.first_step(self.first_step, self._notes, steps=self.experiment.steps)
        scale = offload.resumed["loss_scale"] if offload.resumed is not None else None
        if self.loss_scale is not None and scale is not None:
            self.loss_scale.load(scale)

    @property
    def _notes(self) -> dict[str, Any]:
        """What files on disk have beside the tensors."""
        return {"loss_scale": self.loss_scale.state() if self.loss_scale is not None else None}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
