"""Data parallelism as Hugging Face Accelerate arranges it."""

from __future__ import annotations

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState

from ckpt.errors import ConfigurationError
from ckpt.ranks.topology import Topology
from recipes.support.ranks import environment_with
from recipes.training.gpt import GPT, next_token_loss
from recipes.training.parallel.base import Arranged, Backward
from recipes.training.parallel.replicated import DataParallel, WithOneUnused


class Accelerated(DataParallel):
    """The same as `parallel=ddp`, by Accelerate: `Accelerator.prepare` wraps model and optimizer, its `backward` runs.

    Accelerate keeps what it knows of the ranks in one place per process; a new job begins with it empty.
    """

    name = "accelerate"

    def arrange(self, model: GPT, topology: Topology, device: torch.device) -> Arranged:
        accelerator = self._accelerator(topology, device)
        if accelerator.num_processes != topology.world_size:
            raise ConfigurationError(
                f"parallel=accelerate: Accelerate found {accelerator.num_processes} ranks where there are "
                f"{topology.world_size}; choose parallel=ddp, or look for ACCELERATE_ variables in the environment"
            )
        one_unused = self.exact_resume and topology.world_size > 1
        wrapped = accelerator.prepare(WithOneUnused(model) if one_unused else model)
        return Arranged(model, _backward(accelerator, wrapped), accelerator.prepare_optimizer)

    def _accelerator(self, topology: Topology, device: torch.device) -> Accelerator:
        """Make it on the process group that exists. It asks the environment about the ranks, also where they know it."""
        neighbours = topology.nodes[topology.node_rank]
        ranks = {"RANK": topology.rank, "WORLD_SIZE": topology.world_size}
        ranks |= {"LOCAL_RANK": topology.local_rank, "LOCAL_WORLD_SIZE": len(neighbours)}
        AcceleratorState._reset_state(reset_partial_state=True)
        handlers = [DistributedDataParallelKwargs(find_unused_parameters=True)] if self.exact_resume else []
        with environment_with({name: str(number) for name, number in ranks.items()}):
            return Accelerator(cpu=device.type == "cpu", kwargs_handlers=handlers)


def _backward(accelerator: Accelerator, wrapped: torch.nn.Module) -> Backward:
    def backward(rows: torch.Tensor) -> torch.Tensor:
        loss = next_token_loss(wrapped(rows[:, :-1]), rows[:, 1:])
        accelerator.backward(loss)
        return loss.detach()

    return backward
