"""Lines of YAML with remarks, in the manner of our own files: 25e9 and no 25000000000.0."""

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

# Words that YAML 1.1 takes for something other than text
_NO_TEXT = re.compile(r"(?i)null|true|false|yes|no|on|off|y|n|~|[-+.0-9].*")
_WHOLE_WORDS: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
_PLAIN = re.compile(r"[A-Za-z0-9_./-]+( [A-Za-z0-9_./-]+)*")


def remarked(key: str, value: Any, remark: str) -> str:
    """`key: value # remark`; no remark where it is empty."""
    return f"{key}: {scalar(value)}" + (f" # {remark}" if remark else "")


def folded(key: str, text: str) -> list[str]:
    """A long text over several lines."""
    return [
        f"{key}: >-",
        *textwrap.wrap(text, 116, initial_indent="  ", subsequent_indent="  ", **_WHOLE_WORDS),
    ]


def comment(text: str) -> list[str]:
    return textwrap.wrap(text, 118, initial_indent="# ", subsequent_indent="#   ", **_WHOLE_WORDS)


def scalar(value: Any) -> str:
    """A value in a line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, str):
        plain = _PLAIN.fullmatch(value) and not _NO_TEXT.fullmatch(value)
        return value if plain else json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{scalar(str(k))}: {scalar(v)}" for k, v in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(scalar(item) for item in value) + "]"
    raise TypeError(f"{type(value).__name__} has no line of YAML")


def _number(value: float) -> str:
    if abs(value) >= 1e6:
        unit = 12 if abs(value) >= 1e13 else 9
        short = f"{value / 10.0**unit:.12g}e{unit}"
        if float(short) == value:
            return short
    return repr(value)
