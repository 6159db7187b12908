"""What a report says in words: what was run, was the prediction right, what is missing."""

from collections.abc import Mapping
from typing import Any

from .advice import advice_sentence
from .balancing import balance_sentences
from .load import Run, Sweep
from .naming import policy_words
from .parity import value
from .record import Record
from .tables import naive_s, records, sides, sweep_table, swept_keys
from .units import amount_text

CLOSE = 0.10  # a prediction within a tenth counts as right


def title(run: Run) -> str:
    """A short heading, as `zeropp, gpt_tiny on local_2x2`."""
    experiment = run.main.result.get("experiment") or {}
    names = {group: (experiment.get(group) or {}).get("name") for group in ("comm", "model", "cluster")}
    what = ", ".join(str(names[group]) for group in ("comm", "model") if names[group])
    where = f" on {names['cluster']}" if names["cluster"] else ""
    return (what + where) or run.folder.resolve().name


def summary(run: Run, parity: Mapping[str, Any] | None) -> list[str]:
    """The sentences on top, most important first."""
    sentences = [describe(run.main.result)]
    sentences += [_fate(side, record) for side, record in sides(run) if record.result.get("status") != "ok"]
    sentences += run.notes
    sentences.append(_times(run, parity))
    sentences += [
        f"{side.capitalize()}: {said}." for side, record in sides(run) for said in balance_sentences(record)
    ]
    if parity is not None:
        sentences.append(ledger_sentence(parity))
        sentences.append(replay_sentence(parity))
    return [sentence for sentence in sentences if sentence]


def describe(result: Mapping[str, Any]) -> str:
    """What was run, from the resolved configuration."""
    experiment = result.get("experiment") or {}
    cluster, model = experiment.get("cluster") or {}, experiment.get("model") or {}
    if not cluster and not model:
        return "The record does not say what was run: its configuration is empty."
    words = [f"Training {model.get('name') or 'a model'}"]
    policy = policy_words(result)
    if policy:
        words.append(f"with {policy}")
    nodes, devices = cluster.get("nodes"), cluster.get("devices_per_node")
    if nodes and devices:
        words.append(f"on {_many(nodes, 'node')} of {_many(devices, 'rank')}")
    inter = cluster.get("inter_node") or {}
    if nodes and nodes > 1 and inter.get("bandwidth_Bps"):
        gigabits = float(inter["bandwidth_Bps"]) * 8 / 1e9
        rate = f"{gigabits:g} Gbit/s" if gigabits >= 1 else f"{gigabits * 1e3:g} Mbit/s"
        links = inter.get("links") or 1
        words.append(f"with {rate} between nodes" if links == 1 else f"with {links} x {rate} from each node")
    rest = [str(experiment[key]) for key in ("precision",) if experiment.get(key)]
    rest += [_many(experiment["steps"], "step")] if experiment.get("steps") else []
    rest += [f"seed {result['seed']}"] if result.get("seed") is not None else []
    return " ".join(words) + (f" ({', '.join(rest)})" if rest else "") + "."


def ledger_sentence(parity: Mapping[str, Any]) -> str:
    """Whether both sides communicated alike."""
    rows = parity["ledger_rows"]
    missing = parity.get("ledger_missing")
    if missing:
        sides = {"sim": "simulation", "runtime": "real run"}
        return f"The ledgers were not compared: the {sides[missing[0]]} left no ledger.csv."
    if parity.get("ledger_not_comparable"):
        return f"The ledgers are not comparable: {parity['ledger_not_comparable']}."
    if parity["ledger_equal"] is None:
        return "The ledgers were not compared: a side did not run to its end."
    if parity["ledger_equal"]:
        if rows["runtime"] == 0:
            return "Both ledgers are empty: nothing was communicated."
        return (
            f"The ledgers are equal: {rows['runtime']:,} collectives over all ranks, entry by entry, "
            f"in every column{_of_told(parity)}."
        )
    found = parity["first_difference"]["message"]
    return f"The {found} ({rows['sim']:,} entries predicted, {rows['runtime']:,} executed)."


def _of_told(parity: Mapping[str, Any]) -> str:
    """Of which simulation the ledger is, where it is not the prediction's own."""
    of = str(parity.get("ledger_of", "prediction"))
    return "" if of == "prediction" else f" (the simulation's is of {of})"


def replay_sentence(parity: Mapping[str, Any]) -> str:
    """Whether the policy answered alike."""
    runs = "runs, the simulation told what the real one measured," if _of_told(parity) else "live runs"
    live = {True: "Both runs took the same decisions.", False: f"The {runs} took different decisions."}
    if not any(parity["num_decisions"].values()):
        return "No decisions were logged."
    replay = {
        True: "Replaying the events through the policy gives the same actions.",
        False: "Replaying the events through the policy gives OTHER actions.",
        None: "The events were not replayed through the policy.",
    }
    decisions = live.get(parity["decisions_equal"], "")
    return f"{decisions} {replay[parity['replay_equal']]}".strip()


def warnings(run: Run, parity: Mapping[str, Any] | None) -> list[str]:
    """All that a reader must know before trusting the figures, each once."""
    found = [
        f"{side}: {item}" for side, record in sides(run) for item in (record.result.get("warnings") or [])
    ]
    if run.void:
        found.insert(0, f"The times are void: {run.void}.")
    if parity is not None and parity["experiment_differences"]:
        found.insert(
            0,
            "The two sides were configured differently (predicted / measured): "
            + "; ".join(parity["experiment_differences"]),
        )
    return list(dict.fromkeys(found))


def listed(run: Run, key: str) -> list[str]:
    """What of `guessed_inputs` or `fitted_constants` is plain text, each once; `tables.input_table` has the rest."""
    items = [item for _, record in sides(run) for item in (record.result.get(key) or [])]
    return list(dict.fromkeys(str(item) for item in items if not isinstance(item, Mapping)))


def sweep_summary(sweep: Sweep) -> list[str]:
    """How many runs, how many failed, the fastest."""
    table = sweep_table(sweep)
    counts = table["status"].value_counts()
    kinds = ("ok", "oom", "failed", "no record", "broken")
    states = ", ".join(f"{counts[kind]} {kind}" for kind in kinds if kind in counts)
    sentences = [f"A multirun of {_many(len(table), 'run')}: {states}."]
    timed = records(table[(table["status"] == "ok") & table["iteration_s"].notna()])
    if timed:
        tokens = [_batch_tokens(row) for row in timed]
        same = max(tokens) <= 1.01 * min(tokens)  # up to rounding
        if same:
            best = min(timed, key=lambda row: float(row["iteration_s"]))
            end = "."
        else:
            best = max(timed, key=lambda row: float(row["tokens_per_s"] or 0.0))
            end = f", {float(best['tokens_per_s']):,.0f} tokens a second; batches differ between runs."
        run = next(run for run in sweep.runs if run.number == best["run"])
        how = ", ".join(f"{key}={item}" for key, item in run.overrides.items())
        sentences.append(
            f"The fastest is run {run.number}{f' ({how})' if how else ''}: "
            f"{amount_text('s', float(best['iteration_s']))} an iteration{end}"
        )
    elif (table["status"] == "oom").any() and table["iteration_s"].notna().any():
        sentences.append("No run fits in memory; the times are what an iteration would take if it did.")
    else:
        sentences.append("No run gave an iteration time.")
    void = [str(row["run"]) for row in records(table) if row["void"]]
    if void:
        sentences.append(f"The times are void in run {', '.join(void)}: see below.")
    first = next((run.main for run in sweep.runs if run.main is not None), None)
    if first is not None:
        sentences.append(f"The first: {describe(first)}")
    differ = [str(row["run"]) for row in records(table) if row["ledger_equal"] is False]
    if differ:
        sentences.append(f"The ledgers differ in run {', '.join(differ)}.")
    return sentences


def _batch_tokens(row: Mapping[str, Any]) -> float:
    """Of one iteration."""
    return float(row["tokens_per_s"] or 0.0) * float(row["iteration_s"])


def sweep_failures(sweep: Sweep) -> list[str]:
    """Each run that gave no good result, with what was swept and its error."""
    found = []
    for row, run in zip(records(sweep_table(sweep)), sweep.runs, strict=True):
        if row["status"] != "ok":
            how = ", ".join(f"{key}={run.overrides.get(key, '')}" for key in swept_keys(sweep))
            reason = row["error"] or "no reason was recorded"
            advice = advice_sentence(run.main or {})
            found.append(
                f"run {run.number}{f' ({how})' if how else ''}, {row['status']}: {reason}"
                + (f". {advice}" if advice else "")
            )
    return found


def sweep_voids(sweep: Sweep) -> list[str]:
    """Each run whose times mean nothing, and why."""
    return [f"run {row['run']}: {row['void']}" for row in records(sweep_table(sweep)) if row["void"]]


def _times(run: Run, parity: Mapping[str, Any] | None) -> str:
    predicted, measured = (
        None if record is None else value(record, "iteration_s", "mean") for record in (run.sim, run.real)
    )
    if predicted is None and measured is None:
        return f"There is no iteration time: {_why_untimed(run.main)}."
    if measured is None:
        said = f"Predicted: {amount_text('s', predicted)} an iteration."
        return said if run.real is None else f"{said} Not measured: {_why_untimed(run.real)}."
    assert run.real is not None
    times = run.real.result["iteration_s"]
    spread = f"mean of {times.get('n')}"
    if times.get("min") is not None and times.get("max") is not None:
        spread += f", {amount_text('s', times['min'])} to {amount_text('s', times['max'])}"
    if predicted is None:
        said = f"Measured: {amount_text('s', measured)} an iteration ({spread})."
        return said if run.sim is None else f"{said} Not predicted: {_why_untimed(run.sim)}."
    off = predicted / measured - 1 if measured else 0.0
    verdict = f"within {CLOSE:.0%}" if abs(off) <= CLOSE else f"NOT within {CLOSE:.0%}"
    direction = "more" if off >= 0 else "less"
    sentence = (
        f"Predicted {amount_text('s', predicted)} an iteration, measured {amount_text('s', measured)} "
        f"({spread}): the prediction is {abs(off):.1%} {direction} than measured, {verdict}."
    )
    naive = naive_s(run)
    if naive:
        sentence += f" Bytes over bandwidth alone would say {amount_text('s', naive)}."
    if parity is not None and parity["void"]:
        sentence += " But the times are void: see the warnings."
    return sentence


def _fate(side: str, record: Record) -> str:
    who = "simulation" if side == "predicted" else "real run"
    error = str(record.result.get("error") or "no reason was recorded").rstrip(".")
    if record.result.get("status") == "oom":
        said = f"The {who} says that this does not fit in memory: {error}."
        return f"{said} {advice_sentence(record.result)}".rstrip()
    return f"The {who} failed: {error}."


def _why_untimed(record: Record) -> str:
    if record.result.get("status") == "failed":
        return "the run failed"
    if not (record.result.get("iteration_s") or {}).get("n"):
        return "no iteration was left after the warm-up (n = 0)"
    return "the record gives none"


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"
