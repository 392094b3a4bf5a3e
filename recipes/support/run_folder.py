"""The folder of a run: one run at a time. Nothing is written in it before the config is checked and the lock is held."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing import reduction
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from ckpt.catalog.owner import FolderLock
from ckpt.errors import telling

HYDRA_FOLDER = ".hydra"
LOCK_NAME = ".folder.owner.json"
"""Lock file in the folder of a run or a sweep: names the process that uses it. The checkpoint root has a lock file of its own."""

Settle = Callable[[dict[str, Any]], dict[str, Any]]


def lock_of(folder: Path, what: str, cfg: Mapping[str, Any]) -> FolderLock:
    """Return the lock of the folder of a run or a sweep, not yet acquired.

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


def writing(what: str, folder: Path, key: str = "output_dir") -> AbstractContextManager[None]:
    """Raise a `StorageError` that names the folder, and the key by which another is chosen, in place of an `OSError`."""
    return telling(f"{what}, {folder}, cannot be written", f"choose another with {key}=<folder>")


@dataclass(frozen=True)
class InheritedLock:
    """The descriptor of a lock. A process that receives it by multiprocessing holds the lock until it ends.

    The ranks hold it too, so no other run begins while a rank outlives its launcher.
    """

    descriptor: int

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self.descriptor),)


def _received(sent: Any) -> InheritedLock:
    return InheritedLock(sent.detach())


@dataclass(frozen=True)
class Opened:
    """An open run folder.

    Attributes:
        cfg: the config that `settle` returned.
        held: the lock, for the processes that the run starts; None: the run has no folder.
    """

    cfg: dict[str, Any]
    held: InheritedLock | None


class RunFolder:
    """The folder `run_dir` of a run. The process that starts the ranks opens it, or rank 0 of ranks that exist already.

    Args:
        composed: the config as Hydra composed it. Written to `.hydra/`, with Hydra's own config and the overrides.
        settle: called under the lock, before anything is written; returns the config with which the run begins, or raises.
        temporary: a folder in `run_dir` that is removed at the end, with all that killed ranks left in it.
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
            progress: called from time to time while the lock waits for a sign of life of an owner on another machine.

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
                (run_dir / HYDRA_FOLDER).mkdir(exist_ok=True)
                for name, text in self._texts.items():
                    (run_dir / HYDRA_FOLDER / name).write_text(text, encoding="utf-8")
            try:
                yield Opened(cfg, InheritedLock(lock.fileno()))
            finally:
                if self._temporary is not None:
                    shutil.rmtree(run_dir / self._temporary, ignore_errors=True)


def opened(
    folder: RunFolder | None, cfg: dict[str, Any], progress: Callable[[], object] = lambda: None
) -> AbstractContextManager[Opened]:
    """Open the folder of a run inside the block, if the run has one; see `RunFolder.opened`."""
    return nullcontext(Opened(cfg, None)) if folder is None else folder.opened(cfg, progress)
