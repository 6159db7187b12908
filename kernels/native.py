"""Builds the native kernels at first use and loads them: C++ without libraries, the system compiler, ctypes.

Chosen by measurement (`python benchmarks/codec_speed.py --threads 1 --compiled` repeats it). One core, 4M bf16
elements, bytes read and written per second where a copy reaches 28 GB/s (an older processor, and loops as compilers
make them):

                      eager torch    torch.compile    this
    quantize, 8 bits       0.6 GB/s         7 GB/s    19 GB/s
    quantize, 4 bits       0.7              7         17
    dequantize, 8 bits     3               19         22
    first call             0               20 s        1 to 3 s, once for all ranks
    256 elements                           33 us       7 us

In a cache where a copy reaches 103 GB/s on one core, with AVX-512 written by hand: 91, 74 and 94 GB/s.

The library is cached for the user, by source, compiler, flags and processor, so that a launcher calls
`prepare` once and its ranks only load. Processes that start at once build it once. Without a compiler the
plain-torch reference does the work, and one warning says so.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# A fused multiply-add rounds once where the reference rounds twice: hence no contraction. Never -ffast-math.
_FLAGS = ("-O3", "-std=c++17", "-ffp-contract=off", "-fPIC", "-shared")
# Tried in turn, as not every compiler knows every processor. 512-bit vectors: 1.3 times gcc's own choice.
_TUNING = (("-march=native", "-mprefer-vector-width=512"), ("-march=native",), ("-mcpu=native",), ())
_COMPILERS = ("c++", "g++", "clang++")
_SOURCES = tuple(Path(__file__).with_name(name) for name in ("codec.cpp", "columns.cpp"))
_HEADERS = tuple(sorted(Path(__file__).parent.glob("*.h")))
_COMPILE_TIMEOUT_s = 120.0

_pointer, _int, _int64, _float = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_FORMAT = (_pointer, _int64, _int, _int64)  # lengths, num_segments, bits, block
_FEEDBACK = (_int, _float, _float)  # dtype, keep, take
_SIGNATURES: dict[str, tuple[type, ...]] = {
    # x, dtype, numel, bits, block, codes, scales, threads
    "twinbed_quantize": (_pointer, _int, _int64, _int, _int64, _pointer, _pointer, _int),
    # codes, scales, numel, bits, block, out, dtype, threads
    "twinbed_dequantize": (_pointer, _pointer, _int64, _int, _int64, _pointer, _int, _int),
    # x, stride_bytes, dtype, rows, order, format, out, stride_bytes, threads
    "twinbed_encode": (_pointer, _int64, _int, _int64, _pointer, *_FORMAT, _pointer, _int64, _int),
    # the same, with error, stride and feedback before threads
    "twinbed_encode_corrected": (
        *(_pointer, _int64, _int, _int64, _pointer, *_FORMAT, _pointer, _int64),
        *(_pointer, _int64, *_FEEDBACK, _int),
    ),
    # messages, stride_bytes, rows, format, out, stride_bytes, dtype, accumulate, threads
    "twinbed_decode": (_pointer, _int64, _int64, *_FORMAT, _pointer, _int64, _int, _int, _int),
    # messages, stride_bytes, count, own, own_dtype, format, out, threads
    "twinbed_reduce": (_pointer, _int64, _int64, _pointer, _int, *_FORMAT, _pointer, _int),
    # messages, stride_bytes, count, own, own_dtype, format, out_bits, out_block, out, error, feedback, threads
    "twinbed_reduce_encode": (
        *(_pointer, _int64, _int64, _pointer, _int, *_FORMAT, _int, _int64, _pointer),
        *(_pointer, *_FEEDBACK, _int),
    ),
    # x, dtype, numel, block, found
    "twinbed_first_bad": (_pointer, _int, _int64, _int64, _pointer),
    # messages, stride_bytes, rows, format, found
    "twinbed_first_bad_scale": (_pointer, _int64, _int64, *_FORMAT, _pointer),
    # x, stride, rows, word_bytes, kept, num_kept, out
    "twinbed_gather_columns": (_pointer, _int64, _int64, _int, _pointer, _int64, _pointer),
    # y, rows, num_kept, word_bytes, place, columns, out
    "twinbed_scatter_columns": (_pointer, _int64, _int64, _int, _pointer, _int64, _pointer),
}


class BuildError(RuntimeError):
    """The native codec cannot be had here; the message says why."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What `prepare` found: the backend in use, why, and how long it took to get it."""

    backend: str  # "native" or "reference"
    reason: str
    seconds: float


def prepare() -> Prepared:
    """Build or load the native codec now, so that no first collective waits for it.

    A launcher calls it before its ranks start: they then find the library in the cache.
    """
    start = time.perf_counter()
    library, reason = _load_once()
    return Prepared("reference" if library is None else "native", reason, time.perf_counter() - start)


def load() -> ctypes.CDLL | None:
    """The native codec, or None where the reference must serve (said in a warning, once a process)."""
    return _load_once()[0]


@cache
def _load_once() -> tuple[ctypes.CDLL | None, str]:
    try:
        path, how = _built()
        try:
            library = ctypes.CDLL(str(path))
        except OSError:  # damaged, or built against a system library that is gone: once more from the source
            path.unlink(missing_ok=True)
            path, how = _built()
            library = ctypes.CDLL(str(path))
    except (BuildError, OSError) as err:
        warnings.warn(
            f"twinbed.kernels runs its slow plain-torch reference: {err}. Install a C++ compiler "
            "(Debian: apt install g++; Fedora: dnf install gcc-c++; macOS: xcode-select --install) "
            "or name one in CXX.",
            RuntimeWarning,
            stacklevel=4,
        )
        return None, str(err)
    for name, argtypes in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = argtypes, _int
    return library, how


def _built() -> tuple[Path, str]:
    """The library's file and how it came to be, compiled unless it lies in the cache."""
    compiler = _compiler()
    key = _key(compiler)
    path = _cache_folder() / f"codec-{key}.so"
    if not path.exists():
        with _locked(path.with_suffix(".lock")):
            if not path.exists():  # else another process built it while we waited
                tuning = _compile(compiler, path)
                return path, f"built with {shlex.join([*compiler, *tuning])}"
    return path, f"cached in {path}"


def _compiler() -> list[str]:
    """The command that compiles C++: $CXX (which may carry flags or a wrapper), else the system's."""
    named = shlex.split(os.environ.get("CXX", ""))
    for command in [named] if named else [[name] for name in _COMPILERS]:
        found = shutil.which(command[0])
        if found is not None:
            return [found, *command[1:]]
    looked_for = f"CXX={shlex.join(named)}" if named else ", ".join(_COMPILERS)
    raise BuildError(f"no C++ compiler found (looked for {looked_for} in PATH)")


def _compile(compiler: list[str], path: Path) -> tuple[str, ...]:
    """Compile into a file beside `path` and rename it there, so that nobody ever loads half a library."""
    handle, name = tempfile.mkstemp(prefix=path.stem, suffix=".tmp", dir=path.parent)
    os.close(handle)
    try:
        for tuning in _TUNING:
            command = [*compiler, *_FLAGS, *tuning, *map(str, _SOURCES), "-o", name]
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, errors="replace", timeout=_COMPILE_TIMEOUT_s
                )
            except subprocess.TimeoutExpired as err:
                raise BuildError(f"{compiler[0]} took longer than {_COMPILE_TIMEOUT_s:g} s") from err
            if done.returncode == 0:
                with open(name, "rb") as file:
                    os.fsync(file.fileno())  # or a power cut leaves half a file under the final name
                os.replace(name, path)
                return tuning
        raise BuildError(f"{shlex.join(command)} failed: {done.stderr.strip()[-500:] or done.returncode}")
    finally:
        Path(name).unlink(missing_ok=True)


def _key(compiler: list[str]) -> str:
    """Hash of all that the library's code depends on; -march=native ties it to the processor's features."""
    program = Path(compiler[0]).resolve()
    stat = program.stat()  # in place of `--version`: no process to start in each rank
    facts = (
        [hashlib.sha256(file.read_bytes()).hexdigest() for file in (*_SOURCES, *_HEADERS)],
        [str(program), stat.st_size, stat.st_mtime_ns, *compiler[1:]],
        [_FLAGS, _TUNING],
        [platform.system(), platform.machine(), _processor_features()],
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:24]


def _processor_features() -> str:
    """Instruction sets of this processor, so that a home folder shared by unlike machines stays safe."""
    try:
        with open("/proc/cpuinfo") as cpuinfo:
            lines = [line for line in cpuinfo if line.startswith(("flags", "Features", "model name"))]
    except OSError:
        return platform.processor()
    return "".join(sorted(set(lines)))


def _cache_folder() -> Path:
    """A folder that only this user can write, for what lies in it is executed."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    refusals = []
    for folder in (
        Path(caches) / "twinbed" / "kernels",
        Path(tempfile.gettempdir()) / f"twinbed-kernels-{os.getuid()}",
    ):
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as err:  # no home, a full disk, a read-only mount
            refusals.append(str(err))
            continue
        stat = folder.stat()
        if stat.st_uid == os.getuid() and not stat.st_mode & 0o022:
            return folder
        refusals.append(f"{folder} can be written by other users")
    raise BuildError(f"no folder to keep the library in ({'; '.join(refusals)})")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the file's lock; the system drops it with the process. Where locks fail, everyone builds."""
    import fcntl  # POSIX only, like the rest of the runtime

    with open(path, "w") as file:
        with suppress(OSError):  # some network file systems: the rename keeps it safe all the same
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
