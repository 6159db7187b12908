"""How near migration comes to the most that whole units allow, when it decides by itself: simulated on 8 V100 with the
models of SEMI-migration's code, and for real on four ranks whose products are slept out; there pruning too, and whether
what each policy predicted came true.

Run: python benchmarks/balance_limits.py [OUTPUT] [simulated | runtime]. Ceilings are of the products of blocks (qkv,
out, fc1, fc2), which alone are slow: with any fraction of the work shared out, and with whole units (heads and hidden
features of the paired way, shares of columns of the others). Reached are the products of a step with nothing done over
those with what is in force, each half of a block as long as its slowest rank. Movement that does not hide is in no
product, so a second figure is taken from whole steps: as if all that they got shorter had been got off the products.

Predicted is what a policy says of the products when it decides, of a whole step by the share that products had of it;
naive is the ceiling of units in its place.

The part "runtime" wants a quiet machine; it starts four ranks, and takes ten minutes. Exit code 1 if the paired way
misses 95% of its ceiling with communication free, or the runtime 80%, or predictions are off by more than 10% (mean).
"""

import csv
import itertools
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from balance_map import blocks_ns

from twinbed.analysis.record import read_record
from twinbed.conf.compose import Composed, compose
from twinbed.conf.model_spec import ModelSpec
from twinbed.conf.schema import ExperimentConf
from twinbed.policies.balance import balanced_work
from twinbed.policies.balance.split import lossless_ceiling
from twinbed.policies.layout import layout_of
from twinbed.runtime.case import Case
from twinbed.runtime.launcher import launch_local
from twinbed.runtime.machine import BusyWatch
from twinbed.sim.simulate import simulate

SIMULATED_SHARE, RUNTIME_SHARE = 0.95, 0.8  # of the ceiling, that must be reached
PRODUCTS_SHARE = 0.9  # of a step of four equal ranks, that products must be
MOST_OFF = 0.1  # predicted speed-ups of the runtime's steps, mean

# ---- simulated

MODELS = {"vit_1b": 64, "vit_3b": 32}  # sequences of a batch
MIX = (8.0, 6.0, 4.0, 2.0)
SLOW: Mapping[str, tuple[float, ...]] = {**{f"{chi}": (float(chi),) for chi in (2, 4, 6, 8)}, "mix": MIX}
WAYS = ("paired", "broadcast", "scatter")
FREE = (
    "cluster.intra_node.bandwidth_Bps=1e18",
    "cluster.intra_node.latency_ns=0",
    "cluster.nccl.base_latency=false",
)
NETWORKS: Mapping[str, tuple[str, ...]] = {"free": FREE, "NVLink": ()}
STEPS = 8  # each is a period; of the last one step times are taken
RANKS = 8

# ---- runtime

FOUR = 4
SLOW_OF_FOUR: Sequence[tuple[float, ...]] = ((2.0,), (4.0,), (8.0,), (2.0, 2.0), (4.0, 2.0), (4.0, 4.0))
POLICIES: Mapping[str, tuple[str, ...]] = {
    "resize": ("balance=resize", "balance.accuracy_budget=2"),
    "migrate": ("balance=migrate",),
    "semi": ("balance=semi", "balance.accuracy_budget=0.5"),
}
# FLOP/s of a rank's products: they are slept out to 1.2 s of a step, many times what they take here
RATE = 4.5e7
RUN = (
    "target=runtime",
    "cluster.nodes=1",
    f"cluster.devices_per_node={FOUR}",
    "cluster.shaped=false",
    "cluster.slowdown_by=sleep",
    f"cluster.emulated_flops_per_s={RATE:g}",
    f"parallel.tensor={FOUR}",
    "model=gpt",
    "model.layers=2",
    "model.hidden=224",
    "model.heads=28",
    "model.vocab=64",
    "model.sequence=16",
    "data=synthetic",
    "comm=ddp",
    "precision=fp32",
    "batch.micro=2",
    "train.timeout_s=120",
)
PERIODS, PERIOD = 3, 3


@dataclass(frozen=True, slots=True)
class Row:
    """One setting.

    Args:
        slow: Times as long as the others, of each straggler.
        fractional, integral: Ceilings of the speed-up of products.
        products: Their speed-up.
        share: `products` over `integral`.
        by_steps: Speed-up of products that would make steps as much shorter as they are.
        by_steps_share: That over `integral`.
        steps: Speed-up of whole steps.
    """

    model: str
    slow: str
    way: str
    network: str
    fractional: float
    integral: float
    products: float
    share: float
    by_steps: float
    by_steps_share: float
    steps: float


@dataclass(frozen=True, slots=True)
class Ceilings:
    fractional: float
    integral: float

    @classmethod
    def of(cls, slowness: Sequence[float], experiment: ExperimentConf, spec: ModelSpec) -> "Ceilings":
        """Of the experiment's units."""
        work = balanced_work(experiment, spec, layout_of(experiment, spec))
        assert work is not None, "tensor ranks are balanced"
        return cls(lossless_ceiling(slowness), lossless_ceiling(slowness, work))


def main(argv: Sequence[str] | None = None) -> bool:
    """Whether a limit is missed."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parts = {"simulated": simulated, "runtime": measured}
    wanted = [arguments.pop()] if arguments and arguments[-1] in parts else list(parts)
    folder = Path(arguments[0] if arguments else "outputs/bench/balance_limits").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    missed = [parts[part](folder) for part in wanted]
    return any(missed)


# ---- simulated


def simulated(folder: Path) -> bool:
    rows = [
        simulated_row(model, slow, way, network)
        for model, network, slow, way in itertools.product(MODELS, NETWORKS, SLOW, WAYS)
    ]
    print(f"{RANKS} V100, fp32, products alone slow; balance=migrate, after {STEPS - 1} periods.\n")
    print(
        f"{'model':7} {'slow':>4} {'way':9} {'network':7} {'whole':>6} {'units':>6} {'reached':>7} {'share':>6} "
        f"{'by steps':>8} {'share':>6} {'steps':>6}"
    )
    for row in rows:
        print(
            f"{row.model:7} {row.slow:>4} {row.way:9} {row.network:7} {row.fractional:6.2f} {row.integral:6.2f} "
            f"{row.products:7.2f} {row.share:6.1%} {row.by_steps:8.2f} {row.by_steps_share:6.1%} {row.steps:6.2f}"
        )
    write_csv(folder / "simulated.csv", Row, rows)
    least = min(row.share for row in rows if row.way == "paired" and row.network == "free")
    print(
        f"\npaired, communication free: at least {least:.1%} of the ceiling of units ({SIMULATED_SHARE:.0%})"
    )
    for way in WAYS:
        real = [row.by_steps_share for row in rows if row.way == way and row.network == "NVLink"]
        print(f"{way}, NVLink: steps show {min(real):.0%} to {max(real):.0%} of it")
    return least < SIMULATED_SHARE


def simulated_row(model: str, slow: str, way: str, network: str) -> Row:
    factors = SLOW[slow]
    balanced = vit(
        model, factors, "balance=migrate", f"balance.way={way}", "balance.period=1", *NETWORKS[network]
    )
    none = vit(model, factors, *NETWORKS[network])
    slowness = (*factors, *(1.0,) * (RANKS - len(factors)))
    ceilings = Ceilings.of(slowness, balanced.experiment, balanced.spec)
    result = simulate(balanced.experiment, spec=balanced.spec).result
    before_s = simulate(none.experiment, spec=none.spec).result["iteration_s"]["mean"]
    after_s = result["iteration_s"]["mean"]
    periods = result["balance"]["groups"][0]["periods"]
    even_s, now_s = (products_s(periods[at]) for at in (0, -1))
    by_steps = even_s / (even_s - (before_s - after_s))
    return Row(
        model,
        slow,
        way,
        network,
        ceilings.fractional,
        ceilings.integral,
        even_s / now_s,
        even_s / now_s / ceilings.integral,
        by_steps,
        by_steps / ceilings.integral,
        before_s / after_s,
    )


def vit(model: str, factors: Sequence[float], *keys: str) -> Composed:
    slowdown = ",".join(f"{rank}:{factor:g}" for rank, factor in enumerate(factors))
    composed = compose(
        (
            "target=sim",
            "cluster=v100_8",
            f"model={model}",
            f"batch.micro={MODELS[model]}",
            "precision=fp32",
            f"parallel.tensor={RANKS}",
            "comm=ddp",
            f"steps={STEPS}",
            f"warmup_steps={STEPS - 1}",
            f"cluster.slowdown={{{slowdown}}}",
            "cluster.slowdown_by=repeat",
            *keys,
        )
    )
    composed.experiment.cluster.guesses = {}
    return composed


def products_s(period: Mapping[str, Any]) -> float:
    """Of a step: each half of all blocks as long as its slowest rank takes."""
    return (max(period["attention_ns"]) + max(period["ffn_ns"])) / 1e9


# ---- runtime


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of the part "runtime".

    Args:
        products, share: Speed-up of products, and that over `integral`.
        steps, steps_share: The same of whole steps, in which products are not all.
        predicted, naive: Of whole steps, by the policy, and by `integral`.
        against_equal: A step over that of four equal ranks.
        overhead: Of measuring and deciding, of all steps.
    """

    slow: str
    policy: str
    fractional: float
    integral: float
    products: float
    share: float
    step_s: float
    steps: float
    steps_share: float
    predicted: float
    naive: float
    against_equal: float
    overhead: float
    actions: str


def measured(folder: Path) -> bool:
    cases = {"equal": real("balance=migrate")}
    for factors in SLOW_OF_FOUR:
        slow = "cluster.slowdown={" + ",".join(f"{rank}:{by:g}" for rank, by in enumerate(factors)) + "}"
        cases[f"none {shown(factors)}"] = real(slow, steps=3)
        for policy, keys in POLICIES.items():
            cases[f"{policy} {shown(factors)}"] = real(slow, *keys)
    watch = BusyWatch()
    outcome = launch_local(
        folder,
        cluster=cases["equal"].experiment.cluster,
        cases=[Case(name=name, folder=name, experiment=case.resolved) for name, case in cases.items()],
        show_progress=False,
    )
    if outcome.status != "ok":
        sys.exit(outcome.error)
    if reason := watch.reason():
        print(f"void: {reason}\n")
    results = {name: read_record(folder / name).result for name in cases}
    equal = results["equal"]
    equal_s = settled_s(equal)
    equal_products_s = products_s(equal["balance"]["groups"][0]["periods"][-1])
    print(
        f"{FOUR} equal ranks: a step takes {equal_s:.3f} s, of it products {equal_products_s / equal_s:.1%}\n"
    )
    rows = [
        measured_row(factors, policy, cases, results, equal_s)
        for factors, policy in itertools.product(SLOW_OF_FOUR, POLICIES)
    ]
    print(
        f"{'slow':>5} {'policy':8} {'whole':>6} {'units':>6} {'reached':>7} {'share':>6} {'step':>7} {'steps':>6} "
        f"{'share':>6} {'predicted':>9} {'naive':>6} {'of equal':>8} {'overhead':>8}  in force"
    )
    for row in rows:
        print(
            f"{row.slow:>5} {row.policy:8} {row.fractional:6.2f} {row.integral:6.2f} {row.products:7.2f} "
            f"{row.share:6.1%} {row.step_s:6.3f}s {row.steps:6.2f} {row.steps_share:6.1%} {row.predicted:9.2f} "
            f"{row.naive:6.2f} {row.against_equal:8.2f} {row.overhead:8.2%}  {row.actions}"
        )
    write_csv(folder / "runtime.csv", Measured, rows)
    least = min(row.share for row in rows if row.policy == "migrate")
    print(f"\nmigrate: at least {least:.1%} of the ceiling of units ({RUNTIME_SHARE:.0%})")
    errors = [abs(row.predicted / row.steps - 1) for row in rows]
    naive = [abs(row.naive / row.steps - 1) for row in rows]
    print(
        f"predicted against measured steps, {len(rows)} runs: mean error {statistics.mean(errors):.1%} "
        f"({MOST_OFF:.0%}), worst {max(errors):.1%}; naive {statistics.mean(naive):.1%}, worst {max(naive):.1%}"
    )
    if equal_products_s < PRODUCTS_SHARE * equal_s:
        print(
            f"products are less than {PRODUCTS_SHARE:.0%} of a step: too much else is done for these figures"
        )
        return True
    return least < RUNTIME_SHARE or statistics.mean(errors) > MOST_OFF


def shown(factors: Sequence[float]) -> str:
    return ",".join(f"{by:g}" for by in factors)


def measured_row(
    factors: Sequence[float],
    policy: str,
    cases: Mapping[str, Composed],
    results: Mapping[str, Mapping[str, Any]],
    equal_s: float,
) -> Measured:
    name, none = f"{policy} {shown(factors)}", results[f"none {shown(factors)}"]
    slowness = (*factors, *(1.0,) * (FOUR - len(factors)))
    # its units are what migration could move, whatever the policy
    case = cases[f"migrate {shown(factors)}"]
    ceilings = Ceilings.of(slowness, case.experiment, case.spec)
    result = results[name]
    group = result["balance"]["groups"][0]
    periods = group["periods"]
    even_s = products_s(periods[0])  # nothing is in force in the first
    products = even_s / products_s(periods[-1])
    step_s, none_s = settled_s(result), none["iteration_s"]["p50"]
    steps = none_s / step_s
    predicted = decided(periods)["predicted_speedup"]
    work_s = sum(max(each) for each in blocks_ns(periods[0])) / 1e9
    return Measured(
        shown(factors),
        policy,
        ceilings.fractional,
        ceilings.integral,
        products,
        products / ceilings.integral,
        step_s,
        steps,
        steps / ceilings.integral,
        none_s / (none_s - work_s * (1 - 1 / predicted)),
        none_s / (none_s - even_s * (1 - 1 / ceilings.integral)),
        step_s / equal_s,
        group["overhead_s"] / sum(result["iterations_s"]),
        periods[-1]["actions"],
    )


def decided(periods: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The period at whose end what is in force at last came to be."""
    actions = periods[-1]["actions"]
    in_force = itertools.takewhile(lambda period: period["actions"] == actions, reversed(periods))
    return list(in_force)[-1]


def settled_s(result: Mapping[str, Any]) -> float:
    """Median step of the last period."""
    before, last = (period["step"] for period in result["balance"]["groups"][0]["periods"][-2:])
    steps = last - before
    return statistics.median(result["iterations_s"][-steps:])


def real(*keys: str, steps: int | None = None) -> Composed:
    of_period = [f"balance.period={PERIOD}"] if steps is None else []
    return compose([*RUN, *keys, *of_period, f"steps={steps or PERIODS * PERIOD}", "warmup_steps=1"])


def write_csv(path: Path, of: type[Any], rows: Iterable[Any]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(of)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
