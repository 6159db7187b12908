"""The switch's binary: compiled on first use, then kept in the user's cache."""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-O2", "-std=gnu11", "-Wall", "-Wextra")


def netswitch_binary() -> Path:
    """Path of the compiled switch.

    Keyed by its source, the flags and the machine, so that a change or a home shared by several machines
    never runs a stale one. Two processes may build at once: each renames its own file into place.

    Raises:
        RuntimeError: no C compiler (`cc`, `gcc`, `clang` in PATH), or it failed.
    """
    sources = sorted(Path(__file__).parent.glob("*.[ch]"))
    key = hashlib.sha256(repr((_FLAGS, platform.machine(), platform.libc_ver())).encode())
    for source in sources:
        key.update(source.name.encode() + b"\0" + source.read_bytes())
    name = f"netswitch-{key.hexdigest()[:16]}"
    cache = _cache_folder()
    binary = cache / name
    if binary.is_file() and binary.stat().st_uid == os.geteuid():
        return binary
    compiler = next((path for path in map(shutil.which, _COMPILERS) if path), None)
    if compiler is None:
        raise RuntimeError(f"no C compiler in PATH (looked for {', '.join(_COMPILERS)})")
    _remove_abandoned(cache)
    with tempfile.TemporaryDirectory(prefix=f"build-{os.getpid()}-", dir=cache) as folder:
        fresh = Path(folder) / name
        command = [
            compiler,
            *_FLAGS,
            "-o",
            str(fresh),
            *(str(path) for path in sources if path.suffix == ".c"),
        ]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()}")
        fresh.replace(binary)
    return binary


def _cache_folder() -> Path:
    """A folder that only this user can write: what lies in it is executed."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    candidates = (Path(home) / "twinbed", Path(tempfile.gettempdir()) / f"twinbed-{os.geteuid()}")
    problems = []
    for folder in candidates:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.stat()
        except OSError as err:
            problems.append(str(err))
            continue
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            problems.append(f"{folder} can be written by others")
        elif not os.access(folder, os.W_OK | os.X_OK):
            problems.append(f"{folder} is read-only")
        else:
            return folder
    raise RuntimeError(f"no cache folder for the switch's binary: {'; '.join(problems)}")


def _remove_abandoned(cache: Path) -> None:
    """Build folders of processes that were killed while they compiled."""
    for folder in cache.glob("build-*-*"):
        if not Path("/proc", folder.name.split("-")[1]).exists():
            shutil.rmtree(folder, ignore_errors=True)
