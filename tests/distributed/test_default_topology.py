"""Calls that are given no topology join the default process group of the moment, whatever used its store before or beside it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt.errors import CheckpointError
from ckpt.ranks.default_topology import current_topology, wait_at_most
from ckpt.ranks.topology import Topology
from tests.support.pace import patience
from tests.support.ranks import run_ranks

ROUNDS = 3


def _by_environment(number: int, folder: Path, port: int) -> dict[str, Any]:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {}


def _over_a_file(number: int, folder: Path, port: int) -> dict[str, Any]:
    return {"store": dist.FileStore(str(folder / f"store-{number}"), 2)}


def _over_one_store(number: int, folder: Path, port: int) -> dict[str, Any]:
    """One store for all groups, in which the program keeps other things as well."""
    store = _of_program(port)
    store.set(f"ckpt/{number}", "not for you")
    store.add("ckpt", 1)
    return {"store": dist.PrefixStore(f"round {number}", store) if number else store}


_held: list[dist.Store] = []


def _of_program(port: int) -> dist.Store:
    if not _held:
        rank = int(os.environ["RANK"])
        _held.append(dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0))
    return _held[0]


def _in_rounds(topology: Topology, way: Callable[..., dict[str, Any]], folder: Path, port: int) -> list[Any]:
    os.environ |= {"RANK": str(topology.rank), "WORLD_SIZE": "2"}
    wait_at_most(patience(30.0))
    outcomes: list[Any] = []
    for number in range(ROUNDS):
        dist.init_process_group("gloo", rank=topology.rank, world_size=2, **way(number, folder, port))
        assert current_topology() is current_topology()
        unfit = {"an object": object()} if topology.rank == 0 and number == 1 else {}  # of rank 0, in the second round
        try:
            ckpt.save({"weight": torch.arange(4.0) + number, **unfit}, folder / f"saved-{number}")
            outcomes.append(ckpt.load(folder / f"saved-{number}")["weight"].tolist())
        except CheckpointError as error:
            outcomes.append(str(error))
        with topology.phase("all are done"):
            pass
        dist.destroy_process_group()
        with topology.phase("all have left, and the store with rank 0"):
            pass
    return outcomes


@pytest.mark.parametrize("way", [_by_environment, _over_a_file, _over_one_store])
def test_each_process_group_of_a_program_is_joined_anew(way: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for outcomes in run_ranks(2, _in_rounds, way, tmp_path, port, is_only=True):
        assert outcomes[0] == [0.0, 1.0, 2.0, 3.0]
        assert "an object" in outcomes[1]
        assert outcomes[2] == [2.0, 3.0, 4.0, 5.0]
