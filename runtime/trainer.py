"""The training loop of one rank."""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..analysis.record import Decision
from ..conf.compose import load_experiment, model_spec
from ..conf.model_spec import ModelSpec
from ..conf.schema import ExperimentConf, Launch, OffloadKind, Recompute
from ..policies.balance import BalanceAction, BalancePolicy, StagesMeasured, is_balance_event
from ..policies.balance.build import balanced_work, build_balance, build_shares
from ..policies.comm import CommPolicy, build_comm
from ..policies.layout import ParallelLayout, layout_of, replicas_of
from ..policies.mesh import DATA, PIPELINE, TENSOR, Mesh
from ..policies.offload import Kind
from .balance.balancer import Balancer
from .balance.batch import SequenceShares
from .balance.build import build_balancer, build_rate
from .balance.measured import available_bytes
from .balance.straggle import Straggler, build_straggler
from .case import Case
from .checkpoint import (
    CHECKPOINTS,
    find_checkpoint,
    load_checkpoint,
    prepare_optimizer_state,
    save_checkpoint,
)
from .collectives import backend_of, build_collectives
from .data import Tokens, build_batches
from .dispatch import activate
from .dropout import DropoutClock
from .failure import ElsewhereError
from .groups import Groups
from .images import Images
from .interfaces import InterfaceBytes, read_interface
from .interpreter import Interpreter
from .laps import Laps
from .layout.engine import LayoutEngine
from .layout.tokens import token_index
from .learning_rate import learning_rate
from .ledger import LIBRARY_STREAM, Ledger
from .loss_scale import LossScale, build_loss_scale
from .memory import PeakMemory, keep_freed_memory, local_bytes, optimizer_bytes, return_freed_memory
from .metrics import MetricsWriter, StepMetrics
from .micro_batches import MicroBatches, nothing
from .offload.disk import FOLDER as OFFLOAD_FOLDER
from .offload.disk import DiskOffload
from .offload.host import host_memory
from .optim.build import build_optimizer
from .optim.trust import TrustRatioOptimizer
from .outcome import RankReport, clock_name, decision_digest, write_outcome
from .saved import SavedTensors
from .sharded_engine import ShardedEngine
from .stack import Stack, build_model
from .worker import WorkerContext
from .wrap import CommEngine, wrap_model


def run_training(case: Case, context: WorkerContext) -> None:
    """Train as the case says and write its record (rank 0)."""
    trainer = Trainer(load_experiment(case.experiment), context, folder=context.case_folder(case))
    try:
        report = trainer.run(context.case_folder(case), name=case.name, tensorboard=case.tensorboard)
    finally:
        trainer.close()
    write_outcome(case, context, trainer.experiment, trainer.spec, report)


@dataclass(slots=True)
class _Progress:
    """What a run collects step by step."""

    metrics: list[StepMetrics] = field(default_factory=list)
    steps_ns: list[tuple[int, int]] = field(default_factory=list)
    loss_weights: list[float] = field(default_factory=list)  # of each step's loss in the mean over ranks
    checkpoints: list[str] = field(default_factory=list)
    gradient_bytes: int = 0
    saved: SavedTensors | None = None  # of the first step


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
        self.experiment, self.context = experiment, context
        self.spec: ModelSpec = model_spec(experiment)
        batch = experiment.batch
        self.sequence = batch.sequence or self.spec.sequence
        cuda = context.device.type == "cuda"
        self._synchronize = torch.cuda.synchronize if cuda else None
        self.laps = Laps(self._synchronize)
        self.straggler: Straggler | None = None
        if not undisturbed:
            self.straggler = build_straggler(experiment.cluster, context.rank)
        self.balancer: Balancer | None = None
        layout = layout_of(experiment, self.spec)
        seen = replicas_of(experiment)
        policy, _ = build_comm(experiment.comm, num_ranks=seen.num_ranks, ranks_per_node=seen.ranks_per_node)
        mesh = Mesh.of(experiment.cluster, policy.hpz_size, layout.dims if layout is not None else ())
        groups = context.groups(mesh)
        self.replicas, self._replica = mesh.data, mesh.index(DATA, context.rank)
        self.batches = build_batches(experiment, self.spec, rank=self._replica, num_ranks=self.replicas)
        self._tokens = None  # which of a sequence's tokens are here; None: all
        if layout is not None and layout.sequence > 1:
            self._tokens = token_index(layout, mesh, context.rank, self.sequence)
        # what stages were measured to take, and the split that was answered; None: it was given
        self._split: tuple[StagesMeasured, tuple[BalanceAction, ...] | None] | None = None
        if (
            layout is not None
            and experiment.balance.name == "layers"
            and not experiment.parallel.stage_layers
        ):
            experiment = self.experiment = self._split_stages(layout, groups)
            layout = layout_of(experiment, self.spec)
        self._dropout_clocks: list[DropoutClock] = []
        self._models: list[Stack] = []  # the parts that are here
        self.ledger = Ledger(rank=context.rank, mesh=mesh)
        activate(self.ledger)
        self._work = None if undisturbed else balanced_work(experiment, self.spec, layout)
        self._balance = balance
        self.engine: CommEngine = self._build_engine(layout, policy, groups, overlap=overlap)
        self.shares: SequenceShares | None = None  # None: all replicas have as many sequences
        if experiment.balance.name == "batch" and not undisturbed:
            self.shares = self._new_shares(groups)
        self.optimizer = build_optimizer(
            experiment.optimizer,
            list(self.engine.parameters()),
            all_reduce=self.engine.sum_norms,
            holders=self.engine.holders(),
        )
        self.offload: DiskOffload | None = None
        if experiment.offload.name == "disk":
            self.offload = self._to_disk(folder)
            return_freed_memory()
        else:
            prepare_optimizer_state(self.optimizer)
        self.loss_scale: LossScale | None = build_loss_scale(experiment)
        self.first_step = 0
        if experiment.train.resume_from is not None:
            self._resume(Path(experiment.train.resume_from))
        if self.offload is not None:
            self._begin_on_disk(self.offload)
        self.progress = _Progress()

    def run(self, folder: Path, *, name: str, tensorboard: bool = False) -> RankReport:
        """Train to the last step; files of the run go to `folder`."""
        experiment, context = self.experiment, self.context
        train = experiment.train
        peak = PeakMemory(context.device)
        self.ledger.at(phase="setup", layer="")
        dist.barrier()
        interface = read_interface()
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
                self.ledger.decided_balance(*self._split)
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
            report = self._report(interface, peak.read_bytes())
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
        self.progress.saved = SavedTensors(self._models)
        return self.progress.saved

    def step(self, step: int) -> StepMetrics:
        """One optimizer step; raises if gradients are not finite where no loss scale can help."""
        accumulation = self.experiment.batch.accumulation
        scale = self.loss_scale.scale if self.loss_scale is not None else 1.0
        weight = self.shares.weight if self.shares is not None else 1.0
        rate = learning_rate(
            step,
            peak=self.experiment.optimizer.lr,
            steps=self.experiment.steps,
            conf=self.experiment.train,
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
                count=accumulation,
                read=lambda index: self._on_device(self.batches.train(step, index)),
                factor=scale * weight / accumulation,
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
            self.offload.stepped(step + 1, self._notes())
        if self.shares is not None:
            self._share(self.shares, step)
        end_ns = self.laps.stop("step")
        self.progress.steps_ns.append((start_ns, end_ns))
        seconds = (end_ns - start_ns) / 1e9
        tokens_per_step = self.replicas * self.experiment.batch.micro * accumulation * self.sequence
        metrics = StepMetrics(
            step=step,
            loss=float(losses.mean()),
            learning_rate=rate,
            gradient_norm=norm if norm is not None and math.isfinite(norm) else None,
            loss_scale=scale if self.loss_scale is not None else None,
            skipped=skipped,
            iteration_s=seconds,
            tokens_per_s=tokens_per_step / seconds,
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
        both = self.engine.evaluate(
            MicroBatches(count=batches, read=lambda index: self._on_device(self.batches.validation(index)))
        )
        total = both if self._classifies else both[:1].clone()
        total[0] /= batches * self.replicas
        self.ledger.at(iteration=step, phase="eval", layer="")
        if self.context.num_ranks > 1:
            with self.ledger.span(LIBRARY_STREAM, "all_reduce of the loss"):
                dist.all_reduce(total)
        if not self._classifies:
            return float(total), None
        counted = self.batches.num_counted(batches)  # what only fills up the last batches adds no loss
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
        if self.progress.gradient_bytes == 0:
            self.progress.gradient_bytes = local_bytes(p.grad for p in self.engine.parameters())
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
        for clock in self._dropout_clocks:
            clock.at(step=step, first_sequence=first)

    def _new_model(self) -> Stack:
        experiment = self.experiment
        recompute = experiment.recompute is Recompute.full
        model = build_model(
            self.spec, seed=experiment.seed, recompute=recompute, dropout=experiment.train.dropout
        ).to(self.context.device)
        self._dropout_clocks.append(model.dropout_clock)
        self._models.append(model)
        rate, straggler = experiment.cluster.emulated_flops_per_s, self.straggler
        paced = rate is not None or straggler is not None
        if paced and experiment.parallel.ranks_a_replica == 1:  # else each product is paced
            model.emulate(
                rate,
                sequence=self.sequence,
                slow=None if straggler is None else lambda: straggler.stretch,
                synchronize=self._synchronize,
            )
        model.clock = self.laps
        return model

    def _split_stages(self, layout: ParallelLayout, groups: Groups) -> ExperimentConf:
        """The experiment with the numbers of blocks that fit how fast the stages are."""
        from .balance.stages import measure_stages, with_split  # they lay a model out

        experiment = self.experiment
        policy = build_shares(experiment, self.spec)
        assert policy is not None
        if self.straggler is not None:
            self.straggler.measuring_begins()
        rate = build_rate(
            experiment.cluster,
            self.straggler,
            device=self.context.device,
            measured=False,
            synchronize=self._synchronize,
        )
        event = measure_stages(
            experiment,
            self.spec,
            layout,
            groups=groups,
            device=self.context.device,
            batch=self._on_device(self.batches.train(0, 0)),
            rate=rate,
        )
        split, answer = with_split(experiment, policy, event)
        self._split = (event, answer)
        return split

    def _new_shares(self, groups: Groups) -> SequenceShares:
        policy = build_shares(self.experiment, self.spec)
        assert policy is not None
        return SequenceShares(
            policy,
            groups=groups,
            ledger=self.ledger,
            laps=self.laps,
            device=self.context.device,
            period=self.experiment.balance.period,
            micro=self.experiment.batch.micro,
            micro_batches=self.experiment.batch.accumulation,
            room=self._room,
        )

    def _share(self, shares: SequenceShares, step: int) -> None:
        """Measure; from the next step on micro-batches may have other sizes."""
        self.laps.lap("step")
        self.ledger.at(iteration=step, phase="step", layer="")
        if shares.step_done(step):
            self.batches.take(shares.mine)
            self.engine.take_sequences(len(shares.mine))

    def _room(self) -> int:
        """By how many sequences a micro-batch of this rank could grow: each keeps as much as one of the first step did,
        while the device's memory, and this machine's, have so much left.
        """
        assert self.progress.saved is not None, "the first step was measured"
        experiment, context = self.experiment, self.context
        micro = experiment.batch.micro  # the first step is evenly split
        each_bytes = max(1, -(-self.progress.saved.peak_bytes // micro))
        here = len(self.shares.mine) if self.shares is not None else micro
        states = local_bytes(self.engine.parameters()) + optimizer_bytes(self.optimizer)
        held = states + self.progress.gradient_bytes + self.engine.secondary_bytes() + here * each_bytes
        free = int(experiment.cluster.device_of(context.rank).memory_bytes) - held
        if context.device.type == "cpu":
            beside = context.num_ranks if experiment.launch is Launch.local else context.ranks_per_node
            free = min(free, available_bytes() // beside)
        return free // each_bytes

    def _build_engine(
        self, layout: ParallelLayout | None, policy: CommPolicy, groups: Groups, *, overlap: bool
    ) -> CommEngine:
        experiment, device = self.experiment, self.context.device
        thread = experiment.comm.overlap and overlap
        if layout is None:
            return wrap_model(
                self._new_model(),
                policy=policy,
                interpreter=Interpreter(groups, self.ledger, build_collectives(backend_of(device))),
                precision=experiment.precision,
                device=device,
                overlap=thread,
                micro_batches=experiment.batch.accumulation,
                host_memory=host_memory(experiment.offload),
            )
        from .layout.build import build_layout_engine

        rate = build_rate(
            experiment.cluster,
            self.straggler,
            device=device,
            measured=self._work is not None,
            synchronize=self._synchronize,
        )
        if self._work is not None:
            assert rate is not None, "products that are balanced are timed"
            self.balancer = build_balancer(
                experiment,
                self._work,
                self._balance or build_balance(experiment.balance, self._work),
                groups=groups,
                ledger=self.ledger,
                rate=rate,
                device=device,
            )
        return build_layout_engine(
            self._new_model,
            layout=layout,
            policy=policy,
            groups=groups,
            ledger=self.ledger,
            precision=experiment.precision,
            device=device,
            micro=experiment.batch.micro,
            tokens=self.sequence,
            overlap=thread,
            rate=rate,
            beside=overlap,
            balanced=self.balancer.balanced if self.balancer is not None else None,
        )

    @property
    def _classifies(self) -> bool:
        return self.spec.family == "vit"

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

    def _to_disk(self, folder: Path | None) -> DiskOffload:
        conf = self.experiment.offload
        assert isinstance(self.engine, ShardedEngine), "conf.offload_check lets sharded weights through only"
        assert self.optimizer is not None
        if conf.path is not None:
            where = Path(conf.path)
        elif folder is not None:
            where = folder / OFFLOAD_FOLDER
        else:
            raise ValueError("offload.path must be given: this training has no folder of its own")
        offload = DiskOffload(
            conf,
            units=self.engine.units,
            optimizer=self.optimizer,
            ledger=self.ledger,
            folder=where / f"rank_{self.context.rank}",
            identity={
                "model": asdict(self.spec),
                "optimizer": self.experiment.optimizer.name,
                **{key: getattr(self.experiment.batch, key) for key in ("micro", "accumulation", "sequence")},
                "data": self.experiment.data.name,
                "precision": self.experiment.precision.value,
                "seed": self.experiment.seed,
                "num_ranks": self.context.num_ranks,
                "rank": self.context.rank,
            },
            reads_shard=self.engine.reads_shard,
            memory_bytes=(
                self.experiment.cluster.device.memory_bytes if conf.policy is OffloadKind.auto else None
            ),
        )
        self.engine.look_with(offload.unit_near)
        return offload

    def _begin_on_disk(self, offload: DiskOffload) -> None:
        if offload.resumed is None:
            offload.commit(self.first_step, self._notes())
            return
        self.first_step = offload.resumed["step"]
        if self.first_step >= self.experiment.steps:
            raise ValueError(
                f"offload.resume=true: {self.first_step} steps are done; steps={self.experiment.steps} must be more"
            )
        if self.loss_scale is not None and offload.resumed["loss_scale"] is not None:
            self.loss_scale.load(offload.resumed["loss_scale"])

    def _notes(self) -> dict[str, Any]:
        return {"loss_scale": self.loss_scale.state() if self.loss_scale is not None else None}

    def _on_device(
        self, batch: tuple[Tokens, Tokens] | tuple[Images, Tokens]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = (torch.from_numpy(part.copy()).to(self.context.device) for part in batch)
        if self._tokens is not None:
            return inputs[:, self._tokens], targets[:, self._tokens]
        return inputs, targets

    def _report(self, before: InterfaceBytes | None, peak_bytes: int) -> RankReport:
        after, saved = read_interface(), self.progress.saved
        return RankReport(
            rank=self.context.rank,
            node=self.context.node,
            clock=clock_name(),
            steps_ns=self.progress.steps_ns,
            metrics=self.progress.metrics,
            loss_weights=self.progress.loss_weights,
            laps=self.laps.laps,
            rows=self.ledger.rows,
            spans=self.ledger.spans,
            decisions=self._decisions(),
            decision_digest=decision_digest(self.ledger.decisions),
            memory_bytes={
                "parameters": (
                    self.offload.near_bytes(Kind.parameters)
                    if self.offload is not None
                    else local_bytes(self.engine.parameters())
                ),
                "gradients": self.progress.gradient_bytes,
                "optimizer": (
                    self.offload.near_bytes(Kind.optimizer)
                    if self.offload is not None
                    else optimizer_bytes(self.optimizer)
                ),
                "secondary_shard": self.engine.secondary_bytes(),
                "peak": peak_bytes,
                **({} if saved is None else {"activations": saved.peak_bytes}),
            },
            saved_bytes=None if saved is None else saved.unit_bytes,
            interface=after.since(before) if before is not None and after is not None else None,
            checkpoints=self.progress.checkpoints,
            skipped_steps=self.loss_scale.skipped_steps if self.loss_scale is not None else 0,
            units_of=self._units_of(),
            balance=self.balancer.report if self.balancer is not None else None,
            far_bytes=self.offload.far_bytes() if self.offload is not None else None,
            moved_bytes=self.offload.residency.moved_bytes("train") if self.offload is not None else None,
        )

    def _units_of(self) -> str:
        """Equal for ranks that are asked for the same units, and of balanced ones are told the same times."""
        mesh, rank = self.ledger.mesh, self.context.rank
        stage = f"{PIPELINE}{mesh.index(PIPELINE, rank)}"
        return stage if self.balancer is None else f"{stage}.{TENSOR}{mesh.group(TENSOR, rank)[0]}"

    def _decisions(self) -> list[Decision]:
        """Rank 0's; of the first rank of another tensor group what its balancing policy decided."""
        if self.context.rank == 0:
            return self.ledger.decisions
        if self.balancer is None or self.balancer.report.ranks[0] != self.context.rank:
            return []
        return [decision for decision in self.ledger.decisions if is_balance_event(decision.event)]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
