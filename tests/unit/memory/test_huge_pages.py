"""Host memory given out in arenas: tensors that do not touch each other, and memory that goes with the last of them."""

from __future__ import annotations

import gc
import itertools
import weakref

import torch

from ckpt.memory.host import ARENA_BYTES, HostMemory


def test_tensors_of_one_arena_hold_their_own_values_and_their_own_storage() -> None:
    memory = HostMemory()
    shapes = [(3, 5), (), (7,), (2, 0), (1000, 33), (1,)]
    dtypes = [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.float64, torch.complex128]
    tensors = [memory.empty(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    for number, (tensor, shape, dtype) in enumerate(zip(tensors, shapes, dtypes, strict=True)):
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
        assert torch.equal(tensor, torch.full(shape, number, dtype=dtype))
        assert tensor.is_contiguous() and tensor.data_ptr() % 64 == 0
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_a_large_tensor_has_memory_of_its_own_and_an_arena_that_is_full_is_followed_by_another() -> None:
    memory = HostMemory()
    large = memory.empty((ARENA_BYTES // 2,), torch.uint8)
    some = [memory.empty((ARENA_BYTES // 3,), torch.uint8) for _ in range(4)]
    for number, tensor in enumerate([large, *some]):
        tensor.fill_(number)
    assert [int(tensor[-1]) for tensor in [large, *some]] == [0, 1, 2, 3, 4]
    starts = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in [large, *some])
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(starts))


def test_an_arena_is_freed_with_the_last_of_its_tensors() -> None:
    memory = HostMemory()
    one, other = memory.empty((10,), torch.float32), memory.empty((10,), torch.float32)
    assert memory._arena is not None
    mapped = weakref.ref(memory._arena)
    one.fill_(1.0)
    other.fill_(2.0)
    del memory, one
    gc.collect()
    assert mapped() is not None and float(other.sum()) == 20.0
    del other
    gc.collect()
    assert mapped() is None
