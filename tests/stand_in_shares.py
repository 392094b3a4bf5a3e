"""Shares that write nothing of use, but show what becomes of whoever writes them. They go by pickle to another process."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ckpt.errors import MissingStateError, StorageError
from ckpt.format.dtypes import raw_bytes
from ckpt.saving.writing import Staged, WriteJob, WriteResult


@dataclass
class NoBackend:
    """Only here to be handed over."""

    store: str = "none"


class CannotTravel(Exception):
    """Pickled, it loses what it needs to be made anew."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class StandIn:
    """Writes a file for each item, and what `befalls` says at the second one."""

    def __init__(self, befalls: str = "", num_items: int = 3) -> None:
        self.befalls = befalls
        self.items = [f"item {number}" for number in range(num_items)]

    def write(self, job: WriteJob, staged: Iterable[Staged], progress: Callable[[int], None]) -> WriteResult:
        folder = job.folder
        folder.mkdir(parents=True, exist_ok=True)
        vote = WriteResult()
        try:
            for number, hosts, digests in staged:
                if number == 1:
                    self.act(folder, progress)
                data = b"".join(raw_bytes(host.contiguous()).numpy().tobytes() for host in hosts)
                (folder / f"{number}").write_bytes(data)
                progress(len(data))
                vote.sizes[f"{number}"] = len(data)
                vote.checksums[f"{number}"] = str([(host.shape, host.dtype, digests) for host in hosts])
        except BaseException as error:
            (folder / "aborted").write_text(type(error).__name__)
            raise
        vote.plain_files = {path: [component, data.decode()] for path, (component, data) in job.plain.items()}
        vote.index = [job.backend.store, job.slivers, job.previous]
        return vote

    def item_name(self, number: int) -> str:
        return self.items[number]

    def act(self, folder: Path, progress: Callable[[int], None]) -> None:
        if self.befalls == "disk full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / "1"))
        if self.befalls == "storage":
            raise StorageError("the disk is made of cheese", component="model")
        if self.befalls == "missing":
            raise MissingStateError("nothing is called so") from KeyError("so")
        if self.befalls == "bug":
            raise ZeroDivisionError("division by zero")
        if self.befalls == "cannot travel":
            raise CannotTravel(1, 2)
        if self.befalls == "exits":
            raise SystemExit("no")
        if self.befalls == "says its last and is killed":
            os.write(2, b"the roof is on fire\n")
            os.kill(os.getpid(), signal.SIGKILL)
        if self.befalls == "warns":
            logging.getLogger("ckpt").warning("%s is %s", "this", "odd")
            logging.getLogger("ckpt.inner").info("a detail")
        if self.befalls == "tells who it is":
            (folder / "who.json").write_text(json.dumps(_who()))
        if self.befalls == "hangs":
            (folder / "hangs").touch()
            while True:
                time.sleep(600)
        if self.befalls == "goes on and on":
            (folder / "hangs").touch()
            while True:
                time.sleep(0.01)
                progress(1)
        if self.befalls == "stops within a message":
            os.write(json.loads(sys.argv[1])["fd"], struct.pack("!i", 1000) + b"the first bytes")
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.befalls == "changes memory late":
            time.sleep(0.1)


def _who() -> dict[str, Any]:
    nice = []
    thread = threading.Thread(target=lambda: nice.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
    thread.start()
    thread.join()
    return {
        "pid": os.getpid(),
        "nice": nice[0],
        "cores": sorted(os.sched_getaffinity(0)),
        "ignores": [signal.getsignal(number) == signal.SIG_IGN for number in (signal.SIGINT, signal.SIGTERM)],
        "threads": torch.get_num_threads(),
        "has_cuda": torch.cuda.is_available(),
        "main": __import__("__main__").__dict__.get("__file__"),
    }
