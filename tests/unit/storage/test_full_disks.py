"""Saves onto disks that are nearly full: what fits is saved, and what does not is refused with both numbers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import StateComponent, dist_checkpointing
from ckpt.backends.kimi_engine import KimiEngineBackend
from ckpt.backends.tensorstore import TensorStoreBackend
from ckpt.backends.zarr import ZarrBackend
from ckpt.catalog.verify import verify_checkpoint
from ckpt.dist_checkpointing import ShardedTensor
from ckpt.errors import StorageError
from ckpt.ranks.topology import Topology
from tests.support.covering import sampled
from tests.support.states import Held, coordinator

BACKENDS = {
    "zarr": ZarrBackend,
    "kimi-engine": KimiEngineBackend,
    "tensorstore": TensorStoreBackend,
    "tensorstore files": lambda: TensorStoreBackend(kvstore="file"),
}


@pytest.fixture(params=["tmpfs", pytest.param("ext4", marks=pytest.mark.full)])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 MiB; skips where none may be mounted."""
    folder, image = tmp_path / "disk", tmp_path / "image"
    folder.mkdir()
    commands = [["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]]
    if request.param == "ext4":
        with image.open("wb") as file:
            file.truncate(64 << 20)
        commands = [
            ["mkfs.ext4", "-q", "-F", "-m", "0", str(image)],
            ["mount", "-o", "loop", str(image), str(folder)],
        ]
    for command in commands:
        if shutil.which(command[0]) is None or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip(f"{' '.join(command)} is not permitted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def _free(disk: Path) -> int:
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize


def _fill(disk: Path, but: int) -> Path:
    """Fill a disk but for so many bytes; return the file."""
    with (disk / "fill").open("wb") as file, suppress(OSError):  # ext4 refuses all of it, and keeps what there was
        os.posix_fallocate(file.fileno(), 0, max(1, _free(disk) - but))
    return disk / "fill"


def _save(disk: Path, backend: Any, num_bytes: int, id: str) -> None:
    state = StateComponent("model", Held({"w": torch.arange(num_bytes // 8)}), "global")
    with_backend = coordinator(Topology.alone(), disk, [state], backend=backend)
    try:
        with_backend.save_checkpoint(checkpoint_id=id)
    finally:
        with_backend.close()


@sampled("backend", BACKENDS, 3)
def test_a_save_that_does_not_fit_says_how_much_it_needs_and_what_is_free(disk: Path, backend: str) -> None:
    """OCDBT's files reserve space ahead; on ext4 a reservation that is refused keeps all there is."""
    made = BACKENDS[backend]()
    _save(disk, made, 2 << 20, "1")
    before = _free(disk)
    with pytest.raises(StorageError) as caught:
        _save(disk, made, 80 << 20, "2")
    said = re.search(
        r"No space left on device: '.*' \(([0-9,]+) bytes are needed for the part of rank 0, ([0-9,]+) bytes were free before\)$",
        str(caught.value),
    )
    assert said is not None, str(caught.value)
    needed, free = (int(number.replace(",", "")) for number in said.groups())
    assert 80 << 20 <= needed < 81 << 20
    assert before - (1 << 20) < free <= before
    _save(disk, made, 2 << 20, "3")
    assert sorted(path.name for path in disk.glob("checkpoint*")) == ["checkpoint-1", "checkpoint-3"]
    assert _free(disk) >= before - (4 << 20)


@sampled("backend", ["zarr", "tensorstore"])
def test_wherever_a_save_meets_a_full_disk_it_says_both_numbers(disk: Path, backend: str) -> None:
    _save(disk, BACKENDS[backend](), 2 << 20, "1")
    before, outcomes = sorted(path for path in disk.rglob("*") if ".owner." not in path.name), set()
    for but in (0, 4096, 8192, 16384, 100_000, (2 << 20) + 8192, (2 << 20) + 16384):
        fill = _fill(disk, but)
        try:
            _save(disk, BACKENDS[backend](), 2 << 20, "2")
        except StorageError as error:
            outcomes.add(re.sub("[0-9a-f]{8,}", "...", str(error)).partition(" (")[0])
            assert re.search(
                r"\([0-9,]+ bytes( and metadata)? are needed for .*, [0-9,]+ bytes (were free before|are free)\)$",
                str(error),
            )
            assert "choose another folder" not in str(error)
        else:
            shutil.rmtree(disk / "checkpoint-2")
        fill.unlink()
        assert sorted(path for path in disk.rglob("*") if ".owner." not in path.name) == before
    assert len(outcomes) > 1


def test_wherever_a_save_into_a_folder_meets_a_full_disk_it_says_both_numbers(disk: Path) -> None:
    folder = disk / "it"
    folder.mkdir()
    tensors = {f"w{n}": ShardedTensor.from_rank_offsets(f"w{n}", torch.ones(4000)) for n in range(10)}
    for but in (0, 4096, 20_000, 60_000):
        fill = _fill(disk, but)
        with pytest.raises(StorageError) as caught:
            dist_checkpointing.save(tensors, folder)
        assert re.search(
            r"\([0-9,]+ bytes( and metadata)? are needed for .*, [0-9,]+ bytes were free before\)$", str(caught.value)
        )
        fill.unlink()
    dist_checkpointing.save(tensors, folder)
    assert verify_checkpoint(folder) == []
    fill = _fill(disk, 0)
    with pytest.raises(StorageError, match="bytes are needed for"):
        dist_checkpointing.remove_sharded_tensors(folder, "w1")
    assert verify_checkpoint(folder) == [], "nothing is left of the attempt"
