"""Data types: torch's, their Zarr v3 names, and their bits. Also the test for DTensors."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch

from ckpt.errors import ConfigurationError, CorruptCheckpointError

STORABLE: tuple[torch.dtype, ...] = (
    torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.float16, torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.complex32, torch.complex64, torch.complex128,
)  # fmt: skip
"""Data types that a checkpoint can hold."""
_ZARR_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in STORABLE}
"""torch and Zarr have the same names for them."""
_TORCH_DTYPES = {name: dtype for dtype, name in _ZARR_NAMES.items()}
AS_INTEGERS = {"float4_e2m1fn_x2": "uint8", "complex32": "uint32"}
"""Types that Zarr's libraries lack: their arrays are described as unsigned integers of the same size."""
_WITHOUT_PLACEMENTS = frozenset((torch.Tensor, torch.nn.Parameter))
_SAME_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def zarr_name(dtype: torch.dtype) -> str:
    """Return the name under which arrays of `dtype` are stored: Zarr v3's own, or the zarr-extensions registry's.

    Raises:
        ConfigurationError: no stored form keeps this type bit for bit, such as a quantised one.
    """
    try:
        return _ZARR_NAMES[dtype]
    except KeyError:
        raise ConfigurationError(
            f"tensors of {dtype} cannot be saved; the types that can are {', '.join(_TORCH_DTYPES)}. Save another "
            "view of the bits, such as tensor.view(torch.uint8), or the dequantised values."
        ) from None


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch type of arrays stored under `name`.

    Raises:
        CorruptCheckpointError: a checkpoint names a type that this version cannot hold.
    """
    try:
        return _TORCH_DTYPES[name]
    except KeyError:
        raise CorruptCheckpointError(
            f"the checkpoint holds an array of data type {name!r}; this version of torch and of ckpt knows "
            f"{', '.join(_TORCH_DTYPES)}"
        ) from None


def is_known(name: str) -> bool:
    """Whether there are tensors of the type that is stored under `name`."""
    return name in _TORCH_DTYPES


def item_bytes(name: str) -> int:
    """Return the bytes of one element stored under `name`."""
    return torch_dtype(name).itemsize


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor detached, C-contiguous, with conjugation and negation resolved; no copy where none is needed."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor viewed as integers of its element size, where torch has them, so that copies keep every bit.

    Copy kernels of some devices change NaN payloads, and lack kernels for some types.
    """
    size = tensor.element_size()
    return tensor.view(_SAME_BITS[size]) if size in _SAME_BITS and size <= 8 else tensor


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a C-contiguous tensor as a flat uint8 tensor over the same memory."""
    # Not view(-1): torch keeps any stride of a single element, and then cannot view it as bytes.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def real_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as float64; of a complex type, or of float4, in pairs: one more dimension."""
    if tensor.dtype is torch.float4_e2m1fn_x2:  # which torch does not convert
        bits = tensor.view(torch.uint8).int()
        return torch.tensor(_FLOAT4, dtype=torch.float64, device=tensor.device)[torch.stack([bits & 15, bits >> 4], -1)]
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).to(torch.float64)


_FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of float4_e2m1fn, of which a byte holds two, the lower half first."""


def bits_of(host: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the memory of a host tensor, of any strides, as a NumPy array of plain numbers of the same size.

    NumPy lacks bfloat16 and float8, but moves numbers of their size bit for bit.
    """
    plain = host.detach() if host.requires_grad else host
    return plain.view(_SAME_BITS[plain.element_size()]).numpy()


def are_castable(saved: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether values may be converted: both are floating-point types; others would lose what they count, and torch converts no float4."""
    packed = torch.float4_e2m1fn_x2
    return saved.is_floating_point and wanted.is_floating_point and packed not in (saved, wanted)


def is_dtensor(tensor: object) -> bool:
    """Whether a tensor is a DTensor, or has placements like one. Does not import torch.distributed.tensor."""
    if type(tensor) in _WITHOUT_PLACEMENTS:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    if module is not None and type(tensor) is module.DTensor:
        return True
    return isinstance(tensor, torch.Tensor) and hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")
