"""Commands that one process runs one after another. It is forked of one that has loaded torch, and so are the ranks of its commands."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch

from tests.support.ranks import forkserver


class Said(NamedTuple):
    code: int
    out: str
    err: str


@contextmanager
def one_by_one(cwd: Path, folder: Path) -> Iterator[Callable[..., Said]]:
    """Start the process in `cwd`, with the environment of now; `folder` is for what its commands say.

    Gives a function that runs a module with arguments as if that were typed.
    """
    context = forkserver()
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, cwd, folder, dict(os.environ)))
    process.start()
    there.close()

    def run(module: str, *arguments: str) -> Said:
        here.send((module, *arguments))
        code: int = here.recv()
        return Said(code, *((folder / name).read_text() for name in ("out", "err")))

    try:
        yield run
    finally:
        here.close()
        process.join()


def _serve(commands: Connection, cwd: Path, folder: Path, environment: dict[str, str]) -> None:
    os.chdir(cwd)
    os.environ.update(environment)
    torch.set_num_threads(1)
    while True:
        try:
            command = commands.recv()
        except EOFError:
            return
        for stream, name in ((1, "out"), (2, "err")):
            file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, stream)
            os.close(file)
        code = _exit_code_of(*command)
        sys.stdout.flush()
        sys.stderr.flush()
        commands.send(code)


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
