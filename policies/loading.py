"""Classes of the user's own, named in a config."""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any


def load_named(key: str, name: str, *arguments: Any, **keywords: Any) -> Any:
    """What `package.module:Class` or `path/to/file.py:Class` makes of the arguments.

    Args:
        key: Of the config, for errors.

    Raises:
        ValueError: If it cannot be loaded or made, naming the key, the value and what went wrong.
    """
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        raise ValueError(f"{key}={name!r}: must be 'package.module:Class' or 'file.py:Class'")
    try:
        if where.endswith(".py"):
            module_name = f"twinbed_user_{Path(where).stem}"
            spec = importlib.util.spec_from_file_location(module_name, where)
            if spec is None or spec.loader is None:
                raise ImportError(f"cannot read {where}")
            module = importlib.util.module_from_spec(spec)
            sys.modules[module_name] = module  # dataclasses look their module up by name
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
        made = getattr(module, attribute)
    except Exception as err:  # the module is the user's, and may raise anything
        raise ValueError(f"{key}={name!r} cannot be loaded: {_said(err)}") from err
    given = " and ".join(f"{word}={value}" for word, value in keywords.items())
    try:
        return made(*arguments, **keywords)
    except Exception as err:
        with_given = f" with {given}" if given else ""
        raise ValueError(f"{key}={name!r} cannot be made{with_given}: {_said(err)}") from err


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
