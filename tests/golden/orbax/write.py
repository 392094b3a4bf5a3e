"""Write the golden checkpoints beside this file with the real Orbax, in an environment of its own:

    python3.11 -m venv orbax-env
    orbax-env/bin/pip install orbax-checkpoint==0.12.8 jax==0.10.2 jaxlib==0.10.2
    orbax-env/bin/python tests/golden/orbax/write.py

    manager/7       by a CheckpointManager, from two processes with two devices each: OCDBT, Zarr v3, arrays sharded in rows
    ocdbt-zarr2     by a PyTreeCheckpointHandler with use_ocdbt=True, use_zarr3=False, not compressed, chunks of at most 2 KiB
    zarr2, zarr3    with use_ocdbt=False

`types`, an array of each type, is in manager/7 and zarr2 alone. `tests/unit/interop/test_orbax_folders.py` computes the same values.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import shutil
import socket
from collections import namedtuple
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

TYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64", "bfloat16",
    "float8_e4m3fn", "float8_e5m2", "complex64", "complex128",
)  # fmt: skip
Adam = namedtuple("Adam", "count mu")
HERE = Path(__file__).parent


def tree(as_array: Any, types: Sequence[str]) -> dict[str, Any]:
    import jax.numpy as jnp
    import numpy as np

    def numbers(shape: tuple[int, ...], dtype: str, seed: int) -> Any:
        size = math.prod(shape) * jnp.dtype(dtype).itemsize
        data = (((np.arange(size, dtype=np.int64) + seed) * 2654435761 >> 15) & 255).astype(np.uint8)
        if dtype == "bool":
            data &= 1
        return data.view(jnp.dtype(dtype)).reshape(shape)

    return {
        "model": {
            "0.weight": as_array(numbers((8, 6), "int32", 1).astype("float32")),
            "0.bias": as_array(numbers((8,), "int8", 2).astype("float32")),
        },
        "params": {"dense": {"kernel": as_array(numbers((48, 40), "int16", 3)), "b/é": as_array(numbers((4,), "bfloat16", 4))}},
        "types": {dtype: as_array(numbers((4, 3), dtype, 5)) for dtype in types},
        "opt": [Adam(as_array(numbers((), "int32", 6)), {"w": as_array(numbers((4, 2), "float32", 7))}), None, (), (1, 2.5)],
        "host": {"a": numbers((5,), "int64", 8), "zero_dim": np.array(-5, np.int8), "number": np.float32(0.1)},
        "step": 7, "lr": 0.1, "flag": True, "large": 1 << 40, "text": 'a "ü"', "note/x": "y", "none": None, "dict": {}, "list": [],
    }  # fmt: skip


def write_folders() -> None:
    import jax

    jax.config.update("jax_enable_x64", True)
    import jax.numpy as jnp
    import orbax.checkpoint as ocp

    for name, ocdbt, zarr3 in (("ocdbt-zarr2", True, False), ("zarr2", False, False), ("zarr3", False, True)):
        shutil.rmtree(HERE / name, ignore_errors=True)
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3, use_compression=not ocdbt)
        state = tree(jnp.asarray, TYPES if name == "zarr2" else ())
        saved_as = ocp.SaveArgs(chunk_byte_size=2048 if ocdbt else None)
        chunked = jax.tree.map(partial(_always, saved_as), state)
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(HERE / name, state, save_args=chunked)


def _always(value: Any, _: Any) -> Any:
    return value


def write_manager(process: int, port: int) -> None:
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.config.update("jax_enable_x64", True)
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=process)
    import numpy as np
    import orbax.checkpoint as ocp

    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("rows",))

    def sharded(array: Any) -> Any:
        rows = jax.sharding.PartitionSpec("rows") if array.ndim else jax.sharding.PartitionSpec()
        return jax.make_array_from_callback(array.shape, jax.sharding.NamedSharding(mesh, rows), lambda at: array[at])

    with ocp.CheckpointManager(HERE / "manager") as manager:
        manager.save(7, args=ocp.args.PyTreeSave(tree(sharded, TYPES)))
        manager.wait_until_finished()


if __name__ == "__main__":
    shutil.rmtree(HERE / "manager", ignore_errors=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    start = multiprocessing.get_context("spawn").Process
    writers = [start(target=write_manager, args=(process, port)) for process in range(2)] + [
        start(target=write_folders)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0, writer
    for file in HERE.rglob(
        "commit_success.txt"
    ):  # Orbax reads it in object stores only, and it holds the path of this machine
        file.unlink()
