"""How layouts cut inside `Net`. The model could have these as methods, `tensor_plan` and `keep_stage`."""

from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from own_project.model import Net


def tensor_plan() -> dict[str, ParallelStyle]:
    """For `parallel=ddp_tp` and `tp_fsdp`: each block is cut by columns, then by rows. Every rank holds the other layers whole."""
    return {"blocks.*.widen": ColwiseParallel(), "blocks.*.narrow": RowwiseParallel()}


def keep_stage(model: Net, number: int, count: int) -> None:
    """For `parallel=pipeline` and `ddp_pipeline`: each stage has some of the blocks, the first and the last also the ends."""
    for at in range(len(model.blocks)):
        if at * count // len(model.blocks) != number:
            model.blocks[at] = nn.Identity()
    if number > 0:
        model.enter = nn.Identity()
    if number < count - 1:
        model.leave = nn.Identity()
