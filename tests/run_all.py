"""The whole suite, in two processes side by side: tests that start ranks wait for them half of their time.

    python tests/run_all.py [arguments of pytest]

Without those marked `long`, which `make test-long` runs.

What both print comes in order: first of one half, as it goes on, then of the other. Exits with 1 if one fails.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
# All that starts no ranks, and as much of the rest as makes both take as long
SECOND = (
    *("analysis", "conf", "kernels", "policies", "sim"),
    *(f"runtime/{name}" for name in ("cluster", "comm", "offload", "optim", "train")),
    "test_run.py",
)


def main(arguments: list[str]) -> int:
    """Run both; the exit status."""
    arguments = ["-m", "not long", *arguments]
    second = [FOLDER / name for name in SECOND]
    first = [path for path in (*FOLDER.iterdir(), *(FOLDER / "runtime").iterdir()) if _has_tests(path)]
    first = sorted(path for path in first if path not in second and path != FOLDER / "runtime")
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        beside = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments, *map(str, second)],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            command = [sys.executable, "-m", "pytest", *arguments, *map(str, first)]
            codes = [subprocess.run(command, check=False).returncode, beside.wait()]
        finally:
            beside.terminate()
        output.seek(0)
        sys.stdout.write(output.read())
    return int(any(codes))


def _has_tests(path: Path) -> bool:
    return path.name.startswith("test_") or (path.is_dir() and any(path.rglob("test_*.py")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
