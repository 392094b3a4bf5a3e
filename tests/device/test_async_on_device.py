"""Saves in the background of what lies on a device whose copies come late: they hold what was on its way at the call, and nothing later.

See test_late_copies.py for what late means. What the program queues after a save, on any stream, waits for nobody: the copies of the save
must be behind what came before and, where they go on beside training, nothing may overtake them before the optimizer's step.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import CheckpointCoordinator, StateComponent
from ckpt.errors import StateChangedError
from ckpt.loading.direct import DirectLoad
from ckpt.ranks.topology import Topology
from ckpt.state.statefuls import ModelState, OptimizerState
from tests.device.devices import ADVERSARY, CUDA, NPU, made
from tests.device.memory import AWKWARD, Memory, require_same, tiny
from tests.device.saves import require_saved, torch_device
from tests.device.test_resume_on_device import BACKENDS, LAYOUTS, Run, checkpoint, runs_on
from tests.support.async_runs import SETTINGS, Troubled, error_of, let_go, settings
from tests.support.covering import and_in_full, rows, sampled
from tests.support.ranks import run_ranks
from tests.support.states import Held, sized, staging
from tests.support.states import coordinator as on_host

pytestmark = pytest.mark.parametrize("device", [NPU, CUDA])


def coordinator(
    topology: Topology, root: Path, parts: list[StateComponent], device: str, *, pinned_mib: int = 32, **options: Any
) -> CheckpointCoordinator:
    from ckpt.backends.zarr import ZarrBackend

    on = made(device, pinned_mib=pinned_mib)
    on.use(topology.local_rank)
    options.setdefault("backend", ZarrBackend())
    return CheckpointCoordinator(
        parts, {}, topology, root, strategy=sized(DirectLoad(), in_flight_bytes=1 << 20), device=on, pattern_check="off", **options
    )


# What is changed right after the call


@and_in_full(
    ("budget_mib", "when_busy"),
    [(None, "queue"), (4, "wait")],
    rows({"budget_mib": [None, 4, 32], "when_busy": ["wait", "queue"]}, None),
)
def test_a_save_holds_what_was_on_its_way_at_the_call_and_nothing_later(
    tmp_path: Path, device: str, budget_mib: int | None, when_busy: str
) -> None:
    """Three saves one right after another through the same memory; all tensors are overwritten as soon as control has returned."""
    (paths,) = run_ranks(1, _change_and_save, tmp_path, device, budget_mib, when_busy, device=device, environment=ADVERSARY)
    for seed, path in zip((2, 3, 4), paths, strict=True):
        require_saved(path, AWKWARD, seed)


def _change_and_save(
    topology: Topology, root: Path, device: str, budget_mib: int | None, when_busy: str
) -> list[str]:
    memory = Memory(AWKWARD, 1, torch_device(device, topology))
    saves, budget = settings(when_busy=when_busy), staging(budget_mib)
    parts = [StateComponent("model", Held(memory.tensors()), "replicated")]
    paths = []
    with coordinator(topology, root, parts, device, saves=saves, memory_budget_mib=budget) as saver:
        for seed in (2, 3, 4):
            memory.change(seed, on_new_streams=seed == 3)
            path = saver.save_checkpoint(checkpoint_id=f"{seed}")
            memory.change(50 + seed, late=False, on_new_streams=True)
            assert path is not None
            paths.append(path)
    return paths


def test_very_many_small_tensors_are_those_of_the_call(tmp_path: Path, device: str) -> None:
    (path,) = run_ranks(1, _change_and_save_many, tmp_path, device, device=device, environment=ADVERSARY)
    require_saved(path, tiny(2000), 2)


def _change_and_save_many(topology: Topology, root: Path, device: str) -> str:
    memory = Memory(tiny(2000), 1, torch_device(device, topology))
    parts = [StateComponent("model", Held(memory.tensors()), "replicated")]
    with coordinator(topology, root, parts, device, saves=settings()) as saver:
        memory.change(2)
        path = saver.save_checkpoint(checkpoint_id="1")
        memory.change(3, late=False, on_new_streams=True)
    assert path is not None
    return path


def test_ranks_send_each_other_parts_of_chunks_as_they_were_at_the_call(tmp_path: Path, device: str) -> None:
    """Shards whose borders are no chunks'."""
    from ckpt.dist_checkpointing import ShardedTensor

    shape, cuts = (48, 30_000), (0, 7, 48)

    (path, _) = run_ranks(2, _save_parts_of_chunks, tmp_path, device, shape, cuts, device=device, environment=ADVERSARY)
    held = Held({"w": ShardedTensor.at("w", torch.zeros(shape), shape, (0, 0))})
    on_host(Topology.alone(), tmp_path, [StateComponent("model", held, "sharded")]).load_checkpoint(path)
    assert held.loaded is not None
    assert torch.equal(held.loaded["w"].data, torch.arange(48.0 * 30_000).view(shape))


def _save_parts_of_chunks(topology: Topology, root: Path, device: str, shape: tuple[int, int], cuts: tuple[int, ...]) -> str:
    from ckpt.dist_checkpointing import ShardedTensor

    first, end = cuts[topology.rank], cuts[topology.rank + 1]
    rows = torch.arange(48.0 * 30_000).view(shape)[first:end]
    tensor = torch.zeros_like(rows, device=torch_device(device, topology))
    held = Held({"w": ShardedTensor.at("w", tensor, shape, (first, 0))})
    with coordinator(topology, root, [StateComponent("model", held, "sharded")], device, saves=settings()) as saver:
        tensor.copy_(rows.pin_memory(), non_blocking=True)
        path = saver.save_checkpoint(checkpoint_id="1")
        tensor.zero_()
    assert path is not None
    return path


# What is copied beside training


class _Model:
    """Weights of more than one staging buffer on a device, and an optimizer whose state is there too."""

    def __init__(self, where: torch.device) -> None:
        self.module = torch.nn.Sequential(
            torch.nn.Linear(512, 1024), torch.nn.BatchNorm1d(1024), torch.nn.Linear(1024, 512)
        )
        with torch.no_grad():
            for number, tensor in enumerate(self.module.parameters()):
                tensor.copy_(torch.arange(float(tensor.numel())).view(tensor.shape).div_(1e6).add_(number))
        self.module.to(where)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.5, momentum=0.9)
        self.where = where

    def parts(self) -> list[StateComponent]:
        return [
            StateComponent("model", ModelState(self.module), "replicated"),
            StateComponent("optimizer", OptimizerState(self.optimizer, self.module), "replicated"),
        ]

    def forward_and_backward(self) -> None:
        self.optimizer.zero_grad()
        self.module(torch.ones(4, 512, device=self.where)).mean().backward()

    def state(self) -> dict[str, torch.Tensor]:
        torch.get_device_module(self.where).synchronize(self.where)
        found = {key: one.detach().to("cpu", copy=True) for key, one in self.module.state_dict().items()}
        for name, parameter in self.module.named_parameters():
            for key, one in self.optimizer.state[parameter].items():
                found[f"{name}.{key}"] = one.to("cpu", copy=True)
        return found


@sampled("budget_mib", [None, 4])
def test_what_is_copied_beside_training_is_complete_before_the_optimizers_step(
    tmp_path: Path, device: str, budget_mib: int | None
) -> None:
    run_ranks(1, _train, tmp_path, device, budget_mib, device=device, environment=ADVERSARY)
    for number in (1, 2, 3):
        state = torch.load(tmp_path / f"wanted-{number}")
        model = _Model(torch.device("cpu"))
        model.forward_and_backward()
        model.optimizer.step()
        alone = on_host(Topology.alone(), tmp_path, model.parts(), pattern_check="off")
        alone.load_checkpoint(tmp_path / f"checkpoint-{number}")
        found = {key: one.detach() for key, one in model.module.state_dict().items()}
        for name, parameter in model.module.named_parameters():
            found |= {f"{name}.{key}": one for key, one in model.optimizer.state[parameter].items()}
        require_same(found, state)


def _train(topology: Topology, root: Path, device: str, budget_mib: int | None) -> None:
    model = _Model(torch_device(device, topology))
    model.forward_and_backward()
    model.optimizer.step()
    saves, budget = settings(overlap=True, when_busy="queue"), staging(budget_mib)
    with coordinator(topology, root, model.parts(), device, saves=saves, memory_budget_mib=budget) as saver:
        for number in (1, 2, 3):
            torch.save(model.state(), root / f"wanted-{number}")
            saver.save_checkpoint(checkpoint_id=f"{number}")
            model.forward_and_backward()  # the statistics of the normalization change here
            model.optimizer.step()


def test_a_weight_that_is_written_to_before_it_is_copied_fails_the_save(tmp_path: Path, device: str) -> None:
    (said,) = run_ranks(1, _write_early, tmp_path, device, device=device, environment=ADVERSARY)
    assert said[0] == StateChangedError.__name__ and "weight" in said[1]
    assert list(tmp_path.glob("*/checkpoint-*")) == []


def _write_early(topology: Topology, root: Path, device: str) -> tuple[Any, ...]:
    from tests.distributed.test_async_overlap import Copier

    model = _Model(torch_device(device, topology))
    with (
        Copier() as copier,
        coordinator(topology, root / "root", model.parts(), device, saves=settings(overlap=True)) as saver,
    ):
        saver.save_checkpoint(checkpoint_id="1")
        with torch.no_grad():
            model.module[0].weight.add_(1)
        copier.go()
        return error_of(saver.wait)


def test_the_copy_beside_training_does_not_wait_for_what_training_has_queued_since(tmp_path: Path, device: str) -> None:
    """Else it would begin when the next forward is over, and that holds collectives, which wait for other ranks."""
    if device != "npu":
        pytest.skip("on the stand-in alone work that nobody waits for is known to be late")
    assert run_ranks(1, _queue_more, tmp_path, device, device=device, environment=ADVERSARY) == [0.0]


def _queue_more(topology: Topology, root: Path, device: str) -> float:
    from tests.distributed.test_async_overlap import Copier

    where = torch_device(device, topology)
    module = torch.get_device_module(where)
    model, other, ones = _Model(where), torch.zeros(5, device=where), torch.ones(5).pin_memory()
    module.synchronize()
    saves = settings(overlap=True)
    with Copier() as copier, coordinator(topology, root, model.parts(), device, saves=saves) as saver:
        saver.save_checkpoint(checkpoint_id="1")
        other.copy_(ones, non_blocking=True)
        copier.go()
        saver.wait_for_snapshot()
        with module.stream(module.Stream(device=where)):
            found = float(other.max().cpu())
    module.synchronize()
    assert float(other.max()) == 1.0
    return found


def test_the_program_is_blocked_for_its_copies_only(tmp_path: Path, device: str) -> None:
    """Nothing of the writing is waited for: control returns, and the snapshot is complete, while the writer stands still."""
    (events,) = run_ranks(1, _while_the_writer_stands, tmp_path, device, device=device, environment=ADVERSARY)
    assert events == ["returned", "complete", "committed"]


def _while_the_writer_stands(topology: Topology, root: Path, device: str) -> list[str]:
    model = _Model(torch_device(device, topology))
    events = []
    backend = Troubled("waits", root)
    saves = settings(overlap=True)
    with coordinator(topology, root / "root", model.parts(), device, saves=saves, backend=backend) as saver:
        saver.save_checkpoint(checkpoint_id="1")
        events.append("returned")
        saver.wait_for_snapshot()
        events.append("complete")
        time.sleep(0.1)
        assert not list((root / "root").glob("checkpoint-*"))
        let_go(root)
        saver.wait()
        events.append("committed")
    return events


# The training recipe


def _require_alike(device: str, layout: str, setting: str, backend: str, folder: Path) -> None:
    """A run that never saves, one that saves in the background after each step, and one that goes on from its second checkpoint."""
    own = [*SETTINGS[setting], *BACKENDS[backend], "train.steps=3"]
    never = Run(folder / "never", ["train.steps=3", "save.every=100"])
    straight = Run(folder / "straight", own)
    on = Run(folder / "on", [*own, f"resume={checkpoint(straight, 2)}"])
    first, second, third = runs_on(device, layout, never, straight, on)
    assert (second["losses"], second["state_digest"]) == (first["losses"], first["state_digest"])
    assert third["losses"] == first["losses"][2:]
    assert third["state_digest"] == first["state_digest"]


@and_in_full(
    ("layout", "setting", "backend"),
    [("fsdp", "overlap", "zarr")],
    rows({"layout": [*LAYOUTS], "setting": [*SETTINGS], "backend": ["zarr", "ocdbt"]}, 2),
)
def test_a_run_goes_on_to_the_bit_from_what_it_saved_while_it_trained(
    tmp_path: Path, device: str, layout: str, setting: str, backend: str
) -> None:
    _require_alike(device, layout, setting, backend, tmp_path)
