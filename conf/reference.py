"""docs/keys.md from the schema itself: `python -m twinbed.conf.reference > docs/keys.md`.

A key's meaning is the comment beside it in the schema; its unit is the ending of its name.
"""

import ast
import inspect
import io
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, dataclass, fields, is_dataclass
from enum import Enum
from importlib.resources import files
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from omegaconf import MISSING

from . import schema
from .hints import unit_of

# Keys whose name says it to those who know the field, and that the schema leaves without a comment
_SAID = {
    "target": "simulate, train here, or both and compare",
    "engine": "whose order of collectives and computation is followed",
    "recompute": "what the backward pass computes again",
    "precision": "of gathered weights and reduced gradients; master weights are fp32",
    "launch": "start ranks on this machine, or write a script for a cluster",
    "steps": "optimizer steps",
    "seed": "of weights, data and failures that are drawn",
    "cluster.name": "shown in reports",
    "cluster.nodes": "number of nodes",
    "cluster.devices_per_node": "ranks (GPUs) of a node",
    "cluster.backend": "CPUs talk by gloo, GPUs by NCCL",
    "cluster.device.name": "shown in reports",
    "cluster.device.memory_bytes": "of one device; more is `oom`",
    "cluster.device.price_per_hour": "of one device, in any currency; with `train.tokens` it gives `cost`",
    "cluster.device.flash_backward": "the same of its backward pass",
    "cluster.intra_node.bandwidth_Bps": "of one rank's way to the others of its node",
    "cluster.intra_node.latency_ns": "one traversal, rank to rank",
    "cluster.intra_node.kind": "how the GPUs of a node are joined",
    "cluster.inter_node.links": "equal links of one node",
    "cluster.parts.name": "shown in reports",
    "cluster.parts.nodes": "number of nodes of this part",
    "model.name": "shown in reports; set by the choice of `model=`",
    "model.family": "gpt, gpt2, llama, qwen2, opt, bert, mixtral or vit; gpt2, opt and mixtral are only simulated",
    "model.layers": "blocks",
    "model.hidden": "width of the residual stream",
    "model.heads": "attention heads; must divide `model.hidden`",
    "model.vocab": "token values",
    "model.tied_embeddings": "the head shares the token embedding's weights",
    "comm.name": "shown in reports; set by the choice of `comm=`",
    "comm.parameter_server": "gradients to rank 0 and weights back (`comm=ps`)",
    "comm.weight_bits": "qwZ: 2, 4, 6 or 8",
    "comm.weight_block": "qwZ: elements that share a scale; 0: one scale for a whole tensor",
    "comm.gradient_path": "qgZ: how quantized gradients are summed",
    "data.validation_fraction": "share of the text that is kept for validation",
    "optimizer.lr": "peak learning rate",
    "train.warmup_lr_steps": "steps over which the learning rate rises from 0",
    "train.lr_min_fraction": "where the schedule ends, as a share of `optimizer.lr`",
    "parallel.pipeline_schedule": "order of a stage's micro-batches",
    "parallel.tensor": "ranks that share each layer",
    "parallel.tensor_mode": "how a layer is cut",
    "parallel.sequence_mode": "how a sequence is cut",
}
_TEXTS = {
    "parallel.tensor_mode": schema.TENSOR_MODES,
    "parallel.sequence_mode": schema.SEQUENCE_MODES,
    "parallel.pipeline_schedule": schema.PIPELINE_SCHEDULES,
}
_GROUPS = ("cluster", "model", "comm", "data", "optimizer", "offload")

_HEAD = """\
# Keys

Written from `conf/schema/` by `python -m twinbed.conf.reference`; `pytest tests/conf/test_reference.py
--rewrite-goldens` writes it anew. Every key is given on the command line as `key=value`, or in a YAML of your own.
Numbers stand alone, in the unit that the key's name ends with: `cluster.inter_node.bandwidth_Bps=25e9` is 200 Gbit/s.
`null` is a value too. A default of `-` comes with the choice of the group (`cluster=`, `model=`, `comm=`, `data=`,
`optimizer=`), which sets others as well: `python run.py --cfg job ...` prints what an experiment then is.
"""


@dataclass(frozen=True, slots=True)
class KeyRow:
    """One key of the reference. `legal` is empty where any value of the type will do."""

    key: str
    default: str
    unit: str
    legal: str
    meaning: str


def main() -> None:
    """Print the page."""
    sys.stdout.write(page())


def page() -> str:
    """The whole of docs/keys.md."""
    rest = [row for row in rows() if "." not in row.key]
    parts = [_HEAD, "## Top level\n", _table(rest)]
    for name in dict.fromkeys(row.key.rpartition(".")[0] for row in rows() if "." in row.key):
        parts.append(f"## `{name}`\n")
        said = _docstring(name)
        if said:
            parts.append(f"{said}\n")
        if name in _GROUPS:
            parts.append(f"Choices of `{name}=`: {', '.join(f'`{choice}`' for choice in _choices(name))}.\n")
        parts.append(_table([row for row in rows() if row.key.rpartition(".")[0] == name]))
    return "\n".join(parts)


def rows() -> list[KeyRow]:
    """Every key, in the schema's order; a node's own keys before those of the nodes in it."""
    return list(_rows(schema.ExperimentConf, ""))


def _rows(node: type, prefix: str) -> Iterator[KeyRow]:
    types, said = get_type_hints(node), _comments(node)
    inner = []
    for field in fields(node):
        key, kind = f"{prefix}{field.name}", types[field.name]
        below = _node(kind)
        if below is not None:
            inner.append((below, f"{key}."))
            if get_origin(kind) is not list:
                continue
        meaning = said.get(field.name) or _SAID.get(key, "")
        unit = unit_of(key)
        yield KeyRow(
            key, _default(field), unit[0] if unit and below is None else "", _legal(key, kind), meaning
        )
    for below, where in inner:
        if where == "cluster.parts.device.":
            yield KeyRow("cluster.parts.device", "-", "", "", "the keys of `cluster.device`")
            continue
        yield from _rows(below, where)


def _node(kind: Any) -> type | None:
    """The dataclass that a key holds, itself or in a list."""
    kind = get_args(kind)[0] if get_origin(kind) is list else kind
    return kind if isinstance(kind, type) and is_dataclass(kind) else None


def _default(field: "Field[Any]") -> str:
    value = field.default
    if value is NO_DEFAULT and field.default_factory is not NO_DEFAULT:
        value = field.default_factory()
    if isinstance(value, Enum):
        return f"`{value.value}`"
    if value is NO_DEFAULT or (isinstance(value, str) and value == MISSING):
        return "-"
    if value is None:
        return "`null`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str):
        return f"`{value}`" if value else ""
    if isinstance(value, list | dict) and not value:
        return "`[]`" if isinstance(value, list) else "`{}`"
    if isinstance(value, int | float) and abs(value) >= 10**6:
        return f"`{value:g}`".replace("e+0", "e").replace("e+", "e")
    return f"`{value}`"


def _legal(key: str, kind: Any) -> str:
    if get_origin(kind) in (Union, UnionType):
        inner = next(part for part in get_args(kind) if part is not NoneType)
        return _legal(key, inner)
    if key in _TEXTS:
        return ", ".join(f"`{text}`" for text in _TEXTS[key])
    if isinstance(kind, type) and issubclass(kind, Enum):
        said = _comments(kind)
        each = [f"`{m.value}`" + (f" ({said[m.name]})" if said.get(m.name) else "") for m in kind]
        return ", ".join(each)
    return ""


def _comments(node: type) -> dict[str, str]:
    """What the schema says beside each field, or above it where nothing stands beside."""
    source = inspect.getsource(node)
    beside: dict[int, str] = {}
    alone: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            words = token.string.lstrip("# ")
            (beside if token.line[: token.start[1]].strip() else alone)[token.start[0]] = words
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for statement in body.body:
        name = _target(statement)
        if name is None:
            continue
        above: list[str] = []
        line = statement.lineno - 1
        while line in alone:
            above.insert(0, alone[line])
            line -= 1
        parts = [" ".join(above)] if above else []
        parts += [beside[statement.lineno]] if statement.lineno in beside else []
        found[name] = "; ".join(part if part.endswith("...") else part.rstrip(".") for part in parts)
    return found


def _target(statement: ast.stmt) -> str | None:
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return statement.target.id
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id
    return None


def _docstring(name: str) -> str:
    node: type = schema.ExperimentConf
    for part in name.split("."):
        below = _node(get_type_hints(node)[part])
        assert below is not None
        node = below
    text = node.__doc__ or ""
    return "" if text.startswith(f"{node.__name__}(") else inspect.cleandoc(text)


def _choices(group: str) -> list[str]:
    folder = files("twinbed.conf") / group
    names = (entry.name for entry in folder.iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def _table(found: list[KeyRow]) -> str:
    lines = ["| key | default | unit | meaning |", "| --- | --- | --- | --- |"]
    for row in found:
        meaning = ": ".join(part for part in (row.meaning, row.legal) if part)
        cells = (f"`{row.key}`", row.default, row.unit, meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
