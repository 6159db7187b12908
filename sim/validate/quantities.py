"""What papers print, computed from a simulated record; and how a figure becomes seconds and back."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...conf.model_spec import ModelSpec, num_parameters
from ...conf.schema import ExperimentConf

# name of a unit -> how many SI units (s, bytes, FLOP/s, 1/s, 1) it has
UNITS: dict[str, dict[str, float]] = {
    "time": {"s": 1.0, "ms": 1e-3},
    "flop rate": {"TFLOP/s": 1e12},
    "token rate": {"tokens/s": 1.0},
    "sample rate": {"samples/s": 1.0},
    "bytes": {"GB": 1e9, "MB": 1e6, "GiB": 2.0**30, "MiB": 2.0**20},
    "one": {"ratio": 1.0},
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One simulated experiment: all that any quantity needs."""

    experiment: ExperimentConf
    spec: ModelSpec
    result: Mapping[str, Any]  # result.json

    @property
    def seconds(self) -> float:
        """Mean time of an iteration."""
        mean = self.result["iteration_s"]["mean"]
        if mean is None:
            raise ValueError("no iteration was timed: steps must be more than warmup_steps")
        return float(mean)

    @property
    def range_s(self) -> tuple[float, float] | None:
        """Least and largest time over the ranges of the guessed inputs."""
        stats = self.result["iteration_s"]
        low, high = stats.get("low"), stats.get("high")
        return None if low is None or high is None else (float(low), float(high))

    @property
    def num_ranks(self) -> int:
        return self.experiment.cluster.num_ranks

    @property
    def tokens(self) -> float:
        """Of all ranks in one iteration."""
        return float(self.result["tokens_per_s"]) * self.seconds

    @property
    def model_flop(self) -> float:
        """Of one rank in one iteration, without recomputation."""
        return float(self.result["tflops_per_gpu"]) * 1e12 * self.seconds

    @property
    def hardware_flop(self) -> float:
        """Of one rank in one iteration, recomputation counted."""
        return float(self.result["tflops_per_gpu_hardware"]) * 1e12 * self.seconds


@dataclass(frozen=True, slots=True)
class Quantity:
    """A kind of published figure.

    Attributes:
        dimension: A key of `UNITS`.
        amount: For a rate: what is done in one iteration, so that the rate is amount / seconds.
        read: For what is no matter of time: from the record, in SI units.
        is_ratio: The same figure of two experiments, one divided by the other.
    """

    dimension: str
    amount: Callable[[Outcome], float] | None = None
    read: Callable[[Outcome], float] | None = None
    is_ratio: bool = False
    about: str = ""

    @property
    def is_timed(self) -> bool:
        """Whether the figure follows from the time of one iteration."""
        return self.read is None and not self.is_ratio

    def from_seconds(self, seconds: float, outcome: Outcome) -> float:
        """The figure, in SI units, if an iteration of `outcome` took so long. Its own inverse."""
        assert self.is_timed
        return seconds if self.amount is None else self.amount(outcome) / seconds

    def measure(self, outcome: Outcome, against: Outcome | None = None) -> float:
        """The simulated figure in SI units."""
        if against is not None:
            return self._single(outcome) / self._single(against)
        return self._single(outcome)

    def _single(self, outcome: Outcome) -> float:
        if self.read is not None:
            return self.read(outcome)
        return self.from_seconds(outcome.seconds, outcome)


def _eight_p_tokens(outcome: Outcome) -> float:
    # forward, recomputed forward and backward: 2 + 2 + 4 operations a parameter and token
    return 8.0 * num_parameters(outcome.spec) * outcome.tokens / outcome.num_ranks


def _states(outcome: Outcome) -> float:
    held = outcome.result["memory_bytes"]
    return float(held["parameters"] + held["gradients"] + held["optimizer"])


def _states_and_copy(outcome: Outcome) -> float:
    return _states(outcome) + _held("secondary_shard")(outcome)


def _held(name: str) -> Callable[[Outcome], float]:
    return lambda outcome: float(outcome.result["memory_bytes"][name])


def _tokens_per_second(outcome: Outcome) -> float:
    return outcome.tokens / outcome.seconds


QUANTITIES: dict[str, Quantity] = {
    "iteration_time": Quantity("time", about="seconds of one iteration"),
    "tflops_8pt": Quantity(
        "flop rate", _eight_p_tokens, about="8 x parameters x tokens / time, per GPU: recomputation counted"
    ),
    "tokens_per_s": Quantity("token rate", lambda o: o.tokens, about="of all GPUs"),
    "tokens_per_s_per_gpu": Quantity("token rate", lambda o: o.tokens / o.num_ranks),
    "samples_per_s": Quantity(
        "sample rate", lambda o: o.tokens / (o.experiment.batch.sequence or o.spec.sequence)
    ),
    "speedup": Quantity("one", read=_tokens_per_second, is_ratio=True, about="tokens/s over tokens/s"),
    "state_bytes": Quantity("bytes", read=_states, about="weights, gradients and optimizer states of a rank"),
    "node_copy_bytes": Quantity("bytes", read=_held("secondary_shard"), about="hpZ's copy of the weights"),
    "peak_bytes": Quantity("bytes", read=_held("peak"), about="of the rank that holds most"),
    "state_ratio": Quantity(
        "one", read=_states_and_copy, is_ratio=True, about="states and copy over states and copy"
    ),
}
