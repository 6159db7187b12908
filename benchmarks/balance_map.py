"""Where SEMI prunes, where it migrates, where it does both: what the policies decide and predict, setting by setting.

Run: python benchmarks/balance_map.py [--hidden N] [--measured package.module:function]. Nothing runs, nothing is
simulated: policies are told times that closed forms give (products at a fixed rate, movement by latency and bandwidth)
and say what they do and how much faster a step's products and movements then are. `--measured` names a function that is
given a `Setting` and returns the speed-up that SEMI had in it somewhere; it is set beside the prediction.
"""

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from twinbed.conf.model_spec import spec_from_keys
from twinbed.conf.schema import BalanceConf
from twinbed.policies.balance import (
    Assignment,
    BlockWork,
    GroupMeasured,
    Half,
    Migrate,
    MovementTimed,
    Prune,
    block_work,
)
from twinbed.policies.balance.build import build_balance
from twinbed.policies.balance.speeds import kept_share
from twinbed.policies.balance.split import lossless_ceiling
from twinbed.policies.loading import load_named

RANKS, BLOCKS, BATCH, SEQUENCE = (
    8,
    24,
    64,
    65,
)  # as SEMI's released code trains ViT-1B (hidden 2048), on 8 V100
HEADS = 16
FLOP_PER_S = 12e12  # of a V100's fp32 products
PRUNING = 0.034  # of a rank's time without, what gathering and scattering columns takes (simulated V100)
LATENCY_NS = 20_000
FREE_BYTES = 8 << 30
PERIODS = 8  # that policies are told: enough to be sure of speeds that do not change

CHI = (2.0, 4.0, 8.0)
STRAGGLERS = (1, 4)
BANDWIDTHS_BPS = (130e9, 12.5e9, 1.25e9, 0.125e9)  # NVLink of a V100, 100, 10 and 1 Gbit/s
BUDGETS_POINTS = (0.0, 0.5, 2.0)
POLICIES = ("resize", "migrate", "semi")


@dataclass(frozen=True, slots=True)
class Setting:
    """`stragglers` of 8 ranks take `chi` times as long; pruning may cost `budget_points` of accuracy."""

    chi: float
    stragglers: int
    bandwidth_Bps: float
    budget_points: float

    @property
    def slowness(self) -> tuple[float, ...]:
        return (self.chi,) * self.stragglers + (1.0,) * (RANKS - self.stragglers)


@dataclass(frozen=True, slots=True)
class Row:
    """What policies make of a setting.

    Args:
        decision: Of SEMI: none, prune, migrate or both.
        predicted: Speed-up over doing nothing, by policy.
        ceiling: Of whole units with movement free, nothing pruned.
        measured: Of SEMI; None: nobody measured.
    """

    setting: Setting
    decision: str
    predicted: dict[str, float]
    ceiling: float
    measured: float | None


Measure = Callable[[Setting], float]


def main(arguments: Sequence[str] | None = None, measured: Measure | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hidden", type=int, default=2048, help="2048: ViT-1B, 3072: ViT-3B")
    parser.add_argument("--measured", help="package.module:function or file.py:function, Setting -> speed-up")
    given = parser.parse_args(arguments)
    if given.hidden < HEADS or given.hidden % HEADS:
        parser.error(f"--hidden {given.hidden}: must be a multiple of {HEADS}, the heads")
    if given.measured:
        measured = cast(Measure, _Named(given.measured))
    found = [row(setting, vit_work(given.hidden), measured) for setting in settings()]
    print(
        f"{BLOCKS} blocks of hidden {given.hidden} on {RANKS} ranks, predicted speed-up over doing nothing.\n"
    )
    print(
        f"{'chi':>4} {'slow':>4} {'GB/s':>6} {'points':>6}  {'SEMI does':<9} "
        f"{'resize':>6} {'migrate':>7} {'semi':>6} {'ceiling':>7} {'measured':>8}"
    )
    for each in found:
        at, shown = each.setting, "" if each.measured is None else f"{each.measured:.2f}"
        print(
            f"{at.chi:>4g} {at.stragglers:>4} {at.bandwidth_Bps / 1e9:>6g} {at.budget_points:>6g}  "
            f"{each.decision:<9} {each.predicted['resize']:>6.2f} {each.predicted['migrate']:>7.2f} "
            f"{each.predicted['semi']:>6.2f} {each.ceiling:>7.2f} {shown:>8}"
        )
    counts = {
        word: sum(each.decision == word for each in found) for word in ("prune", "migrate", "both", "none")
    }
    print(f"\n{len(found)} settings: " + ", ".join(f"{word} {count}" for word, count in counts.items()))
    worst = min(
        each.predicted["semi"] / max(each.predicted["resize"], each.predicted["migrate"]) for each in found
    )
    print(f"SEMI over the better of resize and migrate, at the least: {worst:.3f}")
    errors = [abs(each.predicted["semi"] / each.measured - 1) for each in found if each.measured is not None]
    if errors:
        print(f"predicted against measured, mean of {len(errors)}: {100 * sum(errors) / len(errors):.1f} %")


class _Named:
    """A function by its name, called when it is needed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, setting: Setting) -> float:
        return float(load_named("--measured", self._name, setting))


def settings() -> list[Setting]:
    return [Setting(*each) for each in itertools.product(CHI, STRAGGLERS, BANDWIDTHS_BPS, BUDGETS_POINTS)]


def vit_work(hidden: int) -> BlockWork:
    """Of blocks of a ViT, which are a GPT's."""
    keys = {"family": "gpt", "layers": BLOCKS, "hidden": hidden, "heads": HEADS, "vocab": 64}
    spec = spec_from_keys(keys | {"sequence": SEQUENCE})
    return block_work(
        spec, ranks=RANKS, blocks=BLOCKS, micro=BATCH, sequence=SEQUENCE, element_bytes=4, ahead=True
    )


def row(setting: Setting, work: BlockWork, measured: Measure | None = None) -> Row:
    predicted = {}
    decision = "none"
    for name in POLICIES:
        actions, predicted[name] = decide(name, setting, work)
        kinds = {type(action) for action in actions}
        if name == "semi" and kinds:
            decision = "both" if len(kinds) > 1 else "prune" if Prune in kinds else "migrate"
    return Row(
        setting,
        decision,
        predicted,
        lossless_ceiling(setting.slowness, work),
        None if measured is None else measured(setting),
    )


def decide(name: str, setting: Setting, work: BlockWork) -> tuple[tuple[Prune | Migrate, ...], float]:
    """Actions of a policy that has been told the same speeds for some periods, and the speed-up that it predicts."""
    policy = build_balance(BalanceConf(name=name, accuracy_budget=setting.budget_points), work)
    for half in Half:
        policy.decide(movement_timed(half, setting, work))
    assignment = Assignment(work)
    for period in range(PERIODS):
        answer = policy.decide(group_measured(period, setting, assignment))
        if answer is not None:
            assignment = Assignment(work, answer)
    return assignment.actions, policy.predicted_speedup or 1.0


def movement_timed(half: Half, setting: Setting, work: BlockWork) -> MovementTimed:
    own = work.units[half]
    units = (1, max(1, own // 2))
    few_ns, many_ns = (
        2 * (LATENCY_NS + round(count * work.unit_bytes(half) / setting.bandwidth_Bps * 1e9))
        for count in units
    )
    return MovementTimed(half, units, (few_ns, many_ns))


def group_measured(period: int, setting: Setting, assignment: Assignment) -> GroupMeasured:
    """Times of products: forward, and two of the same size backward."""
    work = assignment.work
    times = []
    for half in Half:
        shares = [kept_share(assignment, half, rank) for rank in range(work.ranks)]
        units = [
            assignment.computed(half, rank) * share + (PRUNING * work.units[half] if share < 1 else 0)
            for rank, share in enumerate(shares)
        ]
        unit_ns = 3e9 * work.unit_flop[half] * work.blocks * work.passes / FLOP_PER_S
        times.append(
            tuple(round(slow * unit_ns * done) for slow, done in zip(setting.slowness, units, strict=True))
        )
    attention_ns, ffn_ns = times
    return GroupMeasured(period, attention_ns, ffn_ns, (FREE_BYTES,) * work.ranks)


if __name__ == "__main__":
    main()
