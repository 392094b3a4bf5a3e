"""Host memory that another process can map."""

from __future__ import annotations

import mmap
import os

import pytest
import torch

from ckpt.errors import ConfigurationError
from ckpt.memory import host as module
from ckpt.memory.host import mapped, segment_of, shared_memory

pytestmark = pytest.mark.usefixtures("collected")


def test_shared_memory_is_found_by_address_and_closed_with_its_last_tensor() -> None:
    def num_fds() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = num_fds()
    one, two = shared_memory(1000), shared_memory(3 << 20)
    assert (one.nbytes, two.nbytes, int(one.sum()), one.dtype) == (1000, 3 << 20, 0, torch.uint8)
    part = two[4096:8192].view(torch.float32).view(32, 32)
    first, second = segment_of(one), segment_of(part)
    assert first is not None and second is not None
    assert first[1] == 0 and second[1] == 4096 and first[0] != second[0]
    assert segment_of(torch.ones(3)) is None and segment_of(part[:0]) is None
    with mmap.mmap(second[0].fd, 3 << 20) as other:
        other[4096:4100] = b"\x00\x00\x80\x3f"
        assert part[0, 0] == 1.0
    fd = second[0].fd
    del two, second
    os.fstat(fd)
    del one, part, first
    with pytest.raises(OSError):
        os.fstat(fd)
    assert num_fds() == before


def test_memory_that_is_mapped_by_its_descriptor_is_the_same_memory() -> None:
    memory = shared_memory(4096)
    found = segment_of(memory)
    assert found is not None
    other = mapped(found[0].fd)
    memory.fill_(7)
    assert other[:4096].eq(7).all()


def test_a_system_without_memfd_create_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "can_be_shared", lambda: False)
    with pytest.raises(ConfigurationError, match="needs Linux, for memfd_create"):
        shared_memory(1)
