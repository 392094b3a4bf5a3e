"""The contenders of measure=background: our coordinator, torch.distributed.checkpoint.async_save, and no save.

Each is made anew for its turn, and leaves no memory and no process behind: together they would not fit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save

from ckpt.errors.imports import importing, private_name
from ckpt.saving.save_settings import SaveSettings
from recipes.benchmark.contenders import coordinator_of
from recipes.benchmark.peers import Dcp
from recipes.benchmark.workloads import Workload


@dataclasses.dataclass(frozen=True)
class SaveMode:
    """How a contender saves.

    Attributes:
        writer: "thread", or "process" of DCP's; None: training waits for the whole save.
        overlap: whether the copy, too, runs beside training, whose next optimizer step waits for it.
        is_capped: of ours: whether the writer keeps to `benchmark.writer_cores` and `benchmark.writer_mib_s`.
        is_tuned: of DCP's: whether it keeps memory and plans from save to save, which its defaults do not. To overlap it has to.
    """

    writer: str | None
    overlap: bool = False
    is_capped: bool = False
    is_tuned: bool = False


NOTHING = "none"
_BACKGROUND = {
    "thread": SaveMode("thread"),
    "thread-overlap": SaveMode("thread", overlap=True),
}
OURS: dict[str, SaveMode] = {
    "sync": SaveMode(None),
    **_BACKGROUND,
    **{f"{name}/capped": dataclasses.replace(mode, is_capped=True) for name, mode in _BACKGROUND.items()},
}
DCP: dict[str, SaveMode] = {
    "dcp-thread": SaveMode("thread"),
    "dcp-process": SaveMode("process"),
    "dcp-thread/tuned": SaveMode("thread", is_tuned=True),
    "dcp-process/tuned": SaveMode("process", is_tuned=True),
    "dcp-thread-overlap": SaveMode("thread", overlap=True, is_tuned=True),
    "dcp-process-overlap": SaveMode("process", overlap=True, is_tuned=True),
}
"""torch.distributed.checkpoint.async_save, in the same modes."""


class Saving:
    """One way to save beside training; this one does not save. Every method but `is_done` is collective.

    Args:
        steps: its save counts as done after so many.
    """

    def __init__(self, steps: int) -> None:
        self._steps = self._steps_left = steps

    def save(self, folder: Path) -> None:
        """Begin to save to a folder that does not exist yet; training continues when it returns."""
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

    def load(self, folder: Path) -> None:
        """Load a save into the state that was saved."""

    def close(self) -> None:
        """Release memory and end processes."""


class Ours(Saving):
    """The coordinator of the recipe, with the backend that `ckpt=` chooses: all components, digests, a commit.

    Args:
        settings: how it saves.
    """

    def __init__(self, cfg: Mapping[str, Any], workload: Workload, folder: Path, settings: SaveSettings) -> None:
        self._coordinator = coordinator_of(cfg, workload.saved, output_dir=folder, keep_last=None, saves=settings)
        self._committed = folder

    def save(self, folder: Path) -> None:
        self._committed = folder.with_name(f"checkpoint-{folder.name}")
        self._coordinator.save_checkpoint(self._committed)

    def is_done(self) -> bool:
        return self._committed.is_dir()

    def finish(self) -> None:
        self._coordinator.wait()

    def durable_s(self) -> float:
        report = self._coordinator.last_save
        assert report is not None
        return report.save_s

    def load(self, folder: Path) -> None:
        self._coordinator.load_checkpoint(folder.with_name(f"checkpoint-{folder.name}"))

    def close(self) -> None:
        self._coordinator.close()


class DcpSaving(Saving):
    """torch.distributed.checkpoint.async_save with synced files: as durable as ours, but for the entries of folders.

    It has a gloo group of its own, without which its collectives meet those of training. By default it copies to new memory in each
    save. Tuned, it uses what its documentation offers beyond that: one stager for all saves, which keeps its memory, shared with the
    process that writes if one does, and cached plans; page-locked memory and copies that do not block are for accelerators. With
    overlap the stager copies in a thread, and the optimizer's next step waits for it.
    """

    def __init__(self, workload: Workload, mode: SaveMode) -> None:
        state = workload.saved
        self._topology = state.topology
        self._tree = state.tree
        self._mode = mode
        self._loader = Dcp(workload)
        self._group = dist.new_group(backend="gloo")
        self._stager = _stager(mode) if mode.is_tuned else None
        self._staged: Future[None] | None = None
        self._durable: Future[Any] | None = None
        self._settled = threading.Event()
        self._called = self._durable_at = 0.0
        self._talk = contextlib.ExitStack()
        if mode.writer == "process":
            # Until the first save is done: the process that it starts inherits stderr, and would write a line for each of its steps.
            self._talk.enter_context(_without_stderr())
        optimizer = state.statefuls["optimizer"].optimizer  # type: ignore[attr-defined]
        self._hook = optimizer.register_step_pre_hook(self._wait_for_copy)

    def save(self, folder: Path) -> None:
        self._settled.clear()
        self._called = time.perf_counter()
        by_process = self._mode.writer == "process"
        with importing("DCP's save beside training"):
            from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
        response = async_save(
            dict(self._tree),
            storage_writer=FileSystemWriter(folder, sync_files=True),
            planner=DefaultSavePlanner(enable_plan_caching=self._mode.is_tuned),
            process_group=self._group,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS if by_process else AsyncCheckpointerType.THREAD,
            async_stager=self._stager,
        )
        if isinstance(response, AsyncSaveResponse):
            self._staged, self._durable = response.staging_completion, response.upload_completion
        else:
            self._staged, self._durable = None, response
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

    def load(self, folder: Path) -> None:
        assert folder.name == "dcp", "the name that its loader knows"
        self._loader.load(folder.parent)

    def close(self) -> None:
        self._talk.close()
        self._hook.remove()
        if self._stager is not None:
            self._stager.close()
        # Torch has no call that ends its process, which keeps the memory.
        executor = private_name("torch.distributed.checkpoint", "_async_process_executor", "end the process of async_save")
        executor._CHECKPOINT_PROCESS = None
        dist.destroy_process_group(self._group)

    def _note_end(self, future: Future[Any]) -> None:
        self._durable_at = time.perf_counter()
        self._settled.set()

    def _wait_for_copy(self, *_: Any) -> None:
        if self._staged is not None:
            self._staged.result()
            self._staged = None


def _stager(mode: SaveMode) -> Any:
    with importing("DCP's stager with options"):
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=torch.accelerator.is_available(),
            use_shared_memory=mode.writer == "process",
            use_async_staging=mode.overlap,
            use_non_blocking_copy=torch.accelerator.is_available(),
        )
    )


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
    keys = cfg["benchmark"]
    if name in OURS:
        return Ours(cfg, workload, folder, settings_of(OURS[name], keys))
    return DcpSaving(workload, DCP[name]) if name in DCP else Saving(keys["steps"])


def settings_of(mode: SaveMode, keys: Mapping[str, Any]) -> SaveSettings:
    """Return the settings of our coordinator for a mode."""
    if mode.writer is None:
        return SaveSettings()
    caps = {name: keys[name] for name in ("writer_cores", "writer_mib_s") if mode.is_capped}
    return SaveSettings(mode="async", overlap=mode.overlap, **caps)
