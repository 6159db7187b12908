"""Fits the three free constants of `conf/cluster/dgx2_v100.yaml` again: `python -m twinbed.sim.deepspeed.fit`.

They are the effective rate of matmuls, the tokens that a matmul costs beside its own, and the share of the
links' bandwidth that payload gets; fitted on the rows of the ZeRO++ tables that `sim/validate` flags as fitted:
ZeRO-3, 138B at 2K tokens with 1 and 8 links, 18B at 1K and 2K with 4 links. No ZeRO++ cell is among them.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...conf.compose import Composed, compose
from ...conf.schema import ClusterConf
from ..simulate import simulate
from ..validate.quantities import QUANTITIES, Outcome
from ..validate.rows import PublishedRow, read_folder

ROWS = Path(__file__).parents[1] / "validate" / "rows"
TABLE = "zeropp"

# Where the search begins, and the scale of a step: the device's peak is 125 TFLOP/s
_BEGIN = (0.67, 0.6, 0.9)
_LEAST, _MOST = (0.3, 0.0, 0.5), (1.0, 2.0, 1.0)


@dataclass(frozen=True, slots=True)
class Constants:
    """`device.matmul_efficiency`, `device.matmul_fixed_tokens` and `inter_node.efficiency`."""

    matmul_efficiency: float
    matmul_fixed_tokens: float
    link_efficiency: float

    def on(self, cluster: ClusterConf) -> ClusterConf:
        """`cluster` with these, and without ranges of guesses, which cost time and decide nothing here."""
        device = replace(
            cluster.device,
            matmul_efficiency=self.matmul_efficiency,
            matmul_fixed_tokens=self.matmul_fixed_tokens,
        )
        links = replace(cluster.inter_node, efficiency=self.link_efficiency)
        return replace(cluster, device=device, inter_node=links, guesses={})


@dataclass(frozen=True, slots=True)
class Fitted:
    """The best constants, and what remains: ours / paper - 1 of each row."""

    constants: Constants
    errors: dict[str, float]


def fitted_rows() -> list[PublishedRow]:
    """The rows that constants may be chosen by."""
    rows = [row for row in read_folder(ROWS)[TABLE] if row.fitted]
    if len(rows) < len(_BEGIN):
        raise ValueError(f"{ROWS}: {len(rows)} rows of {TABLE} are fitted, for {len(_BEGIN)} constants")
    return rows


def fit(rows: Sequence[PublishedRow]) -> Fitted:
    """Least squares of the logarithms, by the event simulator itself."""
    from scipy.optimize import least_squares  # takes long to import, and only this command needs it

    composed = [compose(["target=sim", "steps=1", "warmup_steps=0", *row.overrides]) for row in rows]

    def errors(x: Sequence[float]) -> list[float]:
        constants = Constants(float(x[0]), 1000.0 * float(x[1]), float(x[2]))
        return [printed(each, constants) / row.value - 1.0 for each, row in zip(composed, rows, strict=True)]

    best = least_squares(errors, _BEGIN, bounds=(_LEAST, _MOST), diff_step=0.01, xtol=1e-4, ftol=1e-6)
    constants = Constants(
        round(float(best.x[0]), 4), round(1000.0 * float(best.x[1])), round(float(best.x[2]), 4)
    )
    left = errors(
        (constants.matmul_efficiency, constants.matmul_fixed_tokens / 1000.0, constants.link_efficiency)
    )
    return Fitted(constants, {row.row_id: error for row, error in zip(rows, left, strict=True)})


def printed(composed: Composed, constants: Constants) -> float:
    """TFLOP/s a GPU as ZeRO++ prints them: 8 parameters tokens / time."""
    experiment = replace(composed.experiment, cluster=constants.on(composed.experiment.cluster))
    outcome = Outcome(experiment, composed.spec, simulate(experiment, spec=composed.spec).result)
    amount = QUANTITIES["tflops_8pt"].amount
    assert amount is not None
    return amount(outcome) / outcome.seconds / 1e12


def main() -> None:
    found = fit(fitted_rows())
    constants = found.constants
    lines = [
        f"cluster.device.matmul_efficiency    {constants.matmul_efficiency:.4f}",
        f"cluster.device.matmul_fixed_tokens  {constants.matmul_fixed_tokens:.0f}",
        f"cluster.inter_node.efficiency       {constants.link_efficiency:.4f}",
        *(f"{name:<35} {100 * error:+.1f} %" for name, error in found.errors.items()),
    ]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
