"""Data parallelism by Hugging Face Accelerate."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs

from ckpt.errors import ConfigurationError, private_name
from ckpt.ranks.topology import Topology
from recipes.support.ranks import environment_with
from recipes.training.model import Step
from recipes.training.parallel.base import Arranged
from recipes.training.parallel.replicated import DataParallel, ModelInDDP, WithOneUnused


class Accelerated(DataParallel):
    """`parallel=ddp` by Accelerate: `Accelerator.prepare` wraps model and optimizer, `Accelerator.backward` computes gradients.

    Accelerate keeps one state of the ranks per process; a new job resets it.
    """

    name = "accelerate"

    def _arrange(self, step: Step, topology: Topology, device: torch.device) -> Arranged:
        accelerator = self._accelerator(topology, device)
        if accelerator.num_processes != topology.world_size:
            raise ConfigurationError(
                f"parallel=accelerate: Accelerate found {accelerator.num_processes} ranks, not {topology.world_size}; choose parallel=ddp, "
                "or unset ACCELERATE_ variables"
            )
        wrapped = accelerator.prepare(WithOneUnused(step) if self.exact_resume else step)

        def backward(batch: Any) -> torch.Tensor:
            loss = wrapped(batch)
            accelerator.backward(loss)
            return loss.detach()

        return Arranged(step.model, backward, accelerator.prepare_optimizer, ModelInDDP)

    def _accelerator(self, topology: Topology, device: torch.device) -> Accelerator:
        """Make an accelerator on the existing process group. It reads ranks from the environment, which is set for the call."""
        neighbours = topology.nodes[topology.node_rank]
        ranks = {"RANK": topology.rank, "WORLD_SIZE": topology.world_size}
        ranks |= {"LOCAL_RANK": topology.local_rank, "LOCAL_WORLD_SIZE": len(neighbours)}
        reset = private_name("accelerate.state", "AcceleratorState._reset_state", "train twice in one process")
        reset(reset_partial_state=True)
        handlers = [DistributedDataParallelKwargs(find_unused_parameters=True)] if self.exact_resume else []
        with environment_with({name: str(number) for name, number in ranks.items()}):
            return Accelerator(cpu=device.type == "cpu", kwargs_handlers=handlers)
