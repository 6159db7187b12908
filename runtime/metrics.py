"""What a training shows while it runs: metrics.csv, a progress bar and, if asked for, TensorBoard."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from ..analysis.record import write_text

METRICS = "metrics.csv"


@dataclass(slots=True, kw_only=True)
class StepMetrics:
    """One line of metrics.csv. While the run is on, `loss` and `iteration_s` are those of rank 0."""

    step: int
    loss: float
    validation_loss: float | None = None
    validation_accuracy: float | None = None  # share of the pictures whose class was told right
    learning_rate: float = 0.0
    gradient_norm: float | None = None
    loss_scale: float | None = None
    skipped: bool = False
    iteration_s: float = 0.0
    tokens_per_s: float = 0.0


class MetricsWriter:
    """Rank 0's view of the run; on other ranks every call does nothing.

    Args:
        folder: Where metrics.csv goes; TensorBoard's files go to `tensorboard/` below it.
        tensorboard: Write them too. Without the package installed this is an error.
    """

    def __init__(
        self, folder: Path, *, first_step: int, steps: int, name: str, active: bool, tensorboard: bool = False
    ) -> None:
        self._folder, self._active = folder, active
        self._board: Any = None
        if not active:
            return
        if tensorboard:
            self._board = _open_board(folder / "tensorboard")
        self._file = (folder / METRICS).open("w", encoding="utf-8", newline="")
        self._file.write(_HEADER)
        self._file.flush()
        self._bar = tqdm(
            total=steps,
            initial=first_step,
            desc=name,
            unit="step",
            file=sys.stderr,
            mininterval=1.0,
            dynamic_ncols=False,
            ncols=100,
            leave=True,
        )

    def write(self, metrics: StepMetrics) -> None:
        if not self._active:
            return
        self._file.write(_line(metrics))
        self._file.flush()
        self._bar.set_postfix_str(
            f"rank 0's loss {metrics.loss:.4f}, {metrics.iteration_s * 1e3:.0f} ms", refresh=False
        )
        self._bar.update()
        if self._board is not None:
            for key, value in asdict(metrics).items():
                if key != "step" and value is not None:
                    self._board.add_scalar(key, float(value), metrics.step)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._active:
            self._bar.close()
            self._file.close()
            if self._board is not None:
                self._board.close()


def write_metrics(folder: Path, rows: Sequence[StepMetrics]) -> None:
    """Put the figures of all ranks in the place of rank 0's, once they are known."""
    write_text(folder / METRICS, _HEADER + "".join(map(_line, rows)))


_HEADER = ",".join(f.name for f in fields(StepMetrics)) + "\n"


def _line(metrics: StepMetrics) -> str:
    values = asdict(metrics).values()
    return ",".join("" if v is None else str(int(v) if isinstance(v, bool) else v) for v in values) + "\n"


def _open_board(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as err:
        raise ValueError(f"TensorBoard was asked for and is not installed: {err}") from err
    return SummaryWriter(str(folder))
