"""Seconds of a save and a load in an object store, beside DCP with s3fs and with s3torchconnector, and beside the bare requests.

    pip install s3fs 's3torchconnector[dcp]==1.5.0'
    python -m tests.support.store_benchmark [rounds]

Two ranks hold halves of 403 MB, in tensors of 50 MB. The store is `object_server`, in a process of its own on this machine; it keeps
objects in memory. All contenders take turns in one run of the ranks; of each the median is printed, and its ratio to the bare
requests.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ckpt
from ckpt.backends.kimi_engine import KimiEngineBackend
from ckpt.backends.tensorstore import TensorStoreBackend
from ckpt.backends.zarr import ZarrBackend
from ckpt.format.places import ObjectPath
from ckpt.storage.objects.store import store_of
from tests.support.object_server import ObjectServer

RANKS, TENSORS, SHAPE = 2, 8, (2048, 6144)
SEGMENT = 64 << 20
Call = Callable[[dict[str, Any], str], None]


def _serve(line: Any) -> None:
    with ObjectServer() as server:
        line.send(server.environment)
        with suppress(EOFError):
            line.recv()


def _ours(format: Any, load: str = "direct") -> tuple[Call, Call]:
    """With one backend for all saves, as in a training run: it keeps its memory."""
    return (
        lambda state, name: ckpt.save(state, f"s3://bucket/{name}", format=format) and None,
        lambda state, name: ckpt.load(f"s3://bucket/{name}", into=state, load=load) and None,
    )


def _s3fs() -> tuple[Call, Call]:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    options = {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}
    return (
        lambda state, name: dcp.save(state, storage_writer=FsspecWriter(f"s3://bucket/{name}", **options)) and None,
        lambda state, name: dcp.load(state, storage_reader=FsspecReader(f"s3://bucket/{name}", **options)),
    )


def _s3torchconnector() -> tuple[Call, Call]:
    from s3torchconnector import S3ClientConfig
    from s3torchconnector.dcp import S3StorageReader, S3StorageWriter

    options: dict[str, Any] = {"region": "us-east-1", "s3client_config": S3ClientConfig(force_path_style=True)}

    def at(made: Any) -> Any:
        made.fs._client._endpoint = os.environ["AWS_ENDPOINT_URL"]  # which these classes take no argument for
        return made

    return (
        lambda state, name: dcp.save(state, storage_writer=at(S3StorageWriter(path=f"s3://bucket/{name}", **options))) and None,
        lambda state, name: dcp.load(state, storage_reader=at(S3StorageReader(path=f"s3://bucket/{name}", **options))),
    )


def _raw() -> tuple[Call, Call]:
    """Four puts and sixteen gets at a time of the same bytes, without any check."""
    store = store_of(ObjectPath("s3", "bucket"))
    rank = dist.get_rank()

    def put(state: dict[str, Any], name: str) -> None:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda one: store.put(f"{name}/{rank}/{one}", _memory(state[one])), state))

    def get(state: dict[str, Any], name: str) -> None:
        step = 8 << 20
        ranges = [(one, at) for one in state for at in range(0, len(_memory(state[one])), step)]

        def read(range_: tuple[str, int]) -> None:
            one, at = range_
            memory = _memory(state[one])
            found = store.get_range(f"{name}/{rank}/{one}", at, min(at + step, len(memory)))
            memory[at : at + len(found)] = found

        with ThreadPoolExecutor(16) as threads:
            list(threads.map(read, ranges))

    return put, get


def _memory(value: DTensor) -> memoryview:
    return memoryview(value.to_local().view(torch.uint8).flatten().numpy())


def _rank(rank: int, port: int, environment: dict[str, str], rounds: int, results: Any) -> None:
    os.environ.update(environment)
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(RANKS)})
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (RANKS,))

    def state(fill: float) -> dict[str, Any]:
        rows = SHAPE[0] // RANKS
        return {
            f"w{number}": DTensor.from_local(torch.full((rows, SHAPE[1]), fill + number + rank / 4), mesh, [Shard(0)])
            for number in range(TENSORS)
        }

    contenders = {
        "raw": _raw(),
        "tensorstore": _ours(TensorStoreBackend()),
        "zarr": _ours(ZarrBackend()),
        "kimi-engine": _ours(KimiEngineBackend()),
        "zarr, two-stage": _ours(ZarrBackend(), "two-stage"),
    }
    contenders |= {"DCP, s3torchconnector": _s3torchconnector(), "DCP, s3fs": _s3fs()}
    seconds: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in contenders}
    for turn in range(rounds + 1):  # the first is a warm-up
        for name, (save, load) in contenders.items():
            want, got = state(turn), state(-1.0)
            where = f"{name.replace(', ', '-').replace(' ', '-')}/{turn}"
            for at, (call, argument) in enumerate(((save, want), (load, got))):
                dist.barrier()
                began = time.perf_counter()
                call(argument, where)
                dist.barrier()
                if turn:
                    seconds[name][at].append(time.perf_counter() - began)
            assert all(torch.equal(got[one].to_local(), want[one].to_local()) for one in want), name
            if rank == 0:
                store = store_of(ObjectPath("s3", "bucket"))
                store.delete([one.key for one in store.below(where)])
            dist.barrier()
    if rank == 0:
        results.send(seconds)
    dist.destroy_process_group()


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    context = multiprocessing.get_context("spawn")
    ours, line = context.Pipe()
    server = context.Process(target=_serve, args=(line,), daemon=True)
    server.start()
    environment = ours.recv()
    results, result = context.Pipe()
    with __import__("socket").create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = [context.Process(target=_rank, args=(rank, port, environment, rounds, result)) for rank in range(RANKS)]
    for one in ranks:
        one.start()
    while not results.poll(1.0):
        if any(one.exitcode for one in ranks):
            sys.exit("a rank failed")
    seconds = results.recv()
    for one in ranks:
        one.join()
    raw = [statistics.median(values) for values in seconds["raw"]]
    print(f"{TENSORS * SHAPE[0] * SHAPE[1] * 4 / 1e6:.0f} MB, {RANKS} ranks, {rounds} rounds, medians (least, most), times raw")
    for name, both in seconds.items():
        cells = [
            f"{what} {statistics.median(values):.3f} s ({min(values):.3f}, {max(values):.3f}) {statistics.median(values) / bare:.2f}"
            for what, values, bare in zip(("save", "load"), both, raw, strict=True)
        ]
        print(f"  {name:24} {'   '.join(cells)}")


if __name__ == "__main__":
    main()
