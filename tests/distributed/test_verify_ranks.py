"""A checkpoint that several ranks wrote is verified by one process, through all of their indexes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckpt import StateComponent
from ckpt.catalog.verify import examine, verify_checkpoint
from ckpt.errors import CheckpointError
from ckpt.format.manifest import MANIFEST_NAME
from ckpt.loading.direct import DirectLoad, DirectReading
from ckpt.loading.loader import Loader
from ckpt.loading.sources import CommittedSource
from ckpt.loading.strategy import ReadStats
from ckpt.ranks.topology import Topology
from ckpt.storage import extents
from ckpt.storage.stored import read_manifest
from tests.support.async_runs import until
from tests.support.covering import sampled
from tests.support.ranks import run_ranks
from tests.support.states import BACKENDS, Held, coordinator, cpu


@sampled("backend", BACKENDS)
def test_damage_to_any_file_of_any_rank_is_named(tmp_path: Path, backend: str) -> None:
    paths = run_ranks(3, _save, tmp_path, backend)
    checkpoint = Path(paths[0])
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    found = examine(checkpoint)
    assert (found.problems, found.num_files) == ([], len(files))
    assert read_manifest(checkpoint).index_ranks() == [0, 1, 2]
    for path in files:
        saved = path.read_bytes()
        path.write_bytes(saved[:-1] + bytes([saved[-1] ^ 1]))
        problems = verify_checkpoint(checkpoint)
        path.write_bytes(saved)
        assert len(problems) == 1, (path, problems)
        assert str(path.relative_to(checkpoint)) in problems[0]
    for path in files:
        if path.name != MANIFEST_NAME:
            saved = path.read_bytes()
            path.unlink()
            problems = verify_checkpoint(checkpoint)
            path.write_bytes(saved)
            assert len(problems) == 1, (path, problems)
            assert f"{path.relative_to(checkpoint)} is missing" in problems[0]


def _save(topology: Topology, root: Path, backend: str) -> str:
    model = {f"w{number}": torch.arange(20_000, dtype=torch.float32) + number for number in range(6)}
    rng = {"seed": topology.rank, "bits": torch.arange(5) + topology.rank}
    components = [
        StateComponent("model", Held(model | {"small": torch.arange(9)}), "replicated"),
        StateComponent("rng", Held(rng), "per_rank"),
    ]
    return coordinator(topology, root, components, backend=backend).save_checkpoint(checkpoint_id="1")


def test_a_host_hashes_each_byte_once_and_damage_still_fails_every_rank(tmp_path: Path) -> None:
    """Rank 0 reads first: the others find its marks, and hash nothing but what it has refused."""
    hashed, failures = zip(*run_ranks(3, _load_one_after_the_other, tmp_path), strict=True)
    # A kernel that is short of memory may have dropped a page that rank 0 has read: its block is hashed once more.
    assert sum(hashed[0]) >= 480_000 and sum(map(sum, hashed[1:])) < 480_000 / 2, hashed
    assert all("are not those that were saved" in failure for failure in failures), failures


def _load_one_after_the_other(topology: Topology, root: Path) -> tuple[list[int], str]:
    _save(topology, root, "zarr")
    sizes: list[int] = []

    class Counting(extents.BlockDigests):
        def update(self, piece: memoryview) -> None:
            sizes.append(len(piece))
            super().update(piece)

    run = DirectReading.run

    def after_the_lead(reading: DirectReading) -> ReadStats:
        try:
            if not topology.is_lead:
                until((root / f"read-{number}").exists)
            return run(reading)
        finally:
            if topology.is_lead:
                (root / f"read-{number}").touch()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extents, "BlockDigests", Counting)
        patch.setattr(DirectReading, "run", after_the_lead)
        number = 1
        state = {f"w{number}": torch.zeros(20_000) for number in range(6)} | {"small": torch.zeros(9, dtype=torch.int64)}
        components = [StateComponent("model", Held(state), "replicated")]
        one = coordinator(topology, root, components)
        one.load_checkpoint(leave_out=["rng"])
        assert all(torch.equal(state[f"w{n}"], torch.arange(20_000, dtype=torch.float32) + n) for n in range(6))
        of_the_load = list(sizes)
        number = 2
        if topology.is_lead:
            file = next((root / "checkpoint-1" / "model").rglob("w3/c/0"))
            data = bytearray(file.read_bytes())
            data[70_000] ^= 1
            file.write_bytes(data)
        with pytest.raises(CheckpointError) as failure:
            one.load_checkpoint(root / "checkpoint-1", leave_out=["rng"])
    return of_the_load, str(failure.value)


def test_ranks_that_load_share_what_they_have_checked_and_ranks_that_convert_do_not(tmp_path: Path) -> None:
    """A conversion drops what it has read from the page cache, so another rank may read other bytes from the disk."""
    assert run_ranks(2, _tables, tmp_path) == [(True, False)] * 2


def _tables(topology: Topology, root: Path) -> tuple[bool, bool]:
    path = Path(_save(topology, root, "zarr"))
    loader = Loader((), topology, DirectLoad(), cpu(), verify=True, allow_pickle=False)
    sources = (loader._open(path, may_be_old=False, share_checks=True), loader.open(path))
    found = [one._checkpoint.checked is not None for one in sources if isinstance(one, CommittedSource)]
    return found[0], found[1]
