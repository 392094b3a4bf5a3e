"""The folder of a run: one run at a time, and nothing in it is written before the run has passed every check and holds the lock."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import reduction
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from ckpt.catalog.owner import FolderLock
from ckpt.errors import CheckpointError, StorageError, sentence

HYDRA_FOLDER = ".hydra"
LOCK_NAME = ".folder.owner.json"
"""The owner file in the folder of a run or of a sweep: which process uses it, and since when. The checkpoint root has another."""

Settle = Callable[[dict[str, Any]], dict[str, Any]]


def lock_of(folder: Path, what: str, cfg: Mapping[str, Any]) -> FolderLock:
    """Return the lock of a run's or sweep's folder, not acquired yet.

    Args:
        what: the folder's name in a refusal, such as "the folder of the run".
        cfg: has `run_name`, and `ledger.stale_s` if the command has that key.
    """
    return FolderLock(
        folder / LOCK_NAME,
        run_id=str(cfg.get("run_name", "?")),
        what=f"{what}, {folder},",
        advice="wait for its end, or write elsewhere with run_name=<another>",
        stale_s=(cfg.get("ledger") or {}).get("stale_s", 60.0),
    )


@contextmanager
def writing(what: str, folder: Path) -> Iterator[None]:
    """Turn the file system's refusal into one sentence that names the folder."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise StorageError(
            f"{what}, {folder}, cannot be written: {sentence(error)}; choose another with output_dir=<folder>"
        ) from error


class InheritedLock:
    """The descriptor of a lock. A process that receives it by multiprocessing keeps it to its end, and the lock with it.

    So ranks that outlive their launcher for a moment keep the next run out until the last one has ended.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self.descriptor),)


def _received(sent: Any) -> InheritedLock:
    return InheritedLock(sent.detach())


@dataclass(frozen=True)
class Opened:
    """An open run folder.

    Attributes:
        cfg: the config that the run was settled on.
        held: the lock, for the processes that the run starts.
    """

    cfg: dict[str, Any]
    held: InheritedLock | None


class RunFolder:
    """How the folder `run_dir` of a run is opened: by the process that starts the ranks, or by rank 0 of those that exist.

    Args:
        composed: the config as Hydra composed it. It is left in `.hydra/`, with Hydra's own config and the overrides.
        settle: decides, under the lock and before anything is written, whether and with which config the run begins; raises if it may not.
        temporary: a folder in `run_dir` that is removed at the end, whatever ranks have left in it that were killed.
    """

    def __init__(self, composed: DictConfig, settle: Settle = lambda cfg: cfg, temporary: str | None = None) -> None:
        self._settle = settle
        self._temporary = temporary
        hydra = HydraConfig.instance().cfg
        self._texts = {
            "config.yaml": OmegaConf.to_yaml(composed),
            "hydra.yaml": OmegaConf.to_yaml(hydra),
            "overrides.yaml": OmegaConf.to_yaml(HydraConfig.get().overrides.task),
        }

    @contextmanager
    def opened(self, cfg: dict[str, Any], progress: Callable[[], object] = lambda: None) -> Iterator[Opened]:
        """Hold the folder inside the block.

        Args:
            cfg: the checked config.
            progress: called now and then while it waits for a sign of life of an owner on another machine.

        Raises:
            FolderInUseError: another run uses the folder.
            StorageError: the folder cannot be written.
        """
        run_dir = Path(cfg["run_dir"])
        what = "the folder of the run"
        lock = lock_of(run_dir, what, cfg)
        with writing(what, run_dir):
            run_dir.mkdir(parents=True, exist_ok=True)
            lock.acquire(progress)
        with lock:
            cfg = self._settle(cfg)
            with writing(what, run_dir):
                self._leave_config(run_dir)
            try:
                yield Opened(cfg, InheritedLock(lock.fileno()))
            finally:
                if self._temporary is not None:
                    shutil.rmtree(run_dir / self._temporary, ignore_errors=True)

    def _leave_config(self, run_dir: Path) -> None:
        folder = run_dir / HYDRA_FOLDER
        folder.mkdir(exist_ok=True)
        for name, text in self._texts.items():
            (folder / name).write_text(text, encoding="utf-8")


@contextmanager
def opened(
    folder: RunFolder | None, cfg: dict[str, Any], progress: Callable[[], object] = lambda: None
) -> Iterator[Opened]:
    """Hold the folder of a run open inside the block, if the run has one; see `RunFolder.opened`."""
    if folder is None:
        yield Opened(cfg, None)
        return
    with folder.opened(cfg, progress) as run:
        yield run
