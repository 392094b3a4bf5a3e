"""Saves in the background, for tests: how they are set, what trains meanwhile, and what may befall what writes them."""

from __future__ import annotations

import copy
import errno
import gc
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from ckpt import CheckpointCoordinator, StateComponent
from ckpt.backends.base import Writer
from ckpt.catalog.ledger import ROOT_OWNER, Ledger
from ckpt.errors import CheckpointError
from ckpt.format.records import ArraySpec
from ckpt.ranks.topology import Topology
from ckpt.saving.save_settings import SaveSettings
from tests.support.pace import patience
from tests.support.states import Held, backend_named, coordinator
from tests.support.values import same_values

SETTINGS = {
    "async": ["save.mode=async"],
    "overlap": ["save.mode=async", "save.overlap=true"],
}
"""The ways to save in the background, as overrides of the training command."""

SHAPE = (64, 1000)
PATIENCE_S = patience(30.0)


def settings(**chosen: Any) -> SaveSettings:
    """Of a save in the background."""
    return SaveSettings(mode="async", **chosen)


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise in the main thread what is still waiting there when the time is up, again and again until it lets go.

    Args:
        seconds: on a quiet machine, as in `until`.
    """
    seconds = patience(seconds)

    def too_late(_signum: int, _frame: Any) -> None:
        raise AssertionError(f"it did not end within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, too_late)
    signal.setitimer(signal.ITIMER_REAL, seconds, 5.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def until(is_so: Callable[[], object], what: str = "what was waited for", seconds: float = 30.0) -> None:
    """Wait for something that comes soon."""
    seconds = patience(seconds)
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"{what} did not come within {seconds:g} s"
        time.sleep(0.002)


# What may befall what writes


class Troubled:
    """Writes as another one does, but in one save, on one rank, something happens at a chunk.

    Args:
        trouble: what happens, a name in TROUBLES.
        folder: for notes between the test and what writes: `came-<id>-<rank>` is made when it happens.
        checkpoint_id: of the save; None: every save.
        rank: None: every rank.
        at: the how-manyth chunk of the rank it happens at, from 1.
        backend: the other one, by its name in BACKENDS.
    """

    def __init__(
        self,
        trouble: str,
        folder: Path,
        *,
        checkpoint_id: str | None = "1",
        rank: int | None = None,
        at: int = 1,
        backend: str = "zarr",
    ) -> None:
        self._inner = backend_named(backend)
        self.store, self.join, self.read = self._inner.store, self._inner.join, self._inner.read
        self._trouble, self._folder, self._id, self._rank, self._at = trouble, folder, checkpoint_id, rank, at

    def writer(self, root: Path, rank: int, *args: Any, **named: Any) -> Any:
        inner = self._inner.writer(root, rank, *args, **named)
        is_meant = self._id is None or root.name.startswith(f".unpublished-{self._id}-")
        if not is_meant or self._rank not in (None, rank):
            return inner
        return _TroubledWriter(inner, self._trouble, self._at, self._folder, f"{root.name.split('-')[1]}-{rank}")


class _TroubledWriter:
    def __init__(self, inner: Writer, trouble: str, at: int, folder: Path, who: str) -> None:
        self._inner, self._trouble, self._at, self._folder, self._who = inner, trouble, at, folder, who
        self._written = 0

    def write(self, array: ArraySpec, chunk: int, host: torch.Tensor, *args: Any, **named: Any) -> None:
        self._written += 1
        if self._written == self._at or self._trouble == "dawdles":
            note = self._folder / f".came-{self._who}"
            note.write_text(f"{os.getpid()}")
            note.rename(self._folder / f"came-{self._who}")  # whoever finds it finds the number in it
            TROUBLES[self._trouble](self._folder, array, host)
        self._inner.write(array, chunk, host, *args, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _waits(folder: Path, array: ArraySpec, host: torch.Tensor) -> None:
    """Until there is a file `go`."""
    while not (folder / "go").exists():
        time.sleep(0.005)


def _dawdles(folder: Path, array: ArraySpec, host: torch.Tensor) -> None:
    time.sleep(0.1)


def _hangs(folder: Path, array: ArraySpec, host: torch.Tensor) -> None:
    time.sleep(3600)


def _full(folder: Path, array: ArraySpec, host: torch.Tensor) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), array.path)


def _broken(folder: Path, array: ArraySpec, host: torch.Tensor) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO), array.path)


def _bug(folder: Path, array: ArraySpec, host: torch.Tensor) -> None:
    raise KeyError("a bug of the user")


def _killed(folder: Path, array: ArraySpec, host: torch.Tensor) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _flips(folder: Path, array: ArraySpec, host: torch.Tensor) -> None:
    """One bit of the memory that is staged, between the snapshot and the disk."""
    host.view(-1).view(torch.uint8)[host.nbytes // 2] ^= 4


TROUBLES: dict[str, Callable[[Path, ArraySpec, torch.Tensor], None]] = {
    "waits": _waits, "dawdles": _dawdles, "hangs": _hangs, "full": _full, "broken": _broken, "bug": _bug, "killed": _killed,
    "flips": _flips,
}  # fmt: skip


def has_come(folder: Path, checkpoint_id: str, rank: int = 0) -> bool:
    """Is what writes where its trouble is?"""
    return (folder / f"came-{checkpoint_id}-{rank}").exists()


def let_go(folder: Path) -> None:
    """End every wait of a `Troubled`."""
    (folder / "go").touch()


def error_of(call: Callable[[], object]) -> tuple[str, str, int | None, str | None]:
    """What a call raises: the same on every rank."""
    with pytest.raises(CheckpointError) as caught:
        call()
    return type(caught.value).__name__, str(caught.value), caught.value.rank, caught.value.phase


# What trains meanwhile


class Trainee:
    """A small run: everything of it that a checkpoint holds changes somewhere in a step. All ranks do the same.

    Of the model, parameters change in the optimizer's step only, the statistics of the normalization in the forward pass.
    `counters` are plain tensors on the host and plain values that change there, too.
    """

    def __init__(
        self, seed: int, make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, width: int = 64
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(32, width), torch.nn.BatchNorm1d(width), torch.nn.ReLU(), torch.nn.Linear(width, 8)
        )
        with torch.no_grad():
            for tensor in self.model.state_dict().values():
                if tensor.is_floating_point():
                    tensor.copy_(torch.rand(tensor.shape, generator=generator))
        self.optimizer = make(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.counters = Held({"samples": torch.zeros(5), "step": 0, "seen": [], "table": {"lines": [1, [2]]}})
        self._generator = generator

    def forward(self) -> torch.Tensor:
        batch = torch.rand((16, 32), generator=self._generator)
        counters = self.counters.state
        counters["samples"] += 16
        counters["step"] += 1
        counters["seen"].append(counters["step"])
        counters["table"]["lines"][1][0] += 1
        loss: torch.Tensor = self.model(batch).square().mean()
        return loss

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.forward().backward()
        self.optimizer.step()
        self.scheduler.step()

    def components(self, pattern: str = "replicated") -> list[StateComponent]:
        from ckpt.state.statefuls import ModelState, OptimizerState

        return [
            StateComponent("model", ModelState(self.model), pattern),
            StateComponent("optimizer", OptimizerState(self.optimizer, self.model), pattern),
            StateComponent("scheduler", self.scheduler, pattern),
            StateComponent("counters", self.counters, pattern),
        ]

    def state(self) -> dict[str, Any]:
        """A copy of all there is now, by component."""
        return {one.key: copy.deepcopy(one.stateful.state_dict()) for one in self.components()}

    def coordinator(self, topology: Topology, root: Path, saves: SaveSettings, **options: Any) -> CheckpointCoordinator:
        return coordinator(topology, root, self.components(), saves=saves, pattern_check="off", **options)


def require_holds(
    path: str | Path | None, wanted: dict[str, Any], make: Callable[..., Any] = torch.optim.AdamW, width: int = 64
) -> None:
    """Load a checkpoint of a `Trainee` on this rank alone, and compare every bit of every component."""
    assert path is not None
    found = Trainee(99, make, width)
    alone = coordinator(Topology.alone(), Path(path).parent, found.components(), pattern_check="off")
    alone.load_checkpoint(path)
    state = found.state()
    state["counters"] = found.counters.loaded
    for key in wanted:
        assert same_values(state[key], wanted[key]), (
            f"{key} of {Path(path).name} is {state[key]}, and was {wanted[key]}"
        )


# What is left


class Left:
    """What this process had when this was made: files, threads, children, shared memory. Later: what it has more of."""

    def __init__(self) -> None:
        self._files, self._children, self._memory = _files(), _children(), _memory_files()

    def more(self) -> dict[str, list[str]]:
        """What there is now that there was not then; a closed connection may take a moment."""
        gc.collect()  # errors hold what raised them, in cycles
        found = {
            "files": sorted(_files() - self._files),
            "children": sorted(_children() - self._children),
            "shared memory": sorted((_memory_files() - self._memory).elements()),
        }
        return {kind: names for kind, names in found.items() if names}

    def require_nothing(self, seconds: float = 5.0) -> None:
        deadline = time.monotonic() + patience(seconds)
        while self.more() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert self.more() == {}, f"there is more than there was: {self.more()}"


def _files() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.add(f"{name} -> {os.readlink(f'/proc/self/fd/{name}')}")
    return {one for one in found if "/proc/" not in one}


def _children() -> set[str]:
    """Number and name of each; one that has ended, and was not waited for, has a name still."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found.add(f"{child.pid} {child.name()}")
    return found


def _memory_files() -> Counter[str]:
    """Shared memory that this process has mapped or has named with its number: that of other programs comes and goes."""
    with open("/proc/self/maps") as maps:
        mapped = {(line.split()[4], line.split(maxsplit=5)[5].strip()) for line in maps if len(line.split()) > 5}
    named = [name for name in os.listdir("/dev/shm") if f"{os.getpid()}" in name]
    return Counter([name for _, name in mapped if name.startswith(("/memfd:", "/dev/shm/"))] + named)


def committed(root: Path) -> list[str]:
    """Names of the committed checkpoints, the oldest first."""
    return [one.path.name for one in Ledger(root, run_id="reader").committed()]


def names_in(root: Path) -> list[str]:
    """What lies in a checkpoint root, but for the claim of a coordinator that is open, or of a process that was killed."""
    return sorted({path.name for path in root.iterdir()} - {ROOT_OWNER}) if root.exists() else []
