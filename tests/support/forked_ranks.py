"""Ranks that are forked, for each case, from one process that has imported a slow framework once. They may be killed."""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from ckpt.ranks.addresses import LOOPBACK
from tests.support.pace import patience
from tests.support.ranks import Dead, forkserver

RunForked = Callable[..., list[Any]]
"""`run(world_size, "function", *args, **options)` -> what each rank returned, or `Dead`."""


@contextmanager
def forked_from(module: str) -> Iterator[RunForked]:
    """Start a process that imports `module`; gives a function that runs functions of it, by name, on ranks forked from that process.

    The ranks are those of torch's default process group (gloo). A rank that raises fails the case, with its traceback.
    """
    context = forkserver()
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, module))
    process.start()
    there.close()

    def run(world_size: int, function: str, *args: Any, timeout_s: float = 60.0, **options: Any) -> list[Any]:
        here.send((world_size, function, args, options, patience(timeout_s)))
        found: list[Any] = here.recv()
        problems = [f"rank {rank} raised\n{one}" for rank, (kind, one) in enumerate(found) if kind == "error"]
        assert not problems, "\n".join(problems)
        return [one for _, one in found]

    try:
        yield run
    finally:
        here.close()
        process.join(patience(10.0))
        process.kill()
        process.join()


def _serve(pipe: Connection, module: str) -> None:
    functions = importlib.import_module(module)
    torch.set_num_threads(1)
    while True:
        try:
            world_size, name, args, options, timeout_s = pipe.recv()
        except EOFError:
            return
        with socket.socket() as free:
            free.bind((LOOPBACK, 0))
            port = free.getsockname()[1]
        function = partial(getattr(functions, name), **options)
        ranks = [_fork(rank, world_size, port, function, args) for rank in range(world_size)]
        pipe.send([_outcome(*rank, ends_at=time.monotonic() + timeout_s) for rank in ranks])


def _fork(
    rank: int, world_size: int, port: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[int, int]:
    """Start a rank; its process and the pipe that its result comes through."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    process = os.fork()
    if process:
        os.close(writer)
        return process, reader
    try:
        dist.init_process_group("gloo", init_method=f"tcp://{LOOPBACK}:{port}", rank=rank, world_size=world_size)
        answer = "result", function(*args)
    except BaseException:
        answer = "error", traceback.format_exc()
    data = pickle.dumps(answer)
    with os.fdopen(writer, "wb") as stream:
        stream.write(data)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    os._exit(0)


def _outcome(process: int, reader: int, *, ends_at: float) -> tuple[str, Any]:
    with os.fdopen(reader, "rb", buffering=0) as stream:
        os.set_blocking(reader, False)
        data, part = b"", None
        while part != b"" and time.monotonic() < ends_at:
            part = stream.read()
            data += part or b""
            if part is None:
                time.sleep(0.005)
    if part != b"":
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    if data:
        kind, one = pickle.loads(data)
        return kind, one
    code = os.waitstatus_to_exitcode(status)
    return ("result", Dead(code)) if part == b"" else ("error", "it did not end before the deadline")
