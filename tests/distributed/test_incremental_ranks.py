"""Incremental saves by real ranks: shards, copies and packed tensors; what is frozen costs nothing, and a resume goes on so."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import zarr
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ckpt import CheckpointCoordinator, StateComponent
from ckpt.catalog.incremental import disk_use
from ckpt.catalog.ledger import Ledger
from ckpt.catalog.verify import verify_checkpoint
from ckpt.errors import CorruptCheckpointError
from ckpt.ranks.topology import Topology
from ckpt.saving.save_settings import SaveSettings
from ckpt.storage.stored import read_index, read_manifest
from tests.support import plain_safetensors
from tests.support.covering import sampled
from tests.support.incremental_saves import bytes_on_disk
from tests.support.ranks import run_ranks
from tests.support.states import Held, coordinator, same_bits

RANKS = 2
ROWS = 480
FROZEN = 9


def linear_layers(step: int) -> dict[str, torch.Tensor]:
    """A model of ten layers, of which the last is trained; the values name the layer and the step."""
    layers: dict[str, torch.Tensor] = {}
    for at in range(FROZEN + 1):
        since = step if at == FROZEN else 0
        layers[f"h.{at}.weight"] = torch.arange(ROWS * 100, dtype=torch.float32).reshape(ROWS, 100) + at + since / 64
        layers[f"h.{at}.bias"] = torch.arange(100, dtype=torch.float32) + at + since / 64  # packed with others
    return layers


def moments(step: int, *, of_all: bool) -> dict[str, torch.Tensor]:
    trained = {
        name: tensor for name, tensor in linear_layers(step).items() if of_all or name.startswith(f"h.{FROZEN}.")
    }
    return {f"state.{name}.{moment}": tensor * (step + 2) for name, tensor in trained.items() for moment in ("m", "v")}


def state_at(step: int, *, all_trained: bool = False, shift: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    """What the whole job holds after a step, gathered; `shift` makes it another model."""
    model = {name: tensor + shift for name, tensor in linear_layers(step).items()}
    return {
        "model": model,
        "optimizer": moments(step, of_all=all_trained),
        "ema": {"frozen": torch.arange(30_000.0), "moving": torch.arange(30_000.0) * step},
    }


def held_by(topology: Topology, state: Mapping[str, Mapping[str, torch.Tensor]]) -> list[StateComponent]:
    """The components of one rank: model and optimizer in shards, as FSDP lays them out; a copy on every rank; one per rank."""
    mesh = init_device_mesh("cpu", (topology.world_size,))
    cut = {
        key: {name: distribute_tensor(tensor.clone(), mesh, [Shard(0)]) for name, tensor in state[key].items()}
        for key in ("model", "optimizer")
    }
    own = {"seed": torch.tensor(topology.rank), "words": torch.arange(20_000) + topology.rank}
    return [
        StateComponent("model", Held(cut["model"]), "sharded"),
        StateComponent("optimizer", Held(cut["optimizer"]), "sharded"),
        StateComponent("ema", Held({name: tensor.clone() for name, tensor in state["ema"].items()}), "replicated"),
        StateComponent("rng", Held(own), "per_rank", required=False),
    ]


def run_of(topology: Topology, root: Path, backend: str, step: int, **options: Any) -> CheckpointCoordinator:
    state = state_at(step, all_trained=options.pop("all_trained", False), shift=options.pop("shift", 0))
    return run_with(held_by(topology, state), topology, root, backend, **options)


def run_with(
    parts: list[StateComponent], topology: Topology, root: Path, backend: str, **options: Any
) -> CheckpointCoordinator:
    saves = SaveSettings(incremental=True, **options.pop("saves", {}))
    return coordinator(topology, root, parts, backend=backend, saves=saves, **options)


def save_steps(
    topology: Topology, root: Path, backend: str, first: int, last: int, options: dict[str, Any]
) -> list[tuple[int, int]]:
    """Save the state of each step; return (bytes, written bytes) of each save."""
    reports = []
    for step in range(first, last + 1):
        run = run_of(topology, root, backend, step, **options)
        run.save_checkpoint(checkpoint_id=str(step))
        assert run.last_save is not None
        reports.append((run.last_save.bytes, run.last_save.written_bytes))
    return reports


def require_state(topology: Topology, root: Path, backend: str, step: int, path: Path | None) -> None:
    """Load into memory that holds something else, and compare every bit of every shard."""
    parts = held_by(topology, state_at(step + 50))
    run = run_with(parts, topology, root, backend)
    run.load_checkpoint(path)
    assert run.last_load is not None and run.last_load.checkpoint_id == str(step)
    for mine, component in zip(parts, held_by(topology, state_at(step)), strict=True):
        for name, tensor in component.stateful.state_dict().items():
            found = mine.stateful.state_dict()[name]
            if isinstance(tensor, DTensor):
                tensor, found = tensor.to_local(), found.to_local()
            assert same_bits(found, tensor), f"{component.key} {name}"


@sampled("backend", ["zarr", "ocdbt", "safetensors"])
def test_frozen_layers_cost_nothing_and_every_checkpoint_stands_alone(tmp_path: Path, backend: str) -> None:
    (reports, _) = run_ranks(RANKS, save_steps, tmp_path, backend, 1, 4, {}, process_group=True)
    whole = tmp_path / "whole"
    (((full, written_in_full),), _) = run_ranks(
        RANKS, save_steps, whole, backend, 1, 1, {"all_trained": True}, process_group=True
    )
    assert written_in_full == full and reports[0][0] == reports[0][1]
    # A safetensors file is linked whole: in the second save what is frozen moves to files of its own.
    for size, written in reports[2 if backend == "safetensors" else 1 :]:
        assert written <= 0.15 * full
        assert size > 2_400_000 > 3 * written
    shutil.rmtree(whole)
    folders = [tmp_path / f"checkpoint-{step}" for step in range(1, 5)]
    assert [verify_checkpoint(folder) for folder in folders] == [[]] * 4
    each, on_disk = disk_use(folders)
    assert (
        on_disk == bytes_on_disk(tmp_path) < each[folders[0]].apparent_bytes + sum(w for _, w in reports[1:]) + 99_999
    )
    for step in (1, 3, 2):
        shutil.rmtree(tmp_path / f"checkpoint-{step}")
        left = [one.path for one in Ledger(tmp_path, run_id="test").committed()]
        assert all(verify_checkpoint(folder) == [] for folder in left)
    run_ranks(RANKS, require_state, tmp_path, backend, 4, None, process_group=True)
    if backend == "safetensors":
        assert same_bits(plain_safetensors.read(folders[3] / "model", "h.3.weight"), state_at(4)["model"]["h.3.weight"])
    elif backend == "zarr":
        group = zarr.open_group(folders[3], mode="r")
        want = state_at(4)["model"]["h.3.weight"]
        assert group["model/h.3.weight"][...].tobytes() == want.numpy().tobytes()


@sampled("backend", ["zarr", "ocdbt", pytest.param("safetensors", marks=pytest.mark.full)])
def test_packed_tensors_that_have_not_changed_are_linked(tmp_path: Path, backend: str) -> None:
    run_ranks(RANKS, save_steps, tmp_path, backend, 1, 2, {"saves": {"incremental_min_live": 0.1}}, process_group=True)
    first, second = (tmp_path / "checkpoint-1", tmp_path / "checkpoint-2")
    shared = 0
    for rank in range(RANKS):
        before, after = (read_index(folder, read_manifest(folder), rank) for folder in (first, second))
        assert before.packed.keys() == after.packed.keys() and before.packed
        for path in after.packed:
            if path.startswith("rng/"):
                extent = after.chunks[path][0]
                assert extent == before.chunks[path][0]
                assert os.path.samefile(first / extent.file, second / extent.file)
                shared += 1
    assert shared == RANKS


@sampled("backend", ["zarr", "ocdbt", pytest.param("safetensors", marks=pytest.mark.full)])
def test_a_resumed_run_goes_on_from_what_it_loaded(tmp_path: Path, backend: str) -> None:
    run_ranks(RANKS, save_steps, tmp_path, backend, 1, 2, {}, process_group=True)
    run_ranks(RANKS, _resume_and_save, tmp_path, backend, process_group=True)
    shutil.rmtree(tmp_path / "checkpoint-1")
    shutil.rmtree(tmp_path / "checkpoint-2")
    assert verify_checkpoint(tmp_path / "checkpoint-3") == []
    run_ranks(RANKS, require_state, tmp_path, backend, 3, None, process_group=True)


def _resume_and_save(topology: Topology, root: Path, backend: str) -> None:
    require_state(topology, root, backend, 2, None)
    ((size, written),) = save_steps(topology, root, backend, 3, 3, {})
    assert written <= 0.3 * size


@sampled(
    ("backend", "before", "after"),
    [("zarr", 2, 1), ("ocdbt", 1, 2), pytest.param("safetensors", 2, 1, marks=pytest.mark.full)],
)
def test_another_number_of_ranks_goes_on_with_whole_checkpoints(
    tmp_path: Path, backend: str, before: int, after: int
) -> None:
    run_ranks(before, save_steps, tmp_path, backend, 1, 2, {}, process_group=True)
    run_ranks(after, save_steps, tmp_path, backend, 3, 4, {}, process_group=True)
    for step in (1, 2, 3):
        assert verify_checkpoint(tmp_path / f"checkpoint-{step + 1}") == []
        shutil.rmtree(tmp_path / f"checkpoint-{step}")
    run_ranks(2, require_state, tmp_path, backend, 4, None, process_group=True)


@pytest.mark.parametrize(
    "backend",
    [pytest.param("zarr", marks=pytest.mark.full), "ocdbt", pytest.param("safetensors", marks=pytest.mark.full)],
)
def test_saves_in_the_background_link_what_was_copied_unchanged(tmp_path: Path, backend: str) -> None:
    saves = {"mode": "async", "when_busy": "queue"}
    (reports, _) = run_ranks(RANKS, _save_in_one_run, tmp_path, backend, 3, {"saves": saves}, process_group=True)
    for size, written in reports[2 if backend == "safetensors" else 1 :]:
        assert written <= 0.3 * size
    for step in (1, 2):
        assert verify_checkpoint(tmp_path / f"checkpoint-{step}") == []
        shutil.rmtree(tmp_path / f"checkpoint-{step}")
    assert verify_checkpoint(tmp_path / "checkpoint-3") == []
    run_ranks(RANKS, require_state, tmp_path, backend, 3, None, process_group=True)


def _save_in_one_run(
    topology: Topology, root: Path, backend: str, steps: int, options: dict[str, Any]
) -> list[tuple[int, int]]:
    """Save some steps of one run, whose tensors change in place as soon as the call has returned."""
    parts = held_by(topology, state_at(1))
    with run_with(parts, topology, root, backend, **options) as run:
        for step in range(1, steps + 1):
            for mine, want in zip(parts, held_by(topology, state_at(step)), strict=True):
                for name, tensor in want.stateful.state_dict().items():
                    mine.stateful.state_dict()[name].copy_(tensor)
            run.save_checkpoint(checkpoint_id=str(step))
    return [(report.bytes, report.written_bytes) for report in run.reports]


@sampled("backend", ["zarr", "ocdbt", pytest.param("safetensors", marks=pytest.mark.full)])
def test_retention_beside_incremental_saves_frees_what_nobody_uses(tmp_path: Path, backend: str) -> None:
    ((first, *_), _) = run_ranks(RANKS, _save_in_one_run, tmp_path, backend, 4, {"keep_last": 2}, process_group=True)
    assert [one.id for one in Ledger(tmp_path, run_id="test").committed()] == ["3", "4"]
    assert bytes_on_disk(tmp_path) < 2 * first[0]
    run_ranks(RANKS, require_state, tmp_path, backend, 3, tmp_path / "checkpoint-3", process_group=True)


IN_SAFETENSORS = [pytest.param("safetensors", how, marks=pytest.mark.full) for how in ("changed", "shorter")]


@sampled(("backend", "damage"), [("zarr", "changed"), ("ocdbt", "changed"), ("ocdbt", "shorter"), *IN_SAFETENSORS])
def test_a_damaged_shared_file_condemns_all_that_link_it_and_the_next_save_moves_them_away(
    tmp_path: Path, backend: str, damage: str
) -> None:
    run_ranks(RANKS, save_steps, tmp_path, backend, 1, 1, {"shift": 1000}, process_group=True)
    run_ranks(RANKS, save_steps, tmp_path, backend, 2, 4, {}, process_group=True)
    folder = tmp_path / "checkpoint-4"
    extent = read_index(folder, read_manifest(folder), 1).chunks["model/h.2.weight"]
    ((_, chunk),) = extent.items()
    with (folder / chunk.file).open("r+b") as file:
        file.seek(chunk.offset + 17)
        file.write(b"\xff\xff") if damage == "changed" else file.truncate(os.stat(file.fileno()).st_size - 1)
    sound = (1, 2) if backend == "safetensors" else (1,)  # what is frozen moved to a file of its own at step 3
    damaged = [step for step in (1, 2, 3, 4) if verify_checkpoint(tmp_path / f"checkpoint-{step}")]
    assert damaged == [step for step in (1, 2, 3, 4) if step not in sound]
    run_ranks(RANKS, _fall_back_and_save, tmp_path, backend, sound[-1], process_group=True)
    assert [one.id for one in Ledger(tmp_path, run_id="test").committed()] == [*map(str, sound), "5"]
    quarantined = sorted(one.name.split("-")[1] for one in tmp_path.glob(".quarantined-*") if one.is_dir())
    assert quarantined == [*map(str, damaged)]
    reasons = [one.read_text() for one in tmp_path.glob(".quarantined-*.reason.txt")]
    assert len(reasons) == len(damaged) and all(chunk.file in reason for reason in reasons)
    assert verify_checkpoint(tmp_path / "checkpoint-5") == []


def _fall_back_and_save(topology: Topology, root: Path, backend: str, sound: int) -> None:
    run = run_of(topology, root, backend, 60)
    run.load_checkpoint()
    assert run.last_load is not None and run.last_load.checkpoint_id == f"{sound}"
    passed_over = [Path(path).name for path in run.last_load.fell_back_from]
    assert passed_over == [f"checkpoint-{step}" for step in range(4, sound, -1)]
    run.save_checkpoint(checkpoint_id="5")
    assert run.last_save is not None
    assert run.last_save.written_bytes < run.last_save.bytes  # linked to the sound one


def test_a_previous_checkpoint_that_proves_damaged_fails_one_save_and_no_more(
    tmp_path: Path,
) -> None:
    run_ranks(RANKS, _rewrite_what_is_damaged, tmp_path, process_group=True)
    assert [one.id for one in Ledger(tmp_path, run_id="test").committed()] == ["1", "3"]
    assert verify_checkpoint(tmp_path / "checkpoint-3") == []


def _rewrite_what_is_damaged(topology: Topology, root: Path) -> None:
    parts = held_by(topology, state_at(1))
    run = run_with(parts, topology, root, "ocdbt", saves={"incremental_min_live": 1.0})
    run.save_checkpoint(checkpoint_id="1")
    if topology.is_lead:
        folder = root / "checkpoint-1"
        ((_, chunk),) = read_index(folder, read_manifest(folder), 1).chunks["model/h.2.weight"].items()
        with (folder / chunk.file).open("r+b") as file:
            file.seek(chunk.offset + 17)
            file.write(b"\xff\xff")
    (model,) = (one.stateful.state_dict() for one in parts if one.key == "model")
    with topology.phase("damage"):
        model["h.0.weight"].to_local().add_(1)
    with pytest.raises(
        CorruptCheckpointError, match="model/h.2.weight: bytes .* cannot become part of a new checkpoint"
    ):
        run.save_checkpoint(checkpoint_id="2")
    run.save_checkpoint(checkpoint_id="3")
