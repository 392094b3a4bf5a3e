"""Runs that save into an object store in processes of their own, so that they can be killed or stopped at any request."""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from ckpt import CheckpointCoordinator, StateComponent
from ckpt.backends.tensorstore import TensorStoreBackend
from ckpt.backends.zarr import ZarrBackend
from ckpt.catalog.verify import verify_checkpoint
from ckpt.errors import CheckpointError
from ckpt.format.manifest import MANIFEST_NAME
from ckpt.format.places import place_of
from ckpt.interop.rewriting import rewrite
from ckpt.ranks.topology import Topology
from ckpt.saving import saver
from ckpt.saving.save_settings import SaveSettings
from ckpt.storage.objects import store
from ckpt.storage.stored import read_manifest
from tests.support.object_server import ObjectServer
from tests.support.ranks import forkserver
from tests.support.states import Held, buffered

ROOT = "s3://bucket/root"
FAILED = 3
"""Exit code of a run that failed with an error of ours."""


def state_of(generation: int) -> dict[str, Any]:
    """What generation a checkpoint is, every tensor says. Two tensors have arrays of their own, and one of them is in all generations."""
    return {
        "w": torch.full((20_000,), float(generation)),
        "same": torch.arange(20_000.0),
        "small": torch.tensor([generation]),
        "generation": generation,
    }


SCENARIOS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "new": (3, "3", {}),
    "new by tensorstore": (3, "3", {"backend": buffered(TensorStoreBackend(), segment_bytes=1 << 20)}),
    "replace": (9, "2", {}),
    "retention": (3, "3", {"keep_last": 2}),
    "incremental": (3, "3", {"saves": SaveSettings(incremental=True)}),
    "async": (3, "3", {"saves": SaveSettings(mode="async")}),
    "convert": (2, "3", {}),
}
"""Name -> generation, id, and settings of a run that goes on from checkpoint 2 and saves once. "convert" copies it, in another format."""


def write(scenario: str) -> None:
    """Go on from the newest checkpoint, and save once. "setup" begins anew, with the generations 1 and 2 under the ids 1 and 2."""
    held = Held(state_of(0))
    if scenario == "setup":
        with _run(held, {}) as run:
            for generation in (1, 2):
                held.state = state_of(generation)
                run.save_checkpoint(checkpoint_id=str(generation))
        return
    if scenario == "convert":
        in_small_objects = buffered(TensorStoreBackend(), segment_bytes=1 << 20)
        rewrite(place_of(f"{ROOT}/checkpoint-2"), place_of(f"{ROOT}/checkpoint-3"), in_small_objects, Topology.alone())
        return
    generation, id, options = SCENARIOS[scenario]
    with _run(held, options) as run:
        run.load_checkpoint()
        held.state = state_of(generation)
        run.save_checkpoint(checkpoint_id=id)


def take_over() -> None:
    """Another run goes on from the newest checkpoint, takes the root, and saves the id 9, which cleans up."""
    held = Held(state_of(0))
    with _run(held, {}) as run:
        run.load_checkpoint()
        held.state = state_of(8)
        run.save_checkpoint(checkpoint_id="9")


def _run(held: Held, options: Mapping[str, Any]) -> CheckpointCoordinator:
    options = {"backend": ZarrBackend(), "strategy": "direct", "device": "cpu"} | dict(options)
    return CheckpointCoordinator(
        [StateComponent("model", held, "replicated")], None, Topology.alone(), ROOT, stale_s=0.6, **options
    )


def start(fn: Callable[..., None], environment: Mapping[str, str], log: Path, *args: Any, retry_s: float = 0.3) -> BaseProcess:
    """Start a function of this module in a process of its own, whose output goes to a file."""
    process = forkserver().Process(
        target=_in_process, args=(fn, dict(environment), str(log), retry_s, args), daemon=True
    )
    process.start()
    return process


def _in_process(fn: Callable[..., None], environment: dict[str, str], log: str, retry_s: float, args: tuple[Any, ...]) -> None:
    os.environ.update(environment)
    store.RETRY_S = retry_s
    saver.PACK_BELOW_IN_STORES = 64 << 10  # so that small states have objects of their own, which can be copied
    sys.stdout = sys.stderr = open(log, "a", buffering=1)  # noqa: SIM115  # until the process ends
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, force=True)
    try:
        fn(*args)
    except CheckpointError as error:
        print(f"failed: {error}", flush=True)
        os._exit(FAILED)
    except BaseException:
        traceback.print_exc()
        raise


def ended(process: BaseProcess, timeout_s: float = 60.0) -> int:
    """Wait for a process; return its exit code."""
    process.join(timeout_s)
    assert process.exitcode is not None, "it hangs"
    return process.exitcode


def stop(process: BaseProcess) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)


def go_on(process: BaseProcess) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGCONT)


def generations(server: ObjectServer, folder: Path) -> dict[str, int]:
    """Return id -> generation of each checkpoint that a reader finds in the store, whole. Read from a copy, without a client.

    Raises:
        AssertionError: one is not whole.
    """
    found = {}
    for key in sorted(server.objects["bucket"]):
        parts = key.split("/")
        if parts[-1] == MANIFEST_NAME and len(parts) == 3 and b'"checkpoint_id"' in bytes(server.objects["bucket"][key].data):
            id = parts[1].removeprefix("checkpoint-")
            found[id] = _generation(server, f"root/checkpoint-{id}/", folder / f"{id}-{len(list(folder.glob('*')))}")
    return found


def _generation(server: ObjectServer, prefix: str, copy: Path) -> int:
    for key, one in server.objects["bucket"].copy().items():
        if key.startswith(prefix):
            file = copy / key.removeprefix(prefix)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(one.data)
    data = read_manifest(copy).data
    assert data is not None
    for beside in copy.iterdir():
        if beside.name not in (data, MANIFEST_NAME):  # of other attempts
            continue
    problems = verify_checkpoint(copy)
    assert not problems, f"HALF: {prefix}: {problems}"
    held = Held(state_of(0))
    component = StateComponent("model", held, "replicated")
    run = CheckpointCoordinator([component], None, Topology.alone(), copy.parent, backend="zarr", strategy="direct", device="cpu")
    with run:
        run.load_checkpoint(copy)
    assert held.loaded is not None
    (generation,) = {int(held.state["w"][0]), int(held.state["w"][-1]), int(held.state["small"]), held.loaded["generation"]}
    return generation


def orphans(server: ObjectServer) -> list[str]:
    """Return the objects of attempts that no manifest names, and notes of attempts."""
    objects = server.objects["bucket"]
    named = set()
    for key, one in objects.items():
        folder, _, name = key.rpartition("/")
        if name == MANIFEST_NAME or name.startswith(("quarantined-", "abandoned-")):
            data = bytes(one.data)
            at = data.find(b'"data": "')
            if at >= 0:
                named.add(f"{folder}/{data[at + 9 : at + 25].decode()}/")
    return [
        key
        for key in sorted(objects)
        if "/.attempt-" in key or (key.count("/") > 2 and not any(key.startswith(one) for one in named))
    ]
