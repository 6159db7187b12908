"""What Hydra's own errors leave unsaid: the legal keys beside an unknown one, and the unit of a refused value."""

from dataclasses import fields, is_dataclass
from typing import get_origin, get_type_hints

from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

# The ending of a key's name -> (its unit, an example)
UNITS = {
    "_Bps": ("bytes a second", "200 Gbit/s is 25e9"),
    "_bytes": ("bytes", "80 GB is 80e9"),
    "_ns": ("nanoseconds, a whole number", "5 microseconds are 5000"),
    "_s": ("seconds", "a minute is 60"),
    "_h": ("hours", "a day is 24"),
    "flop_per_s": ("floating-point operations a second", "312 TFLOP/s is 312e12"),
    "flop_per_s_fp32": ("floating-point operations a second", "19.5 TFLOP/s is 19.5e12"),
    "flops_per_s": ("floating-point operations a second", "1 GFLOP/s is 1e9"),
    "_w": ("watts", "a kilowatt is 1000"),
    "_ns_per_element": ("nanoseconds an element", ""),
}


def unit_of(key: str) -> tuple[str, str] | None:
    """(unit, example) that the ending of a key's name tells; the longest ending counts."""
    name = key.rpartition(".")[2]
    endings = [ending for ending in UNITS if name.endswith(ending)]
    return UNITS[max(endings, key=len)] if endings else None


def hint(error: BaseException | None) -> str:
    """One sentence on an error of Hydra or OmegaConf, or nothing. Follows what the error was raised from."""
    while error is not None and not isinstance(error, OmegaConfBaseException):
        error = error.__cause__ or error.__context__
    if error is None:
        return ""
    key = str(error.full_key or "")
    if "Cannot merge DictConfig with ListConfig" in str(error):
        return f"{key} is a list here: give {key}=[...], which takes its place"
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        node = error.object_type
        if not (isinstance(node, type) and is_dataclass(node)):
            return ""
        where = key.rpartition(".")[0]
        legal = ", ".join(f.name for f in fields(node))
        return f"there is no key {key}; legal keys{f' of {where}' if where else ''}: {legal}"
    if isinstance(error, ValidationError):
        node, name = error.object_type, key.rpartition(".")[2]
        known = get_type_hints(node) if isinstance(node, type) and is_dataclass(node) else {}
        kind = known.get(name)
        if kind is not None and get_origin(kind) is list:
            return f"{key} is a list: {key}=[A,B]"
        found = unit_of(key)
        if found is not None and found[0] == "bytes" and kind in (int, int | None):
            return f"{key} is a whole number of bytes, all its digits written (10000000, not 1e7 or 10MB)"
        if found is None:
            return ""
        unit, example = found
        return f"{key} is a number in {unit}{f' ({example})' if example else ''}, without a unit behind it"
    return ""
