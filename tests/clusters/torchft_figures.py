"""Seconds to get a state of 0.5 GB from another process by each transport of torchft, and by `KeeperTransport`, on loopback.

    python -m tests.clusters.torchft_figures [rounds]

In turn, from one process to another: the seconds of `send_checkpoint`, in which the sender waits, those of `recv_checkpoint`, into new
memory, and those from the beginning of the one to the end of the other. The state is 32 tensors in fp32.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import platform
import statistics
import sys
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.distributed import TCPStore
from torchft import ProcessGroupGloo
from torchft.checkpointing import CheckpointTransport, HTTPTransport
from torchft.checkpointing.pg_transport import PGTransport

from ckpt.integrations.torchft import KeeperTransport

_TIMEOUT = timedelta(seconds=120)
_TENSORS, _SHAPE = 32, (1024, 3815)


def main(rounds: int = 5) -> None:
    context = multiprocessing.get_context("spawn")
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    links = []
    for rank in range(2):
        here, there = context.Pipe()
        context.Process(target=_serve, args=(rank, store.port, there), daemon=True).start()
        links.append(here)
    sender, receiver = links
    took: dict[str, list[tuple[float, float, float]]] = {}
    load = os.getloadavg()[0]
    for number in range(1 + rounds):
        for name in sender.recv() if number == 0 else list(took):
            took.setdefault(name, [])
            began = time.perf_counter()
            sender.send((name, number))
            if name.startswith("PG"):  # it sends while the other one receives
                receiver.send((name, number, ""))
                sent_s, metadata = sender.recv()
            else:
                sent_s, metadata = sender.recv()
                receiver.send((name, number, metadata))
            received_s = receiver.recv()
            seconds = sent_s, received_s, time.perf_counter() - began
            for link in links:
                link.send((name, None))
                link.recv()
            if number > 0:  # the first ones start threads and take memory from the system
                took[name].append(seconds)
    print(f"{_TENSORS * 4 * _SHAPE[0] * _SHAPE[1] / 1e9:.2f} GB, {rounds} rounds, {os.cpu_count()} processors, load {load:.1f} before")
    print(f"Python {platform.python_version()}, torch {torch.__version__}\n")
    print("seconds: median (least to most)\n\n| transport | send | receive | both |\n|---|---|---|---|")
    for name, seconds in took.items():
        cells = [f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})" for each in zip(*seconds, strict=True)]
        print(f"| {name} | {' | '.join(cells)} |")
    for link in links:
        link.send(None)


def _serve(rank: int, port: int, link: Connection) -> None:
    """Send, as rank 0, or receive, as rank 1, by the transport that is asked for."""
    torch.manual_seed(0)
    state = {"user": {f"layers.{i}.weight": torch.randn(_SHAPE) for i in range(_TENSORS)}, "torchft": {"step": 1}}
    group = ProcessGroupGloo(timeout=_TIMEOUT)
    group.configure(f"localhost:{port}/figures", "0", rank, 2)
    transports: dict[str, CheckpointTransport[Any]] = {
        "KeeperTransport": KeeperTransport(),
        "HTTPTransport(num_chunks=0)": HTTPTransport(_TIMEOUT, num_chunks=0),
        "HTTPTransport(num_chunks=8)": HTTPTransport(_TIMEOUT, num_chunks=8),
        "PGTransport (gloo)": PGTransport(group, _TIMEOUT, torch.device("cpu")),
    }
    if rank == 0:
        link.send(list(transports))
    got: Any = None
    while (asked := link.recv()) is not None:
        name, step, *metadata = asked
        transport = transports[name]
        began = time.perf_counter()
        if step is None:
            for _ in range(2):  # as two steps later
                transport.disallow_checkpoint()
            if rank == 1:
                assert all(torch.equal(got["user"][key], value) for key, value in state["user"].items())
                got = None
            ctypes.CDLL(None).malloc_trim(0)  # as in a process that has just started, memory is not there yet
            link.send(None)
        elif rank == 0:
            transport.send_checkpoint([1], step, state, _TIMEOUT)
            link.send((time.perf_counter() - began, transport.metadata()))
        else:
            got = transport.recv_checkpoint(0, metadata[0], step, _TIMEOUT)
            link.send(time.perf_counter() - began)
    for transport in transports.values():
        transport.shutdown(wait=False)
    group.shutdown()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
