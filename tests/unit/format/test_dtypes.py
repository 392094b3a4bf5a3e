"""The table of data types, and the bits of tensors."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from ckpt.backends.zarr import described_as
from ckpt.errors import ConfigurationError, CorruptCheckpointError
from ckpt.format.dtypes import bits_of, item_bytes, raw_bytes, torch_dtype, zarr_name
from tests.support.covering import sampled
from tests.support.states import ALL_DTYPES, random_bits


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_a_type_comes_back_from_its_name_with_its_size(dtype: torch.dtype) -> None:
    assert torch_dtype(zarr_name(dtype)) is dtype
    described = described_as(zarr_name(dtype))
    assert item_bytes(zarr_name(dtype)) == dtype.itemsize == np.dtype(getattr(ml_dtypes, described, described)).itemsize


@pytest.mark.parametrize("dtype", [torch.bits8, torch.qint8, torch.uint4], ids=str)
def test_a_type_that_cannot_be_stored_is_refused_with_those_that_can(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigurationError, match=f"tensors of {dtype} cannot be saved; .*bfloat16"):
        zarr_name(dtype)


def test_a_name_that_a_checkpoint_invents_is_refused() -> None:
    with pytest.raises(CorruptCheckpointError, match="data type 'float7'"):
        torch_dtype("float7")


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@sampled("shape", [(3, 2), (0, 4), (), (0,)], 2)
def test_the_bytes_of_a_tensor_are_its_own_memory(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = random_bits(shape, dtype, 0)
    flat = raw_bytes(tensor)
    assert flat.shape == (tensor.nbytes,) and flat.data_ptr() == tensor.data_ptr()
    assert bits_of(tensor).tobytes() == flat.numpy().tobytes()
    assert bits_of(tensor).shape == shape


def test_the_bits_of_a_strided_tensor_that_requires_grad_can_be_written() -> None:
    tensor = torch.zeros(4, 6, dtype=torch.bfloat16, requires_grad=True)
    bits_of(tensor.T[::2])[...] = 0x3F80  # 1.0
    assert tensor.tolist() == [[1, 0, 1, 0, 1, 0]] * 4
