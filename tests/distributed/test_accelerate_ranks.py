"""Accelerate with checkpoints of this package, on several ranks that are killed."""

from __future__ import annotations

import os
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DataLoaderConfiguration, DistributedType, ProjectConfiguration, set_seed
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from ckpt.errors import CheckpointError
from ckpt.integrations.huggingface_accelerate import CkptAccelerator
from ckpt.ranks.topology import Topology
from ckpt.saving.manifest_writer import ManifestWriter
from ckpt.storage.stored import read_manifest
from tests.support.ranks import run_ranks
from tests.support.states import Held

STEPS = 14


def _train(
    topology: Topology, root: Path, killed_at: int | None = None, *, is_adapted: bool = False, is_sharded: bool = False
) -> tuple[int, list[float], list[list[float]]]:
    """Train over epochs of six batches of each rank, and save every fourth step. The first step, and from there on losses; last weights."""
    accelerator = _accelerator(
        topology,
        is_sharded=is_sharded,
        project_config=ProjectConfiguration(str(root), automatic_checkpoint_naming=True, total_limit=2),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        peft_base="frozen" if is_adapted else None,
    )
    assert accelerator.num_processes == topology.world_size
    set_seed(0, device_specific=True)
    data = TensorDataset(torch.arange(96.0).reshape(24, 4).cos())
    loader = DataLoader(data, batch_size=2, shuffle=True, generator=torch.Generator())
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
    if is_adapted:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules=["0", "2"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    step, own = Held({"step": 0}), Held({"rank": topology.rank})
    accelerator.register_for_checkpointing(step, own)
    if accelerator.find_latest() is not None:
        accelerator.load_state()
        step.state = dict(step.loaded)
        assert own.loaded == {"rank": topology.rank}, "Accelerate would have kept that of rank 0"
    start, losses = step.state["step"], []
    while step.state["step"] < STEPS:
        epoch, position = divmod(step.state["step"], len(loader))
        loader.set_epoch(epoch)
        for (batch,) in accelerator.skip_first_batches(loader, position):
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
            step.state = {"step": step.state["step"] + 1}
            if step.state["step"] == killed_at:
                _die_in_a_save(topology)
            if step.state["step"] % 4 == 0:
                accelerator.save_state()
            if step.state["step"] == STEPS:
                break
    weights = [value.full_tensor() if isinstance(value, DTensor) else value for value in model.state_dict().values()]
    assert is_sharded == any(isinstance(value, DTensor) for value in model.parameters())
    return start, losses, [value.tolist() for value in weights]


def _accelerator(topology: Topology, *, is_sharded: bool = False, **options: Any) -> CkptAccelerator:
    world_size = str(topology.world_size)
    os.environ.update({"RANK": str(topology.rank), "LOCAL_RANK": str(topology.rank)})
    os.environ.update({"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size})
    if is_sharded:
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU  # on CPUs Accelerate leaves FSDP out
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2)
    return CkptAccelerator(cpu=True, **options)


def _die_in_a_save(topology: Topology) -> None:
    """Let the lead be killed when all files but the manifest are written, the others as soon as they hear of it."""
    if topology.is_lead:
        ManifestWriter.write = lambda *_args: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize(("is_adapted", "is_sharded"), [(False, False), (True, False), (True, True)])
def test_ranks_that_are_killed_in_a_save_go_on_to_the_bit(tmp_path: Path, is_adapted: bool, is_sharded: bool) -> None:
    train = partial(_train, is_adapted=is_adapted, is_sharded=is_sharded)
    straight: list[Any] = run_ranks(2, train, tmp_path / "straight", process_group=True, is_only=True)
    run_ranks(2, _killed, tmp_path / "killed", is_adapted, is_sharded, process_group=True, expect_dead=[0])
    assert sorted(path.name for path in (tmp_path / "killed/checkpoints").glob("checkpoint*")) == ["checkpoint_0"]
    resumed = run_ranks(2, train, tmp_path / "killed", process_group=True, is_only=True)
    for (_, losses, weights), (start, again, weights_again) in zip(straight, resumed, strict=True):
        assert start == 4
        assert again == losses[4:]
        assert weights == weights_again
    assert straight[0][1] != straight[1][1], "each rank has its own batches and generators"
    assert sorted(path.name for path in (tmp_path / "killed/checkpoints").iterdir()) == ["checkpoint_1", "checkpoint_2"]
    held = read_manifest(tmp_path / "killed/checkpoints/checkpoint_2").components
    assert ("adapter-default" in held) == ("base" in held) == is_adapted != ("model" in held)


def _killed(topology: Topology, root: Path, is_adapted: bool, is_sharded: bool) -> None:
    with pytest.raises(CheckpointError, match="rank 0"):
        _train(topology, root, 8, is_adapted=is_adapted, is_sharded=is_sharded)


def test_ranks_agree_on_whether_a_folder_is_accelerates_own(tmp_path: Path) -> None:
    run_ranks(2, _load_own_state, tmp_path, process_group=True)


def _load_own_state(topology: Topology, root: Path) -> None:
    """Load a state that Accelerate itself has saved; the disk of rank 1 holds it without the random generators."""
    accelerator = _accelerator(topology)
    accelerator.register_for_checkpointing(held := Held({"a": 1}))
    folder = root / f"disk{topology.rank}"
    Accelerator.save_state(accelerator, str(root / "disk0"))
    accelerator.wait_for_everyone()
    if not topology.is_lead:
        shutil.copytree(root / "disk0", folder, ignore=shutil.ignore_patterns("random_states_*"))
    accelerator.wait_for_everyone()
    accelerator.load_state(str(folder))
    assert held.loaded == {"a": 1}
