"""Reads the JSON files that users bring (Hugging Face, DeepSpeed); a failure names the file."""

from __future__ import annotations

import json
from pathlib import Path


def read_json_object(path: str | Path, *, what: str) -> dict[str, object]:
    """The object that a JSON file holds.

    Args:
        path: The file.
        what: What the file should be, for messages: "a Hugging Face config.json".

    Raises:
        ValueError: The file is missing, a directory, unreadable, not UTF-8, truncated, not JSON, holds a key
            twice, or holds something other than an object.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a directory; give the path of {what} itself")
    try:
        text = path.read_text(encoding="utf-8-sig")  # -sig: editors on Windows put a byte-order mark first
    except FileNotFoundError as err:
        raise ValueError(f"{path} does not exist; give the path of {what}") from err
    except UnicodeDecodeError as err:
        raise ValueError(f"{path} is not UTF-8 text (byte {err.start}); {what} must be") from err
    except OSError as err:
        raise ValueError(f"{path} cannot be read: {err.strerror or err}") from err
    try:
        value = json.loads(text, object_pairs_hook=lambda pairs: _object(pairs, path))
    except json.JSONDecodeError as err:
        cut = "is cut off: the text ends" if not text[err.pos :].strip() else f"is not valid JSON: {err.msg}"
        if err.msg.startswith("Unterminated string"):
            cut = "is cut off: a string opens and never closes"
        raise ValueError(f"{path} {cut} at line {err.lineno}, column {err.colno}") from err
    except RecursionError as err:
        raise ValueError(f"{path} nests too deeply to be {what}") from err
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object {{...}} as {what} does, got {json_type(value)}")
    return value


def json_type(value: object) -> str:
    """A value's type as a reader of JSON calls it, with the value where it is short."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"the boolean {str(value).lower()}"
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, str):
        return f"the string {value[:60]!r}"
    return "a list" if isinstance(value, list) else "an object"


def _object(pairs: list[tuple[str, object]], path: Path) -> dict[str, object]:
    # json keeps the last of two equal keys in silence; which one was meant cannot be known
    result: dict[str, object] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"{path} gives the key {key!r} twice in one object; keep one")
        result[key] = value
    return result
