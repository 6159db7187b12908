"""The one entry point: `python run.py [overrides]`, installed as `twinbed`. Plain Hydra."""

import contextlib
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

# Run as a script, Python puts this folder first on the path, where `kernels/` would shadow the installed
# package of that name. The project itself is imported as `twinbed`.
if __name__ == "__main__":
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).parent]

import hydra
from omegaconf import DictConfig, OmegaConf

from twinbed.analysis.console import summary
from twinbed.analysis.parity import compare_records, write_parity
from twinbed.analysis.record import (
    RESULT,
    Decision,
    Record,
    new_result,
    read_record,
    write_record,
    write_text,
)
from twinbed.conf.compose import (
    CONFIG_NAME,
    CONFIG_PATH,
    Composed,
    from_hydra,
    load_experiment,
    register_schema,
    to_dict,
)
from twinbed.conf.hints import hint
from twinbed.conf.schema import ExperimentConf, Launch, Target
from twinbed.policies.balance import (
    BalancePolicy,
    balanced_work,
    build_balance,
    describe_balance_actions,
    is_balance_event,
    parse_balance_event,
)
from twinbed.policies.balance.build import build_shares
from twinbed.policies.comm import CommPolicy, build_comm, describe_action, parse_event
from twinbed.policies.layout import (
    ParallelLayout,
    is_layer_event,
    layout_of,
    parse_layer_event,
    replicas_of,
)
from twinbed.policies.offload import (
    OffloadPolicy,
    describe_offload_actions,
    is_offload_event,
    parse_offload_event,
)

if TYPE_CHECKING:
    from twinbed.runtime.launcher import LaunchOutcome

PROBES, CALIBRATION, TRAINING = ("probe_before", "probe_after"), "calibration", "runtime"
TIMING = "timing.json"


class ExperimentError(Exception):
    """The experiment cannot be run, or has failed; the message is for the user."""


class InterruptedRunError(Exception):
    """Somebody ended the run. `code`: what the process is to exit with."""

    def __init__(self, code: int) -> None:
        super().__init__("interrupted")
        self.code = code


@hydra.main(config_path=CONFIG_PATH, config_name=CONFIG_NAME, version_base="1.3")  # type: ignore[untyped-decorator]
def _hydra_main(config: DictConfig) -> None:
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    job = HydraConfig.get()
    for number in (signal.SIGTERM, signal.SIGHUP):  # a terminal that is closed, too
        signal.signal(number, _unwind)
    try:
        run_experiment(config, Path(job.runtime.output_dir))
    except ExperimentError as err:
        if job.mode is RunMode.MULTIRUN:
            raise  # Hydra goes on with the other points only after an exception
        sys.stderr.write(f"twinbed: {err}\n")
        sys.exit(1)
    except InterruptedRunError as err:  # ends a multirun too
        sys.stderr.write("twinbed: interrupted; the record says so\n")
        sys.stderr.flush()
        os._exit(err.code)  # not by SystemExit, which Hydra would take for one point's end


def _unwind(number: int, frame: FrameType | None) -> None:
    """Ends a run as Ctrl-C does: with its record."""
    raise SystemExit(128 + number)


def main() -> None:
    """The command `twinbed`."""
    register_schema()
    try:
        _hydra_main()
    except SystemExit as err:
        told = hint(err.__context__)  # Hydra has said what is wrong, and ends while it handles that error
        if told:
            sys.stderr.write(f"twinbed: {told}\n")
        raise


def run_experiment(config: DictConfig, folder: Path) -> None:
    """Run one composed config and write its record, or its records, into `folder`.

    Raises:
        ExperimentError: If anything is wrong; `result.json` says `failed` and why, where it can be written.
    """
    for where in (folder, folder / "sim", folder / TRAINING):  # of an earlier run into this folder
        with contextlib.suppress(OSError):
            (where / RESULT).unlink(missing_ok=True)
    try:
        composed = from_hydra(config)
        seen = replicas_of(composed.experiment)
        policy, warnings = build_comm(
            composed.experiment.comm, num_ranks=seen.num_ranks, ranks_per_node=seen.ranks_per_node
        )
    except ValueError as err:
        plain = OmegaConf.to_container(config, resolve=False, enum_to_str=True)
        assert isinstance(plain, dict)
        _write_failed(folder, {str(k): v for k, v in plain.items()}, str(err))
        raise ExperimentError(str(err)) from err
    composed = _named(composed, policy)
    if seen.num_ranks == 1 < composed.experiment.cluster.num_ranks:
        warnings = (f"comm={policy.name} moves nothing: parallel.* leaves one replica of the model",)
    warnings = (*composed.warnings, *warnings, *_unshaped_by(composed.experiment))
    for warning in warnings:
        sys.stderr.write(f"twinbed: warning: {warning}\n")
    try:
        _carry_out(composed, policy, warnings, folder)
    except ExperimentError as err:
        _write_failed(folder, composed.resolved, str(err))
        raise
    except (KeyboardInterrupt, SystemExit) as err:  # Ctrl-C; the launcher turns SIGTERM into SystemExit
        _write_failed(folder, composed.resolved, "interrupted")
        code = err.code if isinstance(err, SystemExit) else 128 + signal.SIGINT
        raise InterruptedRunError(code if isinstance(code, int) else 1) from err
    except OSError as err:
        _write_failed(folder, composed.resolved, str(err))
        raise ExperimentError(_os_error(err)) from err
    except Exception as err:
        _write_failed(folder, composed.resolved, f"{type(err).__name__}: {err}")
        sys.stderr.write(traceback.format_exc())
        raise ExperimentError(f"{type(err).__name__}: {err}") from err


def _named(composed: Composed, policy: CommPolicy) -> Composed:
    """A policy of the user's own goes by its own name, not by that of the config that it was given over."""
    if composed.experiment.comm.policy is None or composed.experiment.comm.name == policy.name:
        return composed
    experiment = composed.experiment
    named = replace(experiment, comm=replace(experiment.comm, name=policy.name))
    return replace(composed, experiment=named, resolved=to_dict(named))


def _unshaped_by(experiment: ExperimentConf) -> tuple[str, ...]:
    if not experiment.cluster.shaped or experiment.target is Target.sim or experiment.launch is Launch.local:
        return ()
    return (
        f"cluster.shaped=true with launch={experiment.launch.value}: torchrun shapes no links; ranks will talk as "
        "fast as their nodes can, whatever cluster.inter_node says",
    )


def _os_error(err: OSError) -> str:
    """What went wrong, with the file where the system names it."""
    reason = err.strerror or str(err)
    return f"{err.filename}: {reason}" if err.filename else reason


def _carry_out(composed: Composed, policy: CommPolicy, warnings: tuple[str, ...], folder: Path) -> None:
    target, launch = composed.experiment.target, composed.experiment.launch
    if target is not Target.sim:
        from twinbed.sim.simulate import check_plans

        try:  # of a policy of one's own: before any process starts
            check_plans(composed.experiment, spec=composed.spec, policy=policy)
        except ValueError as err:
            raise ExperimentError(str(err)) from err
    if target is not Target.sim and launch is not Launch.local:
        from twinbed.runtime.case import write_launch
        from twinbed.runtime.preflight import check_run
        from twinbed.runtime.script import write_script

        try:
            check_run(composed.experiment)
        except ValueError as err:
            raise ExperimentError(str(err)) from err
        if target is Target.both:
            predicted = write_simulation(composed, policy, warnings, folder / "sim")
            sys.stdout.write(f"{summary(predicted)}\n")
        write_launch(folder, (_training_case(composed, warnings, TRAINING),), git_commit=git_commit())
        script = write_script(folder, composed.experiment)
        sys.stdout.write(f"start the run with: {script}\n")
        if target is Target.both:
            sys.stdout.write(f"then compare: twinbed-report --compare {folder / 'sim'} {folder / TRAINING}\n")
    elif target is Target.sim:
        record = write_simulation(composed, policy, warnings, folder)
        sys.stdout.write(f"{summary(record)}\nrecord: {folder}\n")
        if record.result["status"] == "failed":  # a rank or a link was to fail
            raise ExperimentError(record.result["error"])
    elif target is Target.runtime:
        outcome = _launch(composed, folder, (_training_case(composed, warnings, "."),))
        _raise_without_record(outcome, folder)
        _note_unshaped(folder, outcome)
        sys.stdout.write(f"{summary(read_record(folder))}\nrecord: {folder}\n")
        _raise_if_failed(outcome)
    else:
        _run_both(composed, policy, warnings, folder)


def write_simulation(
    composed: Composed, policy: CommPolicy, warnings: tuple[str, ...], folder: Path
) -> Record:
    """Simulate and write the record; the simulator's own wall-clock time goes to timing.json."""
    started = time.perf_counter()
    record = _simulation(composed, policy)
    elapsed_s = time.perf_counter() - started
    record.result["warnings"] = [*warnings, *record.result["warnings"]]
    write_record(folder, record)
    write_text(folder / TIMING, json.dumps({"simulate_s": elapsed_s}) + "\n")
    return record


def _simulation(
    composed: Composed, policy: CommPolicy, *, balance_events: Sequence[Decision] | None = None
) -> Record:
    """`balance_events`: of a run; None: balancing policies are told what the simulation itself measures."""
    from twinbed.sim.simulate import simulate

    try:
        return simulate(
            composed.experiment,
            spec=composed.spec,
            policy=policy,
            resolved=composed.resolved,
            git_commit=git_commit(),
            balance_events=balance_events,
        )
    except (ValueError, RuntimeError) as err:  # plans that cannot be carried out, or ranks that wait for ever
        raise ExperimentError(str(err)) from err


def _run_both(composed: Composed, policy: CommPolicy, warnings: tuple[str, ...], folder: Path) -> None:
    """Measure this cluster's constants, train, predict from the constants, and compare.

    One launch does all three, because constants wander between launches. The prediction uses the probe and
    an iteration of the same model without communication; nothing is fitted on the run that it predicts.

    Where ranks are balanced the prediction decides by its own times, and may decide otherwise than the run. So ledgers
    are compared with those of a second simulation, whose policies are told what the run measured.
    """
    from twinbed.runtime.case import CALIBRATE, Case
    from twinbed.runtime.machine import BusyWatch
    from twinbed.runtime.measured import cluster_with, merged
    from twinbed.sim.constants import with_fixed_costs

    before, after = (
        Case(
            name=name,
            folder=name,
            experiment=composed.resolved,
            kind="twinbed.runtime.probe:probe_case",
        )
        for name in PROBES
    )
    calibration = Case(name=CALIBRATION, folder=CALIBRATION, experiment=composed.resolved, kind=CALIBRATE)
    cases = (before, calibration, _training_case(composed, warnings, TRAINING), after)
    watch = BusyWatch()
    outcome = _launch(composed, folder, cases)
    void = watch.reason()
    _raise_without_record(outcome, folder / TRAINING)
    _note_unshaped(folder / TRAINING, outcome)
    real = read_record(folder / TRAINING)
    told: Record | None = None
    if outcome.status != "ok":
        alone = composed.resolved | {"target": Target.sim.value}
        _write_failed(folder / "sim", alone, "not predicted: the launch that measures constants failed")
        _raise_without_record(outcome, folder / "sim")
    else:
        probes = [json.loads((folder / name / "probe.json").read_text(encoding="utf-8")) for name in PROBES]
        found = json.loads((folder / CALIBRATION / "calibration.json").read_text(encoding="utf-8"))
        cluster = cluster_with(
            composed.resolved["cluster"],
            merged(probes),
            found,
            one_machine=True,
            links_known=outcome.backend != "none",
        )
        experiment = load_experiment(composed.resolved | {"cluster": cluster})
        experiment = with_fixed_costs(experiment, composed.spec, policy)  # so that the record shows them
        predicted = replace(composed, experiment=experiment, resolved=to_dict(experiment))
        write_simulation(predicted, policy, warnings, folder / "sim")
        if experiment.balance.active and real.result["status"] == "ok":
            told = _simulation(predicted, policy, balance_events=real.decisions)
    sim = read_record(folder / "sim")
    layout = layout_of(composed.experiment, composed.spec)
    make_balance = balance_maker(composed)
    again = all(
        replays(policy, record, make_offload_policy(composed, policy), layout, make_balance)
        for record in (sim, real)
    )
    parity = compare_records(sim, real, told=told, replay_equal=again, void=void)
    write_parity(folder, parity)
    sys.stdout.write(f"{summary(sim)}\n{summary(real)}\n{_verdict(parity)}\nrecord: {folder}\n")
    _raise_if_failed(outcome)
    if parity["status"] != "ok":
        raise ExperimentError("; ".join(parity["reasons"]))


def make_offload_policy(composed: Composed, policy: CommPolicy) -> OffloadPolicy | None:
    """A new policy of what lies outside near memory; None where nothing does."""
    from twinbed.sim.simulate import new_offload_policy

    if not composed.experiment.offload.active:
        return None
    return new_offload_policy(composed.experiment, spec=composed.spec, policy=policy)


def balance_maker(composed: Composed) -> Callable[[], BalancePolicy] | None:
    """Makes new balancing policies; None where nothing is balanced."""
    experiment, spec = composed.experiment, composed.spec
    if not experiment.balance.active:
        return None
    work = balanced_work(experiment, spec, layout_of(experiment, spec))

    def make() -> BalancePolicy:
        found = (
            build_balance(experiment.balance, work) if work is not None else build_shares(experiment, spec)
        )
        assert found is not None, "something is balanced"
        return found

    return make


def replays(
    policy: CommPolicy,
    record: Record,
    offload: OffloadPolicy | None = None,
    layout: ParallelLayout | None = None,
    make_balance: Callable[[], BalancePolicy] | None = None,
) -> bool:
    """Whether the record's events, put to the policies again, give the actions that were taken.

    Args:
        offload: A new one, for it has a memory; None: nothing was offloaded.
        layout: None: every rank has the whole model, or its shard of all.
        make_balance: Makes a balancing policy, one for each rank that has decisions; None: ranks are not balanced.
    """
    balances: dict[int, BalancePolicy] = {}

    def answer(rank: int, event: str) -> str:
        if make_balance is not None and is_balance_event(event):
            if rank not in balances:
                balances[rank] = make_balance()
            return describe_balance_actions(balances[rank].decide(parse_balance_event(event)))
        if offload is not None and is_offload_event(event):
            return describe_offload_actions(offload.decide(parse_offload_event(event)))
        if layout is not None and is_layer_event(event):
            return describe_action(layout.decide(parse_layer_event(event)))
        return describe_action(policy.decide(parse_event(event)))

    return all(answer(decision.rank, decision.event) == decision.action for decision in record.decisions)


def _verdict(parity: dict[str, Any]) -> str:
    words = {True: "equal", False: "DIFFERENT", None: "not compared"}
    ratio = parity["iteration_s_ratio"]
    told = f"ledgers: {words[parity['ledger_equal']]}; replayed decisions: {words[parity['replay_equal']]}"
    if ratio is not None:
        told += f"; predicted / measured iteration time (means): {ratio:.3f}"
    if parity.get("void"):
        told += f" (void: {parity['void_reason']})"
    return told


def _training_case(composed: Composed, warnings: tuple[str, ...], folder: str) -> Any:
    from twinbed.runtime.case import Case

    return Case(
        name=TRAINING,
        folder=folder,
        experiment=composed.resolved,
        tensorboard=_wants_tensorboard(composed),
        warnings=warnings,
    )


def _wants_tensorboard(composed: Composed) -> bool:
    """train.tensorboard=null: where the package is installed."""
    asked = composed.experiment.train.tensorboard
    return importlib.util.find_spec("tensorboard") is not None if asked is None else asked


def _launch(composed: Composed, folder: Path, cases: tuple[Any, ...]) -> "LaunchOutcome":
    from twinbed.runtime.launcher import launch_local
    from twinbed.runtime.preflight import check_devices, check_offload_path, check_run

    try:
        check_run(composed.experiment)
        check_offload_path(composed.experiment)
        check_devices(composed.experiment.cluster)
    except ValueError as err:
        raise ExperimentError(str(err)) from err
    if len(cases) > 1:
        sys.stdout.write(
            "measuring this machine, then training; a prediction from what was measured follows\n"
        )
        sys.stdout.flush()
    return launch_local(folder, cluster=composed.experiment.cluster, cases=cases, git_commit=git_commit())


def _note_unshaped(folder: Path, outcome: "LaunchOutcome") -> None:
    """Links that are not as the experiment says are kept in the record."""
    notes = [f"links are not shaped: {outcome.unshaped_reason}"] if outcome.unshaped_reason else []
    notes += outcome.notes
    if notes and (folder / RESULT).exists():
        result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        result["warnings"] = [*result["warnings"], *notes]
        write_text(folder / RESULT, json.dumps(result, indent=1, allow_nan=False) + "\n")


def _raise_without_record(outcome: "LaunchOutcome", folder: Path) -> None:
    """A disk that is full takes the record too; the launch's own reason has to do then."""
    if outcome.status != "ok" and not (folder / RESULT).exists():
        raise ExperimentError(outcome.error or "the launch failed")


def _raise_if_failed(outcome: "LaunchOutcome") -> None:
    if outcome.status != "ok":
        raise ExperimentError(outcome.error or "the launch failed")


def _write_failed(folder: Path, experiment: dict[str, Any], error: str) -> None:
    """Leave a `failed` record, of each target; where none can be written, the message on stderr has to do."""
    target = str(experiment.get("target"))
    folders = {target: folder}
    if target == Target.both.value:
        folders = {"sim": folder / "sim", "runtime": folder / TRAINING}
    for side, where in folders.items():
        if (where / RESULT).exists():  # the launch's own
            continue
        seed = experiment.get("seed")
        shown = _writable(experiment)
        result = new_result(side, shown, seed=seed if isinstance(seed, int) else 0, git_commit=git_commit())
        result["error"] = error
        try:
            write_record(where, Record(result))
        except OSError as err:
            sys.stderr.write(f"twinbed: {_os_error(err)}\n")


def _writable(value: Any) -> Any:
    """`value` with numbers that JSON does not know as text: they are what was refused."""
    if isinstance(value, dict):
        return {key: _writable(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_writable(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def git_commit() -> str:
    """The project's commit, or empty where it is not a checkout."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


if __name__ == "__main__":
    main()
