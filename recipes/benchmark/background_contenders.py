"""The contenders of measure=background: our coordinator, torch.distributed.checkpoint.async_save, and no save.

Each is made anew for its turn, and leaves no memory and no process behind: together they would not fit.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save

from ckpt.errors import importing, private_name
from ckpt.saving.save_settings import SaveSettings
from ckpt.saving.tiers import memory_of
from recipes.benchmark.contenders import coordinator_of
from recipes.benchmark.host_memory import free, go, tier_of
from recipes.benchmark.peers import Dcp
from recipes.benchmark.workloads import Workload

NOTHING = "none"
IN_MEMORY = "/memory"
OURS = (
    "sync", "thread", "thread-overlap", "thread/capped", "thread-overlap/capped", f"thread{IN_MEMORY}", f"thread-overlap{IN_MEMORY}",
)  # fmt: skip
"""Training waits for the whole save; for the copy alone; or its next optimizer step does. "capped": the writer keeps to
`benchmark.writer_cores` and `benchmark.writer_mib_s`. "memory": the save is committed in the tier of that name, and goes no further."""

DCP = (
    "dcp-thread", "dcp-process", "dcp-thread/tuned", "dcp-process/tuned", "dcp-thread-overlap", "dcp-process-overlap",
    f"dcp-thread{IN_MEMORY}", f"dcp-thread-overlap{IN_MEMORY}",
)  # fmt: skip
"""torch.distributed.checkpoint.async_save, whose writer is a thread or a process. "tuned": it keeps memory and plans from save to
save, which its defaults do not. To overlap it has to. "memory": it writes into a file system of memory."""


class Saving:
    """One way to save beside training; this one does not save. Every method but `is_done` is collective.

    Args:
        steps: its save counts as done after so many.
    """

    def __init__(self, steps: int) -> None:
        self._steps = self._steps_left = steps

    def save(self, path: Path) -> None:
        """Begin to save to a path that does not exist yet; training continues when it returns."""
        self._steps_left = self._steps

    def is_done(self) -> bool:
        """Whether the save is durable, as far as this rank can tell without waiting. Called once in each step."""
        self._steps_left -= 1
        return self._steps_left < 0

    def finish(self) -> None:
        """Wait until the save is done, and complete it as training has to."""

    def durable_s(self) -> float | None:
        """Return the seconds from the call of the finished save until it was durable; None without a save.

        Raises:
            CheckpointError: the save failed.
        """
        return None

    def place_of(self, path: Path) -> Path:
        """Where a save to a path lies."""
        return path

    def load(self, path: Path) -> None:
        """Load a save, the newest one, into the state that was saved."""

    def close(self) -> None:
        """Release memory and end processes."""


class Ours(Saving):
    """The coordinator of the recipe, with the backend that `ckpt=` chooses: all components, digests, a commit.

    Args:
        folder: that it will save below.
        settings: how it saves.
    """

    def __init__(self, cfg: Mapping[str, Any], workload: Workload, folder: Path, settings: SaveSettings) -> None:
        self._coordinator = coordinator_of(cfg, workload.saved, output_dir=folder, keep_last=None, saves=settings)
        self._path = folder

    def save(self, path: Path) -> None:
        self._path = path
        self._coordinator.save_checkpoint(path)

    def is_done(self) -> bool:
        return self.place_of(self._path).is_dir()

    def finish(self) -> None:
        self._coordinator.wait()

    def durable_s(self) -> float:
        report = self._coordinator.last_save
        assert report is not None
        return report.save_s

    def load(self, path: Path) -> None:
        self._coordinator.load_checkpoint(path)

    def close(self) -> None:
        self._coordinator.close()


class OursInMemory(Ours):
    """The same, with the memory tier and no other. The folder is in memory."""

    def __init__(self, cfg: Mapping[str, Any], workload: Workload, folder: Path, settings: SaveSettings) -> None:
        tiers, self._folder, self._is_lead = [tier_of(folder)], folder, workload.saved.topology.is_lead
        self._coordinator = coordinator_of(cfg, workload.saved, output_dir=folder, keep_last=None, saves=settings, tiers=tiers)
        self._path = folder

    def save(self, path: Path) -> None:
        self._path = path
        self._coordinator.save_checkpoint(path, goes_home=False)

    def place_of(self, path: Path) -> Path:
        return memory_of(self._folder, self._folder) / path.name

    def load(self, path: Path) -> None:
        self._coordinator.load_checkpoint()

    def close(self) -> None:
        go(self._coordinator)
        if self._is_lead:
            free(self._folder, [self._folder])


class DcpSaving(Saving):
    """torch.distributed.checkpoint.async_save with synced files: as durable as ours, but for the entries of folders.

    It has a gloo group of its own, without which its collectives meet those of training. By default it copies to new memory in each
    save. Tuned, it uses what its documentation offers beyond that: one stager for all saves, which keeps its memory, shared with the
    process that writes if one does, and cached plans; page-locked memory and copies that do not block are for accelerators. With
    overlap the stager copies in a thread, and the optimizer's next step waits for it.
    """

    def __init__(self, name: str, workload: Workload) -> None:
        state = workload.saved
        self._topology = state.topology
        self._tree = state.tree
        self._by_process = "process" in name
        self._is_tuned = name not in ("dcp-thread", "dcp-process")
        self._loader = Dcp(workload)
        self._group = dist.new_group(backend="gloo")
        self._stager = self._made_stager(overlap=name.endswith("overlap")) if self._is_tuned else None
        self._staged: Future[None] | None = None
        self._durable: Future[Any] | None = None
        self._settled = threading.Event()
        self._called = self._durable_at = 0.0
        self._talk = contextlib.ExitStack()
        if self._by_process:
            # Until the first save is done: the process that it starts inherits stderr, and would write a line for each of its steps.
            self._talk.enter_context(_without_stderr())
        optimizer = state.statefuls["optimizer"].optimizer  # type: ignore[attr-defined]
        self._hook = optimizer.register_step_pre_hook(self._wait_for_copy)
        warnings.filterwarnings("ignore", "Detected an existing checkpoint", UserWarning)  # in memory, the one before the last

    def save(self, path: Path) -> None:
        self._settled.clear()
        self._called = time.perf_counter()
        with importing("DCP's save beside training"):
            from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
        response = async_save(
            dict(self._tree),
            storage_writer=FileSystemWriter(path, sync_files=True),
            planner=DefaultSavePlanner(enable_plan_caching=self._is_tuned),
            process_group=self._group,
            async_checkpointer_type=AsyncCheckpointerType("process" if self._by_process else "thread"),
            async_stager=self._stager,
        )
        self._staged = getattr(response, "staging_completion", None)
        self._durable = response.upload_completion if isinstance(response, AsyncSaveResponse) else response
        self._durable.add_done_callback(self._note_end)

    def is_done(self) -> bool:
        return self._settled.is_set()

    def finish(self) -> None:
        self._settled.wait()

    def durable_s(self) -> float:
        assert self._durable is not None
        with self._topology.phase("finish"), self._talk:
            self._durable.result()
        return self._durable_at - self._called

    def load(self, path: Path) -> None:
        self._loader.load_from(path)

    def close(self) -> None:
        self._talk.close()
        self._hook.remove()
        if self._stager is not None:
            self._stager.close()
        # Torch has no call that ends its process, which keeps the memory.
        executor = private_name("torch.distributed.checkpoint", "_async_process_executor", "end the process of async_save")
        executor._CHECKPOINT_PROCESS = None
        dist.destroy_process_group(self._group)

    def _made_stager(self, *, overlap: bool) -> Any:
        with importing("DCP's stager with options"):
            from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        pinned = torch.accelerator.is_available()
        return DefaultStager(
            StagingOptions(
                use_pinned_memory=pinned, use_shared_memory=self._by_process, use_async_staging=overlap, use_non_blocking_copy=pinned
            )
        )

    def _note_end(self, future: Future[Any]) -> None:
        self._durable_at = time.perf_counter()
        self._settled.set()

    def _wait_for_copy(self, *_: Any) -> None:
        if self._staged is not None:
            self._staged.result()
            self._staged = None


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """Drop stderr inside the block, and that of processes started in it for as long as they live."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def saving_of(name: str, cfg: Mapping[str, Any], workload: Workload, folder: Path) -> Saving:
    """Make a contender by its name. Collective.

    Args:
        folder: that it will save below.
    """
    if name in OURS:
        return (OursInMemory if name.endswith(IN_MEMORY) else Ours)(cfg, workload, folder, settings_of(name, cfg["benchmark"]))
    return DcpSaving(name.removesuffix(IN_MEMORY), workload) if name in DCP else Saving(cfg["benchmark"]["steps"])


def settings_of(name: str, keys: Mapping[str, Any]) -> SaveSettings:
    """Return the settings of our coordinator, by the contender's name."""
    if name == "sync":
        return SaveSettings()
    caps = {key: keys[key] for key in ("writer_cores", "writer_mib_s") if name.endswith("/capped")}
    return SaveSettings(mode="async", overlap="overlap" in name, **caps)
