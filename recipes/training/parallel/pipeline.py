"""Layouts in which ranks hold different layers: torch's pipelining, one stage per rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from ckpt.errors import ConfigurationError
from ckpt.ranks.topology import Topology
from recipes.training.gpt import GPT, next_token_loss
from recipes.training.parallel.base import Arranged, Backward, Layout, backward_of
from recipes.training.parallel.gradients import sum_gradients


class _Pipelined(Layout):
    """A layout with a pipeline. A batch passes through it in micro-batches, one forward and one backward in turn (1F1B)."""

    def __init__(self, microbatches: int | None, **sizes: int | None) -> None:
        super().__init__(**sizes)
        if microbatches is not None and microbatches < 1:
            raise ConfigurationError(f"parallel.microbatches={microbatches}: expected at least 1, or null")
        self.microbatches = microbatches

    def num_microbatches(self, num_ranks: int) -> int:
        """The number of micro-batches of a rank's rows: by default the number of stages."""
        return self.microbatches or self.sizes(num_ranks)["pp"]

    def num_parts(self, num_ranks: int) -> int:
        return super().num_parts(num_ranks) * self.num_microbatches(num_ranks)

    def fit(self, model: nn.Module, num_ranks: int) -> None:
        super().fit(model, num_ranks)
        assert isinstance(model, GPT)
        pp, layers = self.sizes(num_ranks)["pp"], model.size.layers
        if pp > layers:
            raise ConfigurationError(
                f"parallel.pp={pp} asks for more stages than the model has layers, {layers}: give parallel.pp={layers} or fewer"
            )

    def _arrange(self, model: GPT, topology: Topology, device: torch.device) -> Arranged:
        rank, num_ranks = topology.rank, topology.world_size
        # Every rank makes all instances of a group, in the same order, and gets its own.
        groups = {axis: dist.new_subgroups_by_enumeration(self.instances(axis, num_ranks))[0] for axis in self.axes}
        pp = dist.get_world_size(groups["pp"])
        if pp == 1:
            passes = backward_of(model)
            tie = None
        else:
            # The group of this pipeline's first and last stage; None on a rank with another one.
            ends = [[pipeline[0], pipeline[-1]] for pipeline in self.instances("pp", num_ranks)]
            tie = dist.new_subgroups_by_enumeration(ends)[0] if model.tied_names else None
            number = self.position(rank, num_ranks)["pp"]
            model.keep_stage(number, pp)
            stage = PipelineStage(model, number, pp, device, group=groups["pp"])
            passes = _backward_of_stage(stage, self.num_microbatches(num_ranks))

        def backward(rows: torch.Tensor) -> torch.Tensor | None:
            loss = passes(rows)
            if tie is not None:  # the embedding of the first stage, the head of the last one
                end = model.wte if model.wte is not None else model.lm_head
                sum_gradients([end.weight], tie)
            if "dp" in groups:
                sum_gradients(model.parameters(), groups["dp"], mean=True)
            return loss

        return Arranged(model, backward)


class Pipeline(_Pipelined):
    """Each rank holds some of the layers.

    Args:
        pp: number of stages; None: one for each rank.
        microbatches: number of parts of a batch; None: the number of stages.
    """

    name = "pipeline"
    axes = ("pp",)

    def __init__(self, *, pp: int | None = None, microbatches: int | None = None) -> None:
        super().__init__(microbatches, pp=pp)


class DataParallelPipeline(_Pipelined):
    """Copies of a pipeline, each with its part of a batch. The ranks of one pipeline are neighbours.

    Args:
        dp: number of copies; None: ranks / pp.
        pp: number of stages; None: 2.
        microbatches: number of parts of one copy's rows; None: the number of stages.
    """

    name = "ddp_pipeline"
    axes = ("dp", "pp")
    data_axes = ("dp",)

    def __init__(self, *, dp: int | None = None, pp: int | None = None, microbatches: int | None = None) -> None:
        super().__init__(microbatches, dp=dp, pp=pp)


def _backward_of_stage(stage: PipelineStage, microbatches: int) -> Backward:
    """Return the forward and backward passes of one stage, over all micro-batches of a step."""
    schedule = Schedule1F1B(stage, microbatches, loss_fn=next_token_loss)

    def backward(rows: torch.Tensor) -> torch.Tensor | None:
        inputs = (rows[:, :-1].contiguous(),) if stage.is_first else ()
        if not stage.is_last:
            schedule.step(*inputs)
            return None
        losses: list[torch.Tensor] = []
        schedule.step(*inputs, target=rows[:, 1:].contiguous(), losses=losses)
        return torch.stack([loss.detach() for loss in losses]).mean()

    return backward
