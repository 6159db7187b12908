"""Forks the ranks of a test: ranks_host.py SCRIPT CASE WORLD FOLDER TIMEOUT_S.

Each runs SCRIPT with the arguments CASE RANK WORLD FOLDER TIMEOUT_S (`ranks_run`) and prints to FOLDER/RANK.log;
FOLDER/codes.json says how they ended. What the script imports is imported once, before; beside packages that is what
lies in its folder and in this one.
"""

import importlib.util
import json
import os
import runpy
import sys
import traceback
from pathlib import Path

import torch._dynamo  # noqa: F401  (the first step of an optimizer would import it)


def main() -> None:
    script, case, world, folder = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    timeout_s = sys.argv[5]
    sys.path[:0] = [str(script.parent), str(Path(__file__).parent)]
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    pids = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            _run(script, [case, str(rank), str(world), str(folder), timeout_s], folder / f"{rank}.log")
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    (folder / "codes.json").write_text(json.dumps(codes))


def _run(script: Path, arguments: list[str], log: Path) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for standard in (1, 2):
        os.dup2(file, standard)
    sys.argv = [str(script), *arguments]
    code = 0
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as err:
        code = err.code if isinstance(err.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
