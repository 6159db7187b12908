"""Batches, data, optimizer, the loop around them, and failures over a long training."""

from dataclasses import dataclass, field
from enum import Enum

from omegaconf import MISSING

from .limits import MAX_LOSS_SCALE, MAX_MICRO_BATCHES, MAX_TIMEOUT_S, MIN_TIMEOUT_S, require


@dataclass(kw_only=True)
class BatchConf:
    micro: int = 1  # sequences of one rank in one forward
    accumulation: int = 1  # micro-batches a step
    global_sequences: int | None = None  # given: accumulation follows
    sequence: int | None = None  # tokens of a sequence; null: the model's

    def __post_init__(self) -> None:
        require(self.micro >= 1, "batch.micro", self.micro, ">= 1")
        few = 1 <= self.accumulation <= MAX_MICRO_BATCHES
        require(few, "batch.accumulation", self.accumulation, f"in [1, {MAX_MICRO_BATCHES}]")
        for key in ("global_sequences", "sequence"):
            value = getattr(self, key)
            require(value is None or value >= 1, f"batch.{key}", value, ">= 1 or null")


DATA = ("text", "synthetic", "fashion_mnist")


@dataclass(kw_only=True)
class DataConf:
    name: str = MISSING  # text, synthetic or fashion_mnist
    # text: a file of your own; null: the standard library's documentation. fashion_mnist: a folder with the four IDX
    # files, plain or .gz; null: where Debian's dataset-fashion-mnist puts them
    path: str | None = None
    validation_fraction: float = 0.1
    num_train: int | None = None  # fashion_mnist: images to train on, the first of the file
    num_test: int | None = None  # fashion_mnist: images of every validation, the first of the file

    def __post_init__(self) -> None:
        require(self.name in DATA, "data.name", self.name, f"one of {list(DATA)}")
        require(
            0 <= self.validation_fraction < 1,
            "data.validation_fraction",
            self.validation_fraction,
            "in [0, 1)",
        )
        for key in ("num_train", "num_test"):
            value = getattr(self, key)
            if self.name == "fashion_mnist":
                require(
                    value is not None and value >= 1, f"data.{key}", value, ">= 1 with data=fashion_mnist"
                )
            else:
                require(value is None, f"data.{key}", value, f"null with data={self.name}, which has no end")


OPTIMIZERS = ("adamw", "sgd", "lamb", "lars")


class LambCorrection(Enum):
    """Where the bias of moments that begin at 0 is corrected."""

    moments = "moments"  # each moment divided by 1 - beta^t: the paper, apex
    rate = "rate"  # lr times sqrt(1 - beta2^t) / (1 - beta1^t): DeepSpeed, Colossal-AI


class MomentumOrder(Enum):
    """What the momentum of LARS sums up."""

    after_rate = "after_rate"  # steps, rate and ratio in them: the paper
    after_ratio = "after_ratio"  # ratio times gradient, and the rate comes last: LARC, timm
    before_rate = "before_rate"  # gradients, and both come last: Colossal-AI


@dataclass(kw_only=True)
class OptimizerConf:
    name: str = MISSING  # adamw, sgd, lamb or lars
    lr: float = 1e-3
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])  # adamw, lamb
    eps: float = 1e-8  # adamw, lamb: added to the root of the second moment; lars: to the sum of norms
    # adamw: decoupled; sgd: added to the gradient; lamb, lars: inside the trust ratio
    weight_decay: float = 0.0
    momentum: float = 0.0  # sgd, lars
    bias_correction: bool = True  # lamb: of the moments; false: none, as in the paper's third version
    correction: LambCorrection = LambCorrection.moments  # lamb: where the bias of moments is corrected
    max_coeff: float | None = None  # lamb, lars: the most that a trust ratio may be; null: no bound
    min_coeff: float = 0.0  # lamb, lars: the least
    max_norm: float | None = None  # lamb: the most that a weight's norm counts (phi); null: no bound
    min_norm: float = 0.0  # lamb: the least that a weight's norm counts, where it is not 0
    decay_in_ratio: bool = True  # lamb: false: weights decay apart from the trust ratio, as in AdamW
    eeta: float = 1e-3  # lars: trust coefficient
    clip: bool = False  # lars: the local rate bounds lr and does not multiply it (LARC)
    momentum_order: MomentumOrder = MomentumOrder.after_rate  # lars: what momentum sums up
    exclude_1d: bool = True  # lamb, lars: biases and norms' weights have no decay, and a trust ratio of 1

    def __post_init__(self) -> None:
        require(self.name in OPTIMIZERS, "optimizer.name", self.name, f"one of {list(OPTIMIZERS)}")
        for key in ("lr", "eeta"):
            require(getattr(self, key) > 0, f"optimizer.{key}", getattr(self, key), "> 0")
        for key in ("eps", "weight_decay", "min_coeff", "min_norm"):
            require(getattr(self, key) >= 0, f"optimizer.{key}", getattr(self, key), ">= 0")
        require(0 <= self.momentum < 1, "optimizer.momentum", self.momentum, "in [0, 1)")
        for least, most in (("min_coeff", "max_coeff"), ("min_norm", "max_norm")):
            low, high = getattr(self, least), getattr(self, most)
            require(high is None or high > 0, f"optimizer.{most}", high, "> 0 or null")
            require(high is None or low <= high, f"optimizer.{least}", low, f"<= optimizer.{most}={high}")
        require(
            len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas),
            "optimizer.betas",
            list(self.betas),
            "two numbers in [0, 1)",
        )


@dataclass(kw_only=True)
class TrainConf:
    # chance that a number of the embeddings' sum, or of what a sublayer adds, is dropped; attention's probabilities
    # are not (kernels.dropout follows it in simulated kernels)
    dropout: float = 0.0
    gradient_clipping: float = 1.0  # global L2 norm; 0: off
    epochs: float | None = None  # passes over the data (fashion_mnist); given: steps follow, rounded up
    warmup_lr_steps: int = 0
    lr_schedule: str = "constant"  # constant, linear or cosine, down to lr_min_fraction at `steps`
    lr_min_fraction: float = 0.1
    loss_scale: float = 0.0  # fp16: 0 is dynamic
    eval_every: int = 0  # steps between validations; 0: none
    # batches of one validation, each rank; fashion_mnist: as many as hold data.num_test images
    eval_batches: int = 4
    save_every: int = 0  # steps between checkpoints; 0: none
    resume_from: str | None = None  # a checkpoint folder
    tensorboard: bool | None = None  # write TensorBoard's files beside metrics.csv; null: if it is installed
    tokens: float | None = None  # gives time_to_train_s, gpu_hours and cost
    timeout_s: float = 20.0  # a collective that waits longer fails the run

    def __post_init__(self) -> None:
        require(0 <= self.dropout < 1, "train.dropout", self.dropout, "in [0, 1)")
        require(self.gradient_clipping >= 0, "train.gradient_clipping", self.gradient_clipping, ">= 0")
        require(
            self.lr_schedule in ("constant", "linear", "cosine"),
            "train.lr_schedule",
            self.lr_schedule,
            "one of ['constant', 'linear', 'cosine']",
        )
        for key in ("warmup_lr_steps", "eval_every", "save_every"):
            require(getattr(self, key) >= 0, f"train.{key}", getattr(self, key), ">= 0")
        require(
            0 <= self.loss_scale <= MAX_LOSS_SCALE,
            "train.loss_scale",
            self.loss_scale,
            f"in [0, {MAX_LOSS_SCALE:.0f}] (0: dynamic)",
        )
        lowest = self.lr_min_fraction
        require(0 <= lowest <= 1, "train.lr_min_fraction", lowest, "in [0, 1], a share of optimizer.lr")
        few = 1 <= self.eval_batches <= MAX_MICRO_BATCHES
        require(few, "train.eval_batches", self.eval_batches, f"in [1, {MAX_MICRO_BATCHES}]")
        for key in ("tokens", "epochs"):
            value = getattr(self, key)
            require(value is None or value > 0, f"train.{key}", value, "> 0 or null")
        require(
            MIN_TIMEOUT_S <= self.timeout_s <= MAX_TIMEOUT_S,
            "train.timeout_s",
            self.timeout_s,
            f"in [{MIN_TIMEOUT_S:.0f}, {MAX_TIMEOUT_S:.0f}]",
        )


@dataclass(kw_only=True)
class GoodputConf:
    """What gives the share of a training that is progress; node_mtbf_h null: not asked for."""

    node_mtbf_h: float | None = None  # mean hours between failures of one node
    checkpoint_s: float = 60.0  # that training stands still for a checkpoint
    interval_s: float | None = None  # of work between two; null: the best (Young, Daly)
    restart_s: float = 300.0  # from a failure until training goes on

    def __post_init__(self) -> None:
        for key in ("node_mtbf_h", "interval_s"):
            value = getattr(self, key)
            require(value is None or value > 0, f"goodput.{key}", value, "> 0 or null")
        for key in ("checkpoint_s", "restart_s"):
            require(getattr(self, key) >= 0, f"goodput.{key}", getattr(self, key), ">= 0")
