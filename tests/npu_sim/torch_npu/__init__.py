"""A test stand-in for torch_npu: the same import name and the same torch.npu, on memory of the host.

It is found as the real one is: beside this package lies a dist-info folder with a `torch.backends` entry point, so with the
folder of both on PYTHONPATH a plain `import torch` loads it. Nothing in the code under test refers to it.
"""

from __future__ import annotations

import importlib.util
import sys
from multiprocessing.reduction import ForkingPickler
from types import ModuleType
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing.reductions as _reductions

IS_STAND_IN = True


def _load() -> ModuleType:
    from npu_sim_build import build

    spec = importlib.util.spec_from_file_location("npu_sim_c", build())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["npu_sim_c"] = module
    return module


_C = _load()
torch.utils.rename_privateuse1_backend("npu")

from torch_npu import npu  # noqa: E402  it needs what is loaded above

torch._register_device_module("npu", npu)
torch.utils.generate_methods_for_privateuse1_backend(
    for_tensor=True, for_module=True, for_packed_sequence=True, for_storage=True
)


def _hccl(options: Any, _backend_options: object) -> Any:
    gloo = torch.distributed.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)
    return _C.hccl(gloo)


torch.distributed.Backend.register_backend("hccl", _hccl, extended_api=True, devices=["npu"])


def rebuild_npu_tensor(
    pid: int,
    fd: int,
    num_bytes: int,
    offset: int,
    dtype: torch.dtype,
    size: tuple[int, ...],
    device_index: int,
    stride: tuple[int, ...],
    requires_grad: bool,
) -> torch.Tensor:
    """Open the memory of another process as a tensor.

    Element 6 of the arguments is the device, where checkpoint-engine writes the receiver's own.
    """
    memory = _C.import_handle(pid, fd, num_bytes, device_index).untyped_storage()
    tensor = torch.empty(0, dtype=dtype, device=f"npu:{device_index}")
    return tensor.set_(memory, offset // dtype.itemsize, size, stride).requires_grad_(requires_grad)


_reduce_others = _reductions.reduce_tensor


def _reduce_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.device.type != "npu":
        return _reduce_others(tensor)
    pid, fd, num_bytes, offset = _C.export_handle(tensor.detach())
    place = (tensor.device.index, tensor.stride(), tensor.requires_grad)
    return rebuild_npu_tensor, (pid, fd, num_bytes, offset, tensor.dtype, tuple(tensor.size()), *place)


_reductions.reduce_tensor = _reduce_tensor
for _kind in (torch.Tensor, torch.nn.Parameter):
    ForkingPickler.register(_kind, _reduce_tensor)


def _autoload() -> None:
    """What the entry point calls; to import the package has done it all."""
