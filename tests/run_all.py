"""The whole suite, in two processes side by side: tests that start ranks wait for them half of their time.

    python tests/run_all.py [arguments of pytest]

Without those marked `long`, which `make test-long` runs.

What both print comes in order: first of those with ranks, as they go on, then of the others. Exits with 1 if one fails.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ALONE = ("analysis", "conf", "kernels", "policies", "sim")  # no ranks


def main(arguments: list[str]) -> int:
    """Run both; the exit status."""
    arguments = ["-m", "not long", *arguments]
    alone = [FOLDER / name for name in ALONE]
    with_ranks = sorted(
        path
        for path in FOLDER.iterdir()
        if path not in alone
        and (path.name.startswith("test_") or (path.is_dir() and any(path.rglob("test_*.py"))))
    )
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        beside = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments, *map(str, alone)],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            first = subprocess.run(
                [sys.executable, "-m", "pytest", *arguments, *map(str, with_ranks)], check=False
            ).returncode
            second = beside.wait()
        finally:
            beside.terminate()
        output.seek(0)
        sys.stdout.write(output.read())
    return int(bool(first or second))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
