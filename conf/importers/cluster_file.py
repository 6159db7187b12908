"""A cluster's file: what importers found, put onto a cluster that is known. Every line says where it comes from."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from ..schema import ClusterConf
from .findings import Base, Finding, Imported
from .yaml_text import comment, folded, remarked

_PARTS = ("device", "intra_node", "inter_node", "host", "disk", "nccl")
_ABOUT = ("name", "guesses", "fitted", "source")


def read_base(name: str, folder: Path) -> Base:
    """A cluster of ours, or one in `folder`/cluster, its own defaults resolved.

    Raises:
        ValueError: If there is no such cluster, it is no legal one, or its nodes differ.
    """
    from hydra import compose, initialize_config_dir, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException

    GlobalHydra.instance().clear()
    theirs = sorted(path.stem for path in (folder / "cluster").glob("*.yaml"))
    legal = [*shipped("cluster"), *theirs]
    if name not in legal:
        raise ValueError(f"--base {name}: no such cluster; use one of {', '.join(legal)}")
    try:
        if name in theirs:  # its defaults may be ours
            with initialize_config_dir(config_dir=str(folder.absolute()), version_base="1.3"):
                config = compose(f"cluster/{name}", overrides=["hydra.searchpath=[pkg://twinbed.conf]"])
        else:
            with initialize_config_module(config_module="twinbed.conf", version_base="1.3"):
                config = compose(f"cluster/{name}")
    except (HydraException, OmegaConfBaseException, YAMLError) as err:
        raise ValueError(f"--base {name}: cannot be read: {' '.join(str(err).split())}") from err
    values = OmegaConf.to_container(config.get("cluster") or config, resolve=True)
    assert isinstance(values, dict)
    base = Base(name, {str(key): value for key, value in values.items()})
    if base.get("parts"):
        raise ValueError(f"--base {name}: its nodes differ; import each kind onto a cluster of its own")
    if base.get("backend") != "nccl":
        raise ValueError(
            f"--base {name}: backend is {base.get('backend', 'gloo')}; what NCCL sees goes onto a cluster with "
            "backend=nccl"
        )
    return base


def shipped(group: str) -> list[str]:
    """Names in one of our own config groups."""
    return sorted(path.stem for path in (Path(__file__).parent.parent / group).glob("*.yaml"))


def put_onto(base: Base, findings: Sequence[Finding]) -> Base:
    """`base` with these keys; what it had guessed or fitted for them goes."""
    values: dict[str, Any] = _copied(base.values)
    for finding in findings:
        *above, last = finding.key.split(".")
        owner = values
        for part in above:
            owner = owner.setdefault(part, {})
        owner[last] = finding.value
        for about in ("guesses", "fitted"):
            values.get(about, {}).pop(finding.key, None)
        if finding.spread is not None:
            values.setdefault("guesses", {})[finding.key] = list(finding.spread)
    if values.get("intra_node", {}).get("kind", "nvswitch") == "nvswitch":
        for key in ("pcie_Bps", "host_Bps"):  # of a base with another kind of node
            values["intra_node"].pop(key, None)
            values.get("guesses", {}).pop(f"intra_node.{key}", None)
    return Base(base.name, values, base.guessed)


def cluster_text(
    name: str,
    base: Base,
    why_base: str,
    imported: Sequence[Imported],
    given: Sequence[Finding],
    notes: Sequence[str],
) -> str:
    """The YAML of a cluster.

    Args:
        base: Values with all findings in them.
        why_base: How the base was chosen.
        imported: What files said, in order.
        given: Keys that no file has.
        notes: Guesses that are no key's value.

    Raises:
        ValueError: If the result is no legal cluster, naming the key.
    """
    reasons = {f.key: f.reason for one in imported for f in one.findings} | {f.key: f.reason for f in given}
    values = _copied(base.values) | {"name": name}
    guesses = values.get("guesses") or {}
    files = "; ".join(f"{Path(one.source).name} ({one.format})" for one in imported)
    values["source"] = f"twinbed-import: {files}; the rest: {base.name} ({base.get('source') or 'no source'})"
    lines = [
        *_comments(
            f"Made by twinbed-import from {one.source} ({one.format}): {one.summary}." for one in imported
        ),
        *comment(f"Keys without a remark are those of cluster={base.name}, {why_base}."),
        *_comments(f"guess: {note}." for note in notes),
    ]
    for key, value in values.items():
        if key in _ABOUT and key != "name":
            continue
        if key in _PARTS and isinstance(value, Mapping):
            if value:
                lines.append(f"{key}:")
                lines += [
                    f"  {remarked(k, v, _remark(f'{key}.{k}', reasons, guesses))}" for k, v in value.items()
                ]
        else:
            lines.append(remarked(key, value, _remark(key, reasons, guesses)))
    for key, remark in (("guesses", "key: [worst, best]"), ("fitted", "key: on which rows")):
        if values.get(key):
            lines.append(f"{key}: # {remark}")
            lines += [f"  {remarked(k, v, '')}" for k, v in values[key].items()]
    lines += folded("source", values["source"])
    text = "\n".join(lines) + "\n"
    _check(text)
    return text


def _comments(texts: Iterable[str]) -> list[str]:
    return [line for text in texts for line in comment(text)]


def _remark(key: str, reasons: Mapping[str, str], guesses: Mapping[str, Any]) -> str:
    if key in reasons:
        return reasons[key]
    return "guess" if key in guesses else ""


def _check(text: str) -> None:
    """That Hydra will take it: types, ranges, and guesses of keys that exist."""
    try:
        made = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ClusterConf), OmegaConf.create(text)))
    except OmegaConfBaseException as err:
        cause = err.__cause__ or err.__context__
        raise ValueError(str(cause if isinstance(cause, ValueError) else err).split("\n")[0]) from err
    assert isinstance(made, ClusterConf)
    for key in made.guesses:
        owner: Any = made
        for part in key.split("."):
            if isinstance(owner, list) and part.isdigit() and int(part) < len(owner):
                owner = owner[int(part)]
                continue
            if not is_dataclass(owner) or part not in {field.name for field in fields(owner)}:
                raise ValueError(f"guesses has {key!r}, which is no key of a cluster")
            owner = getattr(owner, part)


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return list(value) if isinstance(value, list) else value
