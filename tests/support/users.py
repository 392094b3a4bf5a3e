"""What people of a Unix group do in one folder, for tests: run on forked ranks (`tests.support.forked_ranks`), which become other users."""

from __future__ import annotations

import logging
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import ckpt
from ckpt import dist_checkpointing
from ckpt.backends.registry import BACKENDS, backend_named
from ckpt.errors import CheckpointError
from ckpt.integrations.dcp import CkptWriter
from ckpt.saving.save_settings import SaveSettings
from ckpt.state.sharded_tensor import ShardedTensor

GROUP = 61234

for name in BACKENDS:  # another user may not read this checkout
    backend_named(name)
for name in ckpt.__all__:
    getattr(ckpt, name)


def become(user: int, umask: int) -> None:
    logging.getLogger("ckpt").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    os.umask(umask)
    os.setgroups([])
    os.setgid(GROUP)
    os.setuid(user)


def trains_as(user: int, umask: int, root: Path, options: dict[str, Any], is_killed: bool = False) -> int | str:
    become(user, umask)
    return trains(root, options, is_killed)


def trains(root: Path, options: dict[str, Any], is_killed: bool = False) -> int | str:
    """Go on from the newest checkpoint, save twice, and end or be killed; the last step, or the error."""
    model = torch.nn.Linear(64, 64)
    try:
        checkpoints = ckpt.Checkpointer(root, model=model, on_sigterm=False, save_at_end=False, **options)
        step = int(checkpoints.restore())
        for _ in range(2):
            step += 1
            torch.nn.init.normal_(model.weight)
            checkpoints.save(step)
        if is_killed:
            os.kill(os.getpid(), signal.SIGKILL)
        checkpoints.close()
    except CheckpointError as error:
        return str(error)
    return step


def reads_as(user: int, root: Path) -> list[str]:
    """Load the newest checkpoint."""
    become(user, 0o002)
    with ckpt.Checkpointer(root, model=torch.nn.Linear(64, 64), on_sigterm=False, save_at_end=False) as checkpoints:
        restored = checkpoints.restore()
    return [str(int(restored)), *ckpt.load(restored.path)]


def saves_in_all_ways(folder: Path, umask: int) -> None:
    """Save in all ways under a umask."""
    os.umask(umask)
    state = {"a": torch.arange(6.0), "n": 1}
    for format in BACKENDS:
        for mode in ("sync", "async", SaveSettings(incremental=True)):
            name = mode if isinstance(mode, str) else "incremental"
            trains(folder / f"{format}-{name}", {"format": format, "mode": mode})
        ckpt.save(state, folder / f"saved {format}", format=format)
    dcp.save(state, storage_writer=CkptWriter(folder / "dcp"))
    (folder / "dist").mkdir()
    tensor = ShardedTensor.from_rank_offsets("a", torch.arange(6.0))
    dist_checkpointing.save({"a": tensor, "n": 1}, folder / "dist")
