"""Saves onto disks that are nearly full: what fits is saved, and what does not is refused with both numbers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import StateComponent
from ckpt.backends.kimi_engine import KimiEngineBackend
from ckpt.backends.tensorstore import TensorStoreBackend
from ckpt.backends.zarr import ZarrBackend
from ckpt.errors import StorageError
from ckpt.ranks.topology import Topology
from tests.states import Held, coordinator

BACKENDS = {
    "zarr": ZarrBackend,
    "kimi-engine": KimiEngineBackend,
    "tensorstore": TensorStoreBackend,
    "tensorstore files": lambda: TensorStoreBackend(kvstore="file"),
}


@pytest.fixture(params=["ext4", "tmpfs"])
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


def _save(disk: Path, backend: Any, num_bytes: int, id: str) -> None:
    state = StateComponent("model", Held({"w": torch.arange(num_bytes // 8)}), "global")
    with_backend = coordinator(Topology.alone(), disk, [state], backend=backend)
    try:
        with_backend.save_checkpoint(checkpoint_id=id)
    finally:
        with_backend.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_save_that_fits_is_saved_and_one_that_does_not_says_how_much_it_needs_and_what_is_free(
    disk: Path, backend: str
) -> None:
    """OCDBT's files reserve space ahead; on ext4 a reservation that is refused keeps all there is."""
    made = BACKENDS[backend]()
    _save(disk, made, 2 << 20, "1")
    before = _free(disk)
    with pytest.raises(StorageError) as caught:
        _save(disk, made, 80 << 20, "2")
    said = re.search(
        r"No space left on device: '.*' \(([0-9,]+) bytes are needed for the share of rank 0, ([0-9,]+) bytes are free\)$",
        str(caught.value),
    )
    assert said is not None, str(caught.value)
    needed, free = (int(number.replace(",", "")) for number in said.groups())
    assert 80 << 20 <= needed < 81 << 20
    assert free < before
    _save(disk, made, 2 << 20, "3")
    assert sorted(path.name for path in disk.glob("checkpoint*")) == ["checkpoint-1", "checkpoint-3"]
    assert _free(disk) >= before - (4 << 20)
