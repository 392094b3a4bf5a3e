"""A trainer whose writer process hangs in the middle of a save, to be killed."""

from __future__ import annotations

import os
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from ckpt.memory.shared_memory import segment_of, shared_memory
from ckpt.saving.background.writer_process import WriterProcess
from ckpt.saving.writing import Staged, WriteJob
from tests.stand_in_shares import NoBackend, StandIn


def main(folder: Path, forks: bool, tells: Connection) -> None:
    """Send the number of the writer process, of the file that is its memory, and of what was forked, and wait for the end."""
    memory = shared_memory(1 << 20)
    found = segment_of(memory)
    assert found is not None
    memory.fill_(7)
    writer = WriterProcess()
    backend = NoBackend()
    staged = [Staged(number, [memory[: 1 << 10].view(torch.int32)]) for number in range(3)]
    arguments = StandIn("hangs"), WriteJob(folder, backend, {}), staged, lambda num_bytes: None
    threading.Thread(target=lambda: writer.write(*arguments), daemon=True).start()
    while not (folder / "hangs").exists():
        time.sleep(0.01)
    sleeper = 0
    if forks:  # such as a worker that loads data: it has all descriptors of this process
        sleeper = os.fork()
        if sleeper == 0:
            time.sleep(30)
            os._exit(0)
    tells.send((writer.pid, os.fstat(found[0].fd).st_ino, sleeper))
    time.sleep(600)
