"""The process of megatron-core beside each rank of measure=megatron: saves and loads on command.

It runs in an environment of its own, for megatron-core 0.10 needs NumPy 1 and zarr 2:

    python3.11 -m venv megatron-env
    megatron-env/bin/pip install torch==2.13.0 "numpy<2" "zarr>=2.18,<3" "numcodecs<0.16" "tensorstore<=0.1.45" fasteners packaging
    megatron-env/bin/pip install --no-deps megatron-core==0.10.0

Commands come on stdin and answers go to stdout, a line of JSON each; the end of stdin is the end of this process. Two things
are patched, in this process alone: `torch.cuda.synchronize` does nothing, and `torch.load` takes pickle, as it did then. Two-stage
loading sends host tensors through gloo (`cpu_transfer=True`), which touches no CUDA.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

sys.path.append(str(Path(__file__).resolve().parent.parent.parent))  # last: it must not hide installed packages

import torch
import torch.distributed as dist

from recipes.benchmark.measuring import PeakMemory
from recipes.benchmark.megatron_state import RankHoldings, Side, data_parallel_ranks, shards_of

PACKAGES = ("megatron-core", "zarr", "tensorstore", "numpy", "torch")


class Peer:
    """One rank of megatron-core's side. Every method but the first is collective."""

    def __init__(
        self, *, rank: int, num_ranks: int, store: str, threads: int, in_place: bool, held: dict[str, Any]
    ) -> None:
        torch.set_num_threads(threads)
        torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
        os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
        from megatron.core.dist_checkpointing import ShardedTensor, load, save  # seconds, which no round shall pay

        self._in_place = in_place
        mine = RankHoldings(**held)
        self._data_parallel = dist.new_subgroups_by_enumeration(data_parallel_ranks(mine))[0]
        self._side = Side(shards_of(mine), ShardedTensor, save, load, _measured, is_lead=rank == 0)

    def save(self, folder: Path) -> dict[str, Any]:
        from megatron.core.dist_checkpointing.strategies.zarr import ZarrSaveShardedStrategy

        return self._side.save(folder, ZarrSaveShardedStrategy("zarr", 1))

    def load(self, folder: Path, *, two_stage: bool) -> dict[str, Any]:
        """Load, and name the tensors that are wrong. Two-stage loading always fills the tensors that exist."""
        from megatron.core.dist_checkpointing.strategies.tensorstore import TensorStoreLoadShardedStrategy
        from megatron.core.dist_checkpointing.strategies.two_stage import TwoStageDataParallelLoadShardedStrategy

        if two_stage:
            staged = TwoStageDataParallelLoadShardedStrategy(self._data_parallel, cpu_transfer=True)
            return self._side.load(folder, staged, fills=True)
        direct = TensorStoreLoadShardedStrategy(load_directly_on_device=self._in_place)
        return self._side.load(folder, direct, fills=self._in_place)


def _measured(work: Callable[[], None]) -> dict[str, Any]:
    dist.barrier()
    memory = PeakMemory()
    started = time.perf_counter()
    work()
    dist.barrier()
    return {"seconds": time.perf_counter() - started, "peak_mib": memory.mib()}


def _answer(peer: Peer | None, command: dict[str, Any]) -> tuple[Peer | None, dict[str, Any]]:
    if peer is None:
        return Peer(**command), {name: version(name) for name in PACKAGES}
    folder = Path(command["folder"])
    if command["do"] == "save":
        return peer, peer.save(folder)
    return peer, peer.load(folder, two_stage=command["two_stage"])


def main() -> None:
    answers: TextIO = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # megatron-core prints; stdout is for answers
    logging.getLogger("megatron").setLevel(logging.ERROR)  # it warns in every save that its zarr strategy is deprecated
    warnings.simplefilter("ignore")
    peer: Peer | None = None
    for line in sys.stdin:
        try:
            peer, answer = _answer(peer, json.loads(line))
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
        print(json.dumps(answer), file=answers)
    os._exit(0)  # without waiting for ranks that may be gone


if __name__ == "__main__":
    main()
