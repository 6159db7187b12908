"""Amounts for people: a unit chosen, about four digits, a dash where there is nothing. Imports nothing."""

from collections.abc import Iterable

MISSING_TEXT = "-"
_STEPS = {
    "s": ((1e-6, "µs"), (1e-3, "ms"), (1.0, "s")),
    "byte": ((1.0, "B"), (1e3, "kB"), (1e6, "MB"), (1e9, "GB"), (1e12, "TB")),
    "flop/s": ((1e6, "MFLOP/s"), (1e9, "GFLOP/s"), (1e12, "TFLOP/s")),
}


def scale(unit: str, amounts: Iterable[float | None]) -> tuple[float, str]:
    """What to divide by, and the unit's name then: the largest step not above the largest amount."""
    steps = _STEPS.get(unit)
    if steps is None:
        return (0.01, "%") if unit == "fraction" else (1.0, "" if unit == "count" else unit)
    largest = max((abs(amount) for amount in amounts if amount is not None and amount == amount), default=0.0)
    fitting = [step for step in steps if step[0] <= largest]
    if largest == 0:
        return 1.0, steps[-1][1] if unit == "s" else steps[0][1]
    return fitting[-1] if fitting else steps[0]


def number(amount: object, factor: float = 1.0) -> str:
    """About four digits, or a dash where there is nothing."""
    if is_absent(amount):
        return MISSING_TEXT
    assert isinstance(amount, int | float)
    scaled = float(amount) / factor
    if scaled == int(scaled) and abs(scaled) < 1e6:
        return f"{int(scaled):,}"
    if abs(scaled) >= 1e9:
        return f"{scaled:.4g}"
    return f"{scaled:,.0f}" if abs(scaled) >= 1000 else f"{scaled:.4g}"


def amount_text(unit: str, amount: float | None) -> str:
    """An amount with its unit, as in a sentence."""
    factor, label = scale(unit, [amount])
    return f"{number(amount, factor)} {label}".rstrip()


def is_absent(item: object) -> bool:
    """Whether a cell holds nothing: None, or a table's missing number."""
    return item is None or item != item  # NaN is not itself
