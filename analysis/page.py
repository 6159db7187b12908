"""The reports of a run and of a multirun: which sections, figures and tables they have."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import yaml

from . import plots, show, tables, wording
from .blocks import PAGE, Block, Report, Section, html, terminal
from .load import Run, Sweep
from .naming import policy_name
from .parity import PHASES, compare_records
from .timelines import held, iteration_timeline, merged_trace

TRACE = "report_timeline.json"

_RESIDENT = "resident size of the process, with Python and torch in it"
_PERFETTO = (
    f"{TRACE}, beside this page, holds {{held}}. To look into it, open ui.perfetto.dev in a browser, "
    "choose “Open trace file” and pick it. Processes are called “sim rank 0”, “real rank 0” and so on; each "
    "has a track for each stream. The file stays on your machine."
)


def run_report(run: Run) -> Report:
    """The report of one run, or of a prediction beside its run."""
    report = Report()
    if run.sim is not None and run.real is not None:
        report.parity = run.parity or compare_records(
            run.sim, run.real, replay_equal=run.replay_equal, void=run.void
        )
    sentences = wording.summary(run, report.parity)
    warnings = wording.warnings(run, report.parity)
    policy = policy_name(run.main.result)
    sections = [
        _parity_section(report, run),
        _iteration_section(report, run, policy),
        _phase_section(report, run, policy),
        _bytes_section(report, run, policy),
        _memory_section(report, run),
        _loss_section(report, [(wording.title(run), run.main.result)]),
        _timeline_section(report, run),
        _inputs_section(report, run),
        _warnings_section(warnings),
        _configuration_section(run.main.result),
    ]
    heading = wording.title(run)
    report.files[PAGE] = html(heading, sentences, _chips(run, report.parity), sections)
    report.terminal = terminal(heading, sentences, warnings, sections[0])
    return report


def sweep_report(sweep: Sweep) -> Report:
    """The report of a multirun: one table, a row a run, and iteration time by what was swept."""
    report = Report()
    table = tables.sweep_table(sweep)
    keys = tables.swept_keys(sweep)
    sentences = wording.sweep_summary(sweep)
    csv = report.add_table("runs", table)
    runs = Section("runs", "Runs", "Runs")
    shown = show.sweep_shown(table, keys)
    runs.blocks.append(
        Block(
            text="Iteration time is measured where there was a real run (in brackets its smallest and "
            "largest iteration), else predicted (in brackets the range over the guessed inputs). The "
            "speed-up is against the first run that succeeded. Bytes are the mean of a rank in an iteration."
            + (f" Peak memory is measured as the {_RESIDENT}." if _resident(sweep) else "")
        )
    )
    runs.blocks.append(Block(table=shown, csv=csv))
    void = wording.sweep_voids(sweep)
    if void:
        runs.blocks.append(Block(text="Runs whose times are void:", items=void))
    failures = wording.sweep_failures(sweep)
    if failures:
        runs.blocks.append(Block(text="Runs that did not succeed:", items=failures))
    results = [
        (_label(run.overrides, keys) or f"run {run.number}", run.main)
        for run in sweep.runs
        if run.main is not None
    ]
    with_loss = [(label, result) for label, result in results if result.get("loss")]
    sections = [runs, _sweep_plot_section(report, sweep, table, keys)]
    if with_loss:
        sections.append(_loss_section(report, with_loss))
    warnings = list(
        dict.fromkeys(
            f"{label}: {item}" for label, result in results for item in (result.get("warnings") or [])
        )
    )
    sections.append(_warnings_section(warnings))
    sections.append(_configuration_section(results[0][1], note="Of the first run that left a record."))
    heading = f"Multirun over {', '.join(keys)}" if keys else "Multirun"
    chips = [(f"times void in {len(void)} of {len(sweep.runs)} runs", "bad")] if void else []
    report.files[PAGE] = html(heading, sentences, chips, sections)
    report.terminal = terminal(heading, sentences, [], runs)
    return report


def _resident(sweep: Sweep) -> bool:
    """Whether a peak in the table is a process' resident size."""
    clusters = [
        ((run.real or {}).get("experiment") or {}).get("cluster") or {} for run in sweep.runs if run.real
    ]
    return any(cluster.get("backend", "gloo") != "nccl" for cluster in clusters)


def _parity_section(report: Report, run: Run) -> Section:
    both = report.parity is not None
    section = Section("parity", "Prediction and measurement" if both else "Main figures", "Figures")
    table = tables.parity_table(run)
    csv = report.add_table("parity", table)
    if both:
        section.blocks.append(
            Block(
                text="The ratio is predicted over measured: 1 is exact, above 1 the prediction is too high. "
                "Bytes and collectives per rank are means, of one iteration. The last column is what one "
                "would say without a simulator: the bytes that the busiest node sends in an iteration over "
                "the nominal bandwidth of its links, and nothing else."
            )
        )
    if len(table):
        section.blocks.append(Block(table=show.parity_shown(table), csv=csv))
    else:
        section.blocks.append(Block(text="The record holds no figures."))
    other = tables.other_table(run)
    if len(other):
        section.blocks.append(Block(table=show.other_shown(other), csv=report.add_table("other", other)))
    if report.parity is not None:
        section.blocks.append(Block(text=wording.ledger_sentence(report.parity)))
        difference = report.parity["first_difference"]
        if difference is not None:
            caption = "The first entry that differs; differing cells are marked."
            section.blocks.append(Block(table=show.difference_shown(difference), caption=caption))
        section.blocks.append(Block(text=wording.replay_sentence(report.parity)))
        decision = report.parity["first_decision_difference"]
        if decision is not None:
            pair = {side: decision[side] for side in ("sim", "runtime")}
            caption = f"First decision that differs: rank {decision['rank']}, number {decision['index']}."
            section.blocks.append(Block(code=json.dumps(pair, indent=1), caption=caption))
    return section


def _iteration_section(report: Report, run: Run, policy: str) -> Section:
    section = Section("iteration", "Iteration time", "Iteration")
    table = tables.iteration_table(run)
    csv = report.add_table("iteration_time", table)
    if table["mean"].notna().any():
        figure = plots.iteration_figure(table, policy=policy, naive_s=tables.naive_s(run))
        caption = (
            "Bars are means. Error bars: smallest to largest iteration of the real run; range over the "
            "guessed inputs for the prediction."
        )
        uri = report.add_figure("iteration_time", figure)
        section.blocks.append(Block(figure_uri=uri, caption=caption, csv=csv))
    else:
        section.blocks.append(
            Block(text="No iteration was timed: the run failed, or had no step left after the warm-up.")
        )
    section.blocks.append(
        Block(
            table=show.iteration_shown(table),
            caption="n counts iterations after the warm-up; low and high: the range over the guessed inputs.",
        )
    )
    return section


def _phase_section(report: Report, run: Run, policy: str) -> Section:
    section = Section("phases", "Where the time goes", "Phases")
    table = tables.phase_table(run)
    if not len(table):
        section.blocks.append(Block(text="The record does not say how an iteration's time was spent."))
        return section
    csv = report.add_table("phases", table)
    caption = "Of the mean rank. Exposed communication is what computing does not hide; the total counts all."
    uri = report.add_figure("phases", plots.phase_figure(table, policy=policy))
    section.blocks.append(Block(figure_uri=uri, caption=caption, csv=csv))
    ranks = tables.rank_table(run)
    if len(ranks):
        units = {"rank": "count", "ranks": "count"} | dict.fromkeys(PHASES, "s")
        section.blocks.append(
            Block(
                table=show.plain_shown(ranks, units, first_number=1),
                csv=report.add_table("ranks", ranks),
                caption="Rank by rank (a row that counts several ranks stands for ranks that behave alike)",
                folded=True,
            )
        )
    return section


def _bytes_section(report: Report, run: Run, policy: str) -> Section:
    section = Section("bytes", "Bytes", "Bytes")
    volumes = tables.volume_table(run)
    if volumes["bytes"].sum() > 0:
        caption = (
            "Payload is what the collectives move before quantization; on the wire is what the rank sends; "
            "between nodes is the part of it that leaves the node."
        )
        uri = report.add_figure("bytes", plots.volume_figure(volumes, policy=policy))
        csv = report.add_table("bytes", volumes)
        section.blocks.append(Block(figure_uri=uri, caption=caption, csv=csv))
    ranks = tables.rank_bytes_table(run)
    if not len(ranks):
        section.blocks.append(
            Block(text="The ledger is empty: nothing was communicated, or the run failed before.")
        )
        return section
    units = {"rank": "count", "ranks": "count", "collectives": "count"}
    units |= dict.fromkeys(("payload_bytes", "wire_bytes", "inter_node_bytes"), "byte")
    nodes, operations = tables.node_bytes_table(run), tables.operation_table(run)
    if len(nodes):
        section.blocks.append(
            Block(
                table=show.sides_shown(nodes, "node", "byte", "inter_node_bytes"),
                csv=report.add_table("node_bytes", nodes),
                caption="Sent to other nodes by each node in an iteration (validation left out)",
            )
        )
    section.blocks.append(
        Block(
            table=show.plain_shown(ranks, units, first_number=1),
            csv=report.add_table("rank_bytes", ranks),
            caption="By rank, in an iteration (validation left out)",
            folded=True,
        )
    )
    section.blocks.append(
        Block(
            table=show.plain_shown(
                operations, units | {"group_size": "count", "entries": "count"}, first_number=4
            ),
            csv=report.add_table("operations", operations),
            caption="By collective: sums over all ranks and iterations",
            folded=True,
        )
    )
    return section


def _memory_section(report: Report, run: Run) -> Section:
    section = Section("memory", "Memory", "Memory")
    table = tables.memory_table(run)
    if not table["bytes"].sum() > 0:
        section.blocks.append(Block(text="The record does not say how much memory was used."))
        return section
    csv = report.add_table("memory", table)
    caption = (
        "Largest size of each class on the fullest rank. The black mark is the peak. Simulated: the sum of all "
        "classes, an upper bound. Measured: "
        + (f"the {_RESIDENT}." if tables.measures_residence(run) else "what the device held at most.")
    )
    uri = report.add_figure("memory", plots.memory_figure(table))
    section.blocks.append(Block(figure_uri=uri, caption=caption, csv=csv))
    section.blocks.append(Block(table=show.sides_shown(table, "class", "byte", "bytes")))
    series = tables.memory_series(run)
    if len(series):
        device = ((run.main.result.get("experiment") or {}).get("cluster") or {}).get("device") or {}
        figure = plots.memory_series_figure(series, capacity_bytes=device.get("memory_bytes"))
        section.blocks.append(
            Block(
                figure_uri=report.add_figure("memory_over_time", figure),
                caption="Predicted: what the fullest rank holds through one iteration, at its most while each unit "
                "computes. Gradients of a unit come with its reduction.",
                csv=report.add_table("memory_over_time", series),
                wide=True,
            )
        )
    return section


def _loss_section(report: Report, results: Sequence[tuple[str, Mapping[str, Any]]]) -> Section:
    section = Section("losses", "Losses", "Losses")
    runs = [(label, policy_name(r), r["loss"]) for label, r in results if r.get("loss")]
    table = tables.loss_table(runs)
    if not table["loss"].notna().any():
        section.blocks.append(
            Block(text="There are no losses: a simulation trains nothing, and a failed run may stop early.")
        )
        return section
    csv = report.add_table("losses", table)
    uri = report.add_figure("losses", plots.loss_figure(table))
    known = table[table["loss"].notna()]
    ends = known.groupby("label", sort=False)["loss"].agg(["first", "last", "count"]).reset_index()
    section.blocks.append(
        Block(figure_uri=uri, caption="Training loss at each step, warm-up included.", csv=csv)
    )
    shown = show.plain_shown(
        ends.rename(columns={"label": "run", "count": "steps"}),
        dict.fromkeys(("first", "last", "steps"), "count"),
        first_number=1,
    )
    section.blocks.append(Block(table=shown))
    return section


def _timeline_section(report: Report, run: Run) -> Section:
    section = Section("timeline", "Timelines", "Timelines")
    timeline = iteration_timeline(run)
    if not len(timeline):
        section.blocks.append(Block(text="The record holds no timeline."))
        return section
    report.files[TRACE] = json.dumps(merged_trace(run)).encode()
    csv = report.add_table("timeline", timeline)
    caption = (
        "One iteration: a track for each rank and stream, the prediction above the run, on one time axis."
    )
    uri = report.add_figure("timeline", plots.timeline_figure(timeline))
    section.blocks.append(Block(figure_uri=uri, caption=caption, csv=csv, wide=True))
    section.blocks.append(Block(text=_PERFETTO.format(held=held(run))))
    return section


def _inputs_section(report: Report, run: Run) -> Section:
    section = Section("inputs", "What the prediction rests on", "Inputs")
    for key, title in (("guessed_inputs", "Guessed inputs"), ("fitted_constants", "Fitted constants")):
        table, listed = tables.input_table(run, key), wording.listed(run, key)
        some = len(table) or listed
        section.blocks.append(
            Block(
                text=f"{title}:" if some else f"{title}: none.",
                items=listed,
                table=show.input_shown(table) if len(table) else None,
                csv=report.add_table(key, table) if len(table) else "",
            )
        )
    return section


def _warnings_section(warnings: Sequence[str]) -> Section:
    return Section(
        "warnings", "Warnings", "Warnings", [Block(text="" if warnings else "None.", items=warnings)]
    )


def _configuration_section(result: Mapping[str, Any], note: str = "") -> Section:
    section = Section("configuration", "Configuration", "Configuration")
    commit = result.get("git_commit") or "unknown"
    kernels = result.get("kernels") or {}
    ready = f" {kernels['reason']}: {kernels['prepare_s']:.2f} s at the start." if kernels else ""
    section.blocks.append(Block(text=f"{note} Seed {result.get('seed')}, commit {commit}.{ready}".strip()))
    experiment = result.get("experiment") or {}
    if experiment:
        code = yaml.safe_dump(json.loads(json.dumps(experiment, default=str)), sort_keys=False)
        section.blocks.append(Block(code=code, caption="The resolved configuration", folded=True))
    return section


def _sweep_plot_section(report: Report, sweep: Sweep, table: pd.DataFrame, keys: Sequence[str]) -> Section:
    section = Section("times", "Iteration time by what was swept", "Iteration")
    timed = table[table["iteration_s"].notna() & table["status"].isin(["ok", "oom"])].copy()
    if not len(timed):
        section.blocks.append(Block(text="No run gave an iteration time."))
        return section
    out_of_memory = bool((timed["status"] == "oom").any())
    results = {run.number: run.main or {} for run in sweep.runs}
    timed["policy"] = [policy_name(results[number]) for number in timed["run"]]
    x = _numeric_key(timed, keys)
    if x is not None:
        timed[x] = pd.to_numeric(timed[x])
    rest = [key for key in keys if key != x]
    labels = [_label(row, rest) for row in tables.records(timed)]
    if x is None:
        x = ", ".join(keys) or "run"
        timed[x] = labels if keys else timed["run"]
        timed["series"] = ""
    else:
        timed["series"] = labels
    for column in ("iteration_s", "low_s", "high_s"):
        timed[column] = timed[column].astype(float)
    csv = report.add_table(
        "times", timed[[x, "series", "policy", "status", "iteration_s", "low_s", "high_s"]]
    )
    uri = report.add_figure("times", plots.sweep_figure(timed, x=x))
    caption = "Error bars: as the brackets in the table."
    caption += (
        " Crossed out: does not fit in memory; the time is what it would take." if out_of_memory else ""
    )
    section.blocks.append(Block(figure_uri=uri, caption=caption, csv=csv))
    return section


def _numeric_key(table: pd.DataFrame, keys: Sequence[str]) -> str | None:
    """The swept key for the horizontal axis: the numeric one with most values. Seeds are no axis."""
    numeric = [
        key
        for key in keys
        if key != "seed"
        and table[key].nunique() > 1
        and pd.to_numeric(table[key], errors="coerce").notna().all()
    ]
    return max(numeric, key=lambda key: table[key].nunique(), default=None)


def _label(overrides: Mapping[str, Any], keys: Sequence[str]) -> str:
    """`zero3, links=4`: what tells this run from the others, by the last word of each key."""
    words = (
        str(overrides.get(key, "")) if key == "comm" else f"{key.rpartition('.')[2]}={overrides.get(key, '')}"
        for key in keys
    )
    return ", ".join(words)


def _chips(run: Run, parity: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """(text, tone) of the marks on top: `good`, `bad` or `plain`."""
    chips = [
        (f"{side}: {record.result.get('status')}", "good" if record.result.get("status") == "ok" else "bad")
        for side, record in tables.sides(run)
    ]
    if parity is None:
        return chips
    off = parity["iteration_s_ratio"]
    if off is not None:
        close = abs(off - 1) <= wording.CLOSE
        chips.append((f"predicted / measured: {off:.3f}", "good" if close and not parity["void"] else "bad"))
    equal = parity["ledger_equal"]
    words = {True: "ledgers equal", False: "ledgers differ", None: "ledgers not compared"}
    chips.append((words[equal], "plain" if equal is None else "good" if equal else "bad"))
    if parity["void"]:
        chips.append(("times void", "bad"))
    return chips
