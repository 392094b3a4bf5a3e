"""Commands that one process runs one after another, so that torch is loaded once: `python -m tests.e2e.one_by_one FOLDER`.

Each line of its stdin is a module and its arguments. What a command says is in the files `out` and `err`; the answer is its exit code.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import NamedTuple


class Said(NamedTuple):
    code: int
    out: str
    err: str


class OneByOne:
    """The process, seen from outside."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process, self._folder = process, folder

    def __call__(self, module: str, *arguments: str) -> Said:
        """Run a command as if it were typed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([module, *arguments]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        out, err = ((self._folder / name).read_text() for name in ("out", "err"))
        assert answer, f"it has ended: {out}{err}"
        return Said(json.loads(answer), out, err)


@contextmanager
def one_by_one(cwd: Path, folder: Path) -> Iterator[OneByOne]:
    """Start the process in `cwd`, with the environment of now; `folder` is for what its commands say."""
    command = [sys.executable, "-m", __name__, str(folder)]
    with subprocess.Popen(command, cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield OneByOne(process, folder)


def main() -> None:
    folder = Path(sys.argv[1])
    with os.fdopen(os.dup(1), "w") as answers:
        for line in sys.stdin:
            for stream, name in ((1, "out"), (2, "err")):
                file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(file, stream)
                os.close(file)
            code = _exit_code_of(*json.loads(line))
            sys.stdout.flush()
            sys.stderr.flush()
            print(code, file=answers, flush=True)


def _exit_code_of(module: str, *arguments: str) -> int:
    sys.argv = [module, *arguments]
    try:
        import_module(module).main()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    main()
