"""A training loop whose ranks are killed, or fail, in saves of chosen lives, for launchers that restart them:

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 -m tests.e2e.restarting FOLDER STEPS [ddp]

Without `ddp` every rank trains on the same batches by itself, and torch's group is used for nothing.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckpt import Checkpointer

FOLDER = "CKPT_TEST_EVENTS"
"""The environment's name for a folder that holds `events/` and, in any folder of it, the checkpoints.

Events are files `<number>-<event>-<agent>.<local rank>-<step>`. Each happens once, in this order, in the save of that step.
"""
AGENT = "CKPT_TEST_AGENT"
PAUSE_S = "CKPT_TEST_PAUSE_S"
"""How long each save takes at least, so that there is time for something to happen."""


class Events:
    """A component without state of its own, at whose saves the next event happens.

    - `kill`: this rank is killed while the others are in the save.
    - `fail`: this rank raises a moment after the others have come to the end of the phase.
    - `agent`: this rank's machine is lost: its launcher, and all ranks of that.
    """

    def __init__(self, model: Any = None) -> None:
        self._folder = Path(os.environ[FOLDER])

    def state_dict(self) -> dict[str, Any]:
        time.sleep(float(os.environ.get(PAUSE_S, "0")))
        committed = [int(path.name.removeprefix("checkpoint-")) for path in self._folder.rglob("checkpoint-????????")]
        self._happen_at(max(committed, default=0) + 2)  # a save every two steps
        return {"nothing": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def _happen_at(self, step: int) -> None:
        here = f"{os.environ[AGENT]}.{os.environ['LOCAL_RANK']}"
        for file in sorted((self._folder / "events").iterdir())[:1]:
            _, event, place, at = file.name.split("-")
            if (place, int(at)) != (here, step):
                return
            file.unlink()
            time.sleep(0.3)
            if event == "fail":
                raise OSError(28, "No space left on device")
            agent = psutil.Process(os.getppid())
            for process in [agent, *agent.children()] if event == "agent" else []:
                if process.pid != os.getpid():
                    process.kill()
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    train_in_group(Path(sys.argv[1]), int(sys.argv[2]), in_ddp=sys.argv[3:] == ["ddp"])


def train_in_group(folder: Path, steps: int, *, in_ddp: bool = False) -> None:
    """`train` on a rank that a launcher has started."""
    dist.init_process_group("gloo")
    train(folder, steps, in_ddp=in_ddp)
    dist.destroy_process_group()


def train(folder: Path, steps: int, *, in_ddp: bool = False) -> None:
    """Train on from the newest checkpoint, and save every two steps."""
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(32, 32)
    if in_ddp:
        model = DistributedDataParallel(model, find_unused_parameters=True)  # no buckets are rebuilt
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Checkpointer(folder, model=model, optimizer=optimizer, events=Events(), every=2) as checkpoints:
        for step in range(checkpoints.restore() + 1, steps + 1):
            inputs = torch.randn(
                16, 32, generator=torch.Generator().manual_seed(step)
            )  # equal on every rank, however many
            optimizer.zero_grad()
            (model(inputs) - inputs).square().mean().backward()
            optimizer.step()
            checkpoints.step(step)


if __name__ == "__main__":
    main()
