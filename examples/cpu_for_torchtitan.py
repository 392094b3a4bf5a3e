"""Lets torchtitan 0.3, which is made for accelerators, train on a CPU with torch 2.13. Import it before torchtitan's trainer."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools import utils

_FIGURES = {
    "current_device": int,
    "empty_cache": int,
    "get_device_name": str,
    "get_device_properties": lambda _: SimpleNamespace(total_memory=1),
    "memory_stats": lambda _: {},
    "reset_peak_memory_stats": int,
}
"""Functions that a device has, and `torch.cpu` has not."""

utils.device_type, utils.device_module = "cpu", SimpleNamespace(**(vars(torch.cpu) | _FIGURES))
if not hasattr(dist, "set_timeout"):  # a later torch has it
    dist.set_timeout = _set_pg_timeout


def sum_gradients(model: torch.nn.Module) -> None:
    """Let FSDP add gradients without a factor, which gloo cannot apply."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
