"""The command `twinbed-import`: what users have about clusters and models, into YAML of ours."""

import argparse
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from . import nccl_tests, nccl_topology, smi_topology
from .calibration import calibrate
from .cluster_file import cluster_text, put_onto, read_base, shipped
from .findings import Base, Finding, Imported
from .model_file import model_text
from .source import Source, read_source

_OUT = Path("imported")
_DEFAULT_BASE = "dgx_a100"
_MODEL = "Hugging Face config"
# Where nobody names the GPUs: V100 to H100 (NVIDIA data sheets)
_ANY_GPU = {"device.flop_per_s": (125e12, 989.4e12), "device.memory_Bps": (900e9, 3350e9)}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_FORMATS = "NCCL topology XML, `nvidia-smi topo -m`, a table of nccl-tests, or a Hugging Face config.json"


def main(argv: Sequence[str] | None = None) -> int:
    """The command `twinbed-import`: read files of a cluster or a model, and write a YAML that Hydra finds."""
    arguments = _parser().parse_args(argv)
    try:
        written = _import(arguments)
    except ValueError as err:
        sys.stderr.write(f"twinbed-import: {err}\n")
        return 1
    sys.stdout.write(written)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="twinbed-import",
        description="Make a cluster=NAME from NCCL topology XML, `nvidia-smi topo -m` text and tables of nccl-tests "
        "(several files go onto one cluster), or a model=NAME from a Hugging Face config.json.",
    )
    parser.add_argument("files", metavar="FILE", nargs="+", help="what kind it is, is seen from its text")
    parser.add_argument("--name", help="of the cluster or model; default: the first file's name")
    parser.add_argument(
        "--base",
        metavar="CLUSTER",
        help="the cluster that the files are put onto: GPUs, costs and all that they do not tell; one of ours or one "
        f"in DIR; default: by the GPUs that a file names, else {_DEFAULT_BASE}, as a guess",
    )
    parser.add_argument("--nodes", type=_at_least_1, help="of the cluster; default: as many as the base has")
    parser.add_argument(
        "--ranks", type=_at_least_1, help="of a table of nccl-tests that does not list its ranks"
    )
    parser.add_argument(
        "--op",
        choices=["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all"],
        help="of a table of nccl-tests that does not name its collective",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        default=_OUT,
        help=f"written to DIR/cluster/NAME.yaml or DIR/model/NAME.yaml; default: {_OUT}",
    )
    parser.add_argument("--force", action="store_true", help="replace a file that is there already")
    return parser


def _at_least_1(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: must be at least 1")
    return value


def _import(arguments: argparse.Namespace) -> str:
    """Read, write, and say what was written.

    Raises:
        ValueError: For the user, naming file and line or option.
    """
    sources = [read_source(path) for path in arguments.files]
    models = [source for source in sources if _kind(source) == _MODEL]
    if not models:
        return _cluster(arguments, sources)
    if len(sources) > 1:
        raise ValueError(f"{models[0].path} is a model; give it alone")
    for option in ("base", "nodes", "ranks", "op"):
        if getattr(arguments, option) is not None:
            raise ValueError(f"--{option} has no effect: {models[0].path} is a model")
    name = _name(arguments, "model", sources)
    text, summary, notes = model_text(models[0].path, name)
    return _written(arguments, "model", name, text, [f"{models[0].path}: {summary}"], notes)


def _cluster(arguments: argparse.Namespace, sources: Sequence[Source]) -> str:
    name = _name(arguments, "cluster", sources)
    _check_options(arguments, sources)
    base, why_base = _base(arguments, sources)
    imported: list[Imported] = []
    # what is measured counts more than what is wired, and between nodes what is known within them
    for source in sorted(sources, key=lambda source: _order(source, arguments)):
        one = _read(source, base, arguments)
        imported.append(one)
        base = put_onto(base, one.findings)
    given = []
    if arguments.nodes is not None:
        given.append(Finding("nodes", arguments.nodes, "--nodes"))
    if base.guessed:
        given += [
            Finding(key, base.get(key), "guess: no file names the GPUs", spread)
            for key, spread in _ANY_GPU.items()
        ]
    base = put_onto(base, given)
    notes = [note for one in imported for note in one.notes] + _unlike(base, imported, arguments.out)
    text = cluster_text(name, base, why_base, imported, given, notes)
    if arguments.base is None:
        notes.insert(0, f"all else is cluster={base.name}'s, {why_base}")
    if arguments.nodes is None:
        notes.append(f"{base.get('nodes')} nodes, as {base.name} has (--nodes)")
    return _written(
        arguments, "cluster", name, text, [f"{one.source}: {one.summary}" for one in imported], notes
    )


def _check_options(arguments: argparse.Namespace, sources: Sequence[Source]) -> None:
    tables = [source for source in sources if _kind(source) == nccl_tests.FORMAT]
    if len(sources) - len(tables) > 1:
        raise ValueError("two topologies describe one node: give one of them")
    for option in ("ranks", "op"):
        if getattr(arguments, option) is not None and len(tables) != 1:
            raise ValueError(f"--{option} is for one table of nccl-tests, got {len(tables)}")


def _base(arguments: argparse.Namespace, sources: Sequence[Source]) -> tuple[Base, str]:
    """What the files are put onto, and how it was chosen."""
    if arguments.base is not None:
        return read_base(arguments.base, arguments.out), "given with --base"
    nothing = Base(_DEFAULT_BASE)
    for source in sources:
        gpu = _read(source, nothing, arguments).gpu
        if gpu is not None:
            base = read_base(gpu.cluster, arguments.out)
            base.guessed = gpu.guessed
            how = f"for the GPUs ({source.name}: {gpu.how})"
            return base, f"a guess {how}; give --base" if gpu.guessed else how
    base = read_base(_DEFAULT_BASE, arguments.out)
    base.guessed = True
    return base, "a guess: no file names the GPUs; give --base"


def _unlike(base: Base, imported: Sequence[Imported], folder: Path) -> list[str]:
    """Where a file names other GPUs than the base has."""
    notes = []
    for one in imported:
        if one.gpu is None or one.gpu.guessed or one.gpu.cluster == base.name:
            continue
        if read_base(one.gpu.cluster, folder).get("device.name") != base.get("device.name"):
            notes.append(
                f"{one.source} names GPUs as in {one.gpu.cluster} ({one.gpu.how}); those of {base.name} are taken"
            )
    return notes


def _kind(source: Source) -> str:
    if nccl_topology.is_topology(source):
        return nccl_topology.FORMAT
    if smi_topology.is_matrix(source):
        return smi_topology.FORMAT
    if nccl_tests.is_table(source):
        return nccl_tests.FORMAT
    if source.text.lstrip().startswith(("{", "[")):
        return _MODEL
    raise source.error(1, f"is none of what can be imported: {_FORMATS}")


def _read(source: Source, base: Base, arguments: argparse.Namespace) -> Imported:
    kind = _kind(source)
    if kind == nccl_topology.FORMAT:
        return nccl_topology.read_topology(source, base)
    if kind == smi_topology.FORMAT:
        return smi_topology.read_matrix(source, base)
    table = nccl_tests.read_table(source, op=arguments.op, num_ranks=arguments.ranks)
    return calibrate(table, base)


def _order(source: Source, arguments: argparse.Namespace) -> int:
    if _kind(source) != nccl_tests.FORMAT:
        return 0
    return nccl_tests.read_table(source, op=arguments.op, num_ranks=arguments.ranks).hosts


def _name(arguments: argparse.Namespace, group: str, sources: Sequence[Source]) -> str:
    name: str = (
        arguments.name or re.sub(r"[^A-Za-z0-9_]+", "_", Path(sources[0].path).stem).strip("_").lower()
    )
    if arguments.name is None and not _NAME.fullmatch(name):
        name = f"{group}_{name}"
    if arguments.name is None and name in shipped(group):
        name = f"{name}_imported"
    if not _NAME.fullmatch(name):
        raise ValueError(f"--name {name}: must be letters, digits, _ and -, the first no digit")
    if name in shipped(group):
        raise ValueError(f"--name {name}: {group}={name} is one of ours; choose another name")
    return name


def _written(
    arguments: argparse.Namespace,
    group: str,
    name: str,
    text: str,
    summaries: Sequence[str],
    notes: Sequence[str],
) -> str:
    """Write the file, whole or not at all; the text tells what it is and how to use it."""
    folder: Path = arguments.out
    path = folder / group / f"{name}.yaml"
    if path.exists() and not arguments.force:
        raise ValueError(f"{path} exists; choose another --name, or replace it with --force")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, text)
    except OSError as err:
        raise ValueError(f"cannot write {path}: {err.strerror or err}") from err
    lines = [*summaries, *(f"guess: {note}" for note in notes), f"wrote {path}"]
    lines.append(f"use it: twinbed --config-dir {shlex.quote(str(folder))} target=sim {group}={name}")
    return "\n".join(lines) + "\n"


def _write(path: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


if __name__ == "__main__":
    sys.exit(main())
