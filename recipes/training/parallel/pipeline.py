"""Layouts in which ranks hold different layers: torch's pipelining, one stage per rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from ckpt.errors import ConfigurationError
from ckpt.ranks.topology import Topology
from ckpt.state.abilities import tied_names
from recipes.training.model import Step, member, pair_of
from recipes.training.parallel.base import Arranged, Backward, Layout, backward_of
from recipes.training.parallel.gradients import sum_gradients


class _Pipelined(Layout):
    """A layout with a pipeline. A batch passes through it in micro-batches, one forward and one backward in turn (1F1B)."""

    needs = ("keep_stage", "stages")

    def __init__(self, microbatches: int | None, stages: Callable[..., None] | None, **sizes: int | None) -> None:
        super().__init__(**sizes)
        self.stages = stages
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
        pp, layers = self.sizes(num_ranks)["pp"], len(member(model, "blocks"))
        if layers and pp > layers:
            raise ConfigurationError(
                f"parallel.pp={pp} asks for more stages than the model has layers, {layers}: give parallel.pp={layers} or fewer"
            )

    def keep_stage(self, model: nn.Module, number: int, count: int) -> None:
        """Delete all of a model but one stage, as `parallel.stages` or the model itself does it."""
        if self.stages is not None:
            self.stages(model, number, count)
        else:
            model.keep_stage(number, count)  # type: ignore[operator]

    def _arrange(self, step: Step, topology: Topology, device: torch.device) -> Arranged:
        model = step.model
        if step.loss is None:
            raise ConfigurationError(
                f"parallel={self.name} passes outputs to the last stage, so {type(model).__name__}.train_step cannot compute the loss "
                "there: give the model a method loss(output, target)"
            )
        rank, num_ranks = topology.rank, topology.world_size
        # Every rank makes all instances of a group, in the same order, and gets its own.
        groups = {axis: dist.new_subgroups_by_enumeration(self.instances(axis, num_ranks))[0] for axis in self.axes}
        pp = dist.get_world_size(groups["pp"])
        if pp == 1:
            passes = backward_of(step)
            tie = None
        else:
            # The group of this pipeline's first and last stage; None on a rank with another one.
            ends = [[pipeline[0], pipeline[-1]] for pipeline in self.instances("pp", num_ranks)]
            tie = dist.new_subgroups_by_enumeration(ends)[0] if tied_names(model) else None
            number = self.position(rank, num_ranks)["pp"]
            self.keep_stage(model, number, pp)
            stage = PipelineStage(model, number, pp, device, group=groups["pp"])
            passes = _backward_of_stage(stage, self.num_microbatches(num_ranks), step.loss)

        def backward(batch: Any) -> torch.Tensor | None:
            loss = passes(batch)
            if tie is not None:  # such as the embedding of the first stage, and the head of the last one
                sum_gradients(_tied(model), tie)
            if "dp" in groups:
                sum_gradients(model.parameters(), groups["dp"], mean=True)
            return loss

        return Arranged(model, backward)


class Pipeline(_Pipelined):
    """Each rank holds some of the layers.

    Args:
        pp: number of stages; None: one for each rank.
        microbatches: number of parts of a batch; None: the number of stages.
        stages: (model, number, count): delete all but one stage; None: the model does, by `keep_stage`.
    """

    name = "pipeline"
    axes = ("pp",)

    def __init__(
        self, *, pp: int | None = None, microbatches: int | None = None, stages: Callable[..., None] | None = None
    ) -> None:
        super().__init__(microbatches, stages, pp=pp)


class DataParallelPipeline(_Pipelined):
    """Copies of a pipeline, each with its part of a batch. The ranks of one pipeline are neighbours.

    Args:
        dp: number of copies; None: ranks / pp.
        pp: number of stages; None: 2.
        microbatches: number of parts of one copy's rows; None: the number of stages.
        stages: as of `Pipeline`.
    """

    name = "ddp_pipeline"
    axes = ("dp", "pp")
    data_axes = ("dp",)

    def __init__(
        self,
        *,
        dp: int | None = None,
        pp: int | None = None,
        microbatches: int | None = None,
        stages: Callable[..., None] | None = None,
    ) -> None:
        super().__init__(microbatches, stages, dp=dp, pp=pp)


def _tied(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of a stage that are tied to one of another stage, in an order that both have."""
    own = dict(model.named_parameters(remove_duplicate=False))
    return [own[first] if first in own else own[alias] for alias, first in sorted(tied_names(model).items())]


def _backward_of_stage(stage: PipelineStage, microbatches: int, loss: Callable[..., torch.Tensor]) -> Backward:
    """Return the forward and backward passes of one stage, over all micro-batches of a step."""
    schedule = Schedule1F1B(stage, microbatches, loss_fn=loss)

    def backward(batch: Any) -> torch.Tensor | None:
        inputs, target = pair_of(batch)
        if not (isinstance(inputs, torch.Tensor) and isinstance(target, torch.Tensor)):
            raise ConfigurationError(
                f"data: a batch holds a {type(inputs).__name__} and a {type(target).__name__}; expected two tensors, of which a pipeline "
                "makes micro-batches"
            )
        given = (inputs.contiguous(),) if stage.is_first else ()
        if not stage.is_last:
            schedule.step(*given)
            return None
        losses: list[torch.Tensor] = []
        schedule.step(*given, target=target.contiguous(), losses=losses)
        return torch.stack([loss.detach() for loss in losses]).mean()

    return backward
