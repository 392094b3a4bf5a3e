"""A checkpoint that several ranks wrote is verified by one process, through all of their indexes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckpt import StateComponent
from ckpt.catalog.verify import examine, verify_checkpoint
from ckpt.format.manifest import MANIFEST_NAME
from ckpt.format.stored import read_manifest
from ckpt.ranks.topology import Topology
from tests.ranks import run_ranks
from tests.states import BACKENDS, Held, coordinator


@pytest.mark.parametrize("backend", BACKENDS)
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
