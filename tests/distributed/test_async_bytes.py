"""The bytes of a save in the background are those of the moment it was asked for: what went wrong elsewhere, and is caught here.

Each failure that was published of another library is a test: NVIDIA-NeMo/RL#3312 (checkpoints of later steps that are equal to the
bit), NVIDIA-NeMo/RL#4183 (an optimizer's state that stays as it was after its first step), NVIDIA/nvidia-resiliency-ext#376 (a counter on
the host that moves while it is written), pytorch/pytorch#144657 (tensors on the host that change after the call) and
NVIDIA-NeMo/Megatron-Bridge#3267 (plain values that are read late).
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import CheckpointCoordinator, StateComponent
from ckpt.backends.base import staged_digests
from ckpt.catalog.verify import verify_checkpoint
from ckpt.errors import CheckpointError, StorageError
from ckpt.ranks.topology import Topology
from ckpt.state.statefuls import OptimizerState
from tests.support.async_runs import (
    SHAPE,
    Trainee,
    Troubled,
    committed,
    deadline,
    error_of,
    has_come,
    let_go,
    names_in,
    require_holds,
    settings,
    until,
)
from tests.support.ranks import run_threads
from tests.support.states import ALL_DTYPES, Held, coordinator, random_bits, zero_bits
from tests.support.values import same_values

AGREE_S = 10.0
BACKENDS = ("zarr", "safetensors")


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    with deadline(60.0):
        yield


@contextmanager
def held_back(
    held: Held, root: Path, folder: Path, backend: str, **options: Any
) -> Iterator[tuple[CheckpointCoordinator, Path]]:
    """A save that has been asked for, and of which nothing is written before the block ends."""
    folder.mkdir(exist_ok=True)
    made = coordinator(
        Topology.alone(),
        root,
        [StateComponent("model", held, "replicated")],
        backend=Troubled("waits", folder, backend=backend),
        saves=settings(**options),
    )
    try:
        path = made.save_checkpoint(checkpoint_id="1")
        assert path is not None
        until(lambda: has_come(folder, "1"), "the first chunk")
        assert committed(root) == []
        yield made, Path(path)
        let_go(folder)
        (report,) = made.maybe_finalize(blocking=True)
        assert report.path == path
    finally:
        let_go(folder)
        made.close()


def loaded(path: Path, like: dict[str, Any]) -> Any:
    held = Held(
        {key: zero_bits(tuple(one.shape), one.dtype) if isinstance(one, torch.Tensor) else one for key, one in like.items()}
    )
    coordinator(Topology.alone(), path.parent, [StateComponent("model", held, "replicated")]).load_checkpoint(path)
    return held.loaded


# pytorch/pytorch#144657


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_on_the_host_are_saved_as_they_were_at_the_call(tmp_path: Path, backend: str) -> None:
    """Large and small, of every data type, dense, with gaps, transposed, empty and without dimensions."""
    state: dict[str, Any] = {f"large {dtype}": random_bits(SHAPE, dtype, n) for n, dtype in enumerate(ALL_DTYPES)}
    state |= {f"small {dtype}": random_bits((3, 5), dtype, 50 + n) for n, dtype in enumerate(ALL_DTYPES)}
    state |= {
        "every second": random_bits(SHAPE, torch.float32, 1)[::2, ::2],
        "turned": random_bits(SHAPE, torch.float64, 2).t(),
    }
    state |= {"empty": torch.empty(0, 3), "one": torch.tensor(7.0), "two names": state["large torch.float32"]}
    wanted = copy.deepcopy(state)
    with held_back(Held(state), tmp_path / "root", tmp_path / "notes", backend) as (_, path):
        for tensor in state.values():
            if tensor.dtype in (torch.bool, torch.float4_e2m1fn_x2):
                tensor = tensor.view(torch.uint8)
            tensor.zero_()
    assert same_values(loaded(path, wanted), wanted)
    assert verify_checkpoint(path) == []


# NVIDIA-NeMo/Megatron-Bridge#3267


@pytest.mark.parametrize("backend", ["zarr", pytest.param("safetensors", marks=pytest.mark.full)])
def test_plain_values_are_those_of_the_call_however_deep_they_lie(tmp_path: Path, backend: str) -> None:
    state: dict[str, Any] = {
        "w": random_bits(SHAPE, torch.float32, 1),
        "step": 3,
        "losses": [1.5, [2.5]],
        "schedule": {"lr": 0.1, "seen": {"shards": [1, 2]}},
        "bytes": b"abc",
    }
    wanted = copy.deepcopy(state)
    with held_back(Held(state), tmp_path / "root", tmp_path / "notes", backend) as (_, path):
        state["step"] = 4
        state["losses"][1].append(3.5)
        state["schedule"]["seen"]["shards"].clear()
        state["schedule"]["lr"] = 0.2
        state["late"] = "a key that was not there"
    assert same_values(loaded(path, wanted), wanted)


# NVIDIA/nvidia-resiliency-ext#376


@pytest.mark.parametrize("overlap", [False, True])
def test_the_counter_of_an_optimizer_that_steps_while_it_is_written_is_that_of_the_call(
    tmp_path: Path, overlap: bool
) -> None:
    trainee = Trainee(1)
    trainee.step()
    counters = [state["step"] for state in trainee.optimizer.state.values()]
    assert all(one.dim() == 0 and one.is_cpu for one in counters), "what others tore"
    made = trainee.coordinator(
        Topology.alone(),
        tmp_path / "root",
        settings(overlap=overlap),
        backend=Troubled("waits", tmp_path),
    )
    with made:
        wanted = trainee.state()
        path = made.save_checkpoint(checkpoint_id="1")
        for _ in range(5):
            trainee.step()
        assert all(one == 6 for one in counters), "changed in place"
        assert committed(tmp_path / "root") == []
        let_go(tmp_path)
    require_holds(path, wanted)


# NVIDIA-NeMo/RL#3312, NVIDIA-NeMo/RL#4183


def _alarms_of(
    trainee: Trainee,
    root: Path,
    advance: Callable[[int], None],
    parts: list[StateComponent] | None = None,
    mode: str = "async",
) -> list[list[str]]:
    """Save four times, doing something before each; the alarms of each save."""
    options = {"saves": settings()} if mode == "async" else {}
    made = coordinator(Topology.alone(), root, parts or trainee.components(), pattern_check="off", **options)
    found = []
    with made:
        for number in range(1, 5):
            advance(number)
            made.save_checkpoint(checkpoint_id=f"{number}")
            made.wait()
            assert made.last_save is not None and made.last_save.checkpoint_id == f"{number}"
            found.append(list(made.last_save.alarms))
    assert committed(root) == [f"checkpoint-{number}" for number in range(1, 5)], "an alarm is no failure"
    return found


def test_checkpoints_of_later_steps_that_are_equal_to_the_bit_raise_an_alarm_that_names_both(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As when the training changes another copy of the state than the one that is saved: only the step's number moves on."""
    trainee = Trainee(1)
    trainee.step()

    def advance(number: int) -> None:
        trainee.counters.state["step"] = number

    with caplog.at_level(logging.WARNING, logger="ckpt"):
        found = _alarms_of(trainee, tmp_path, advance)
    assert found[0] == []
    for number in (2, 3, 4):
        (alarm,) = [
            one for one in found[number - 1] if f"checkpoint-{number}" in one and f"checkpoint-{number - 1}" in one
        ]
        assert any(alarm in record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)


class Frozen:
    """A user's own way to give out an optimizer's state: a copy that was made once, and never again."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
        self.optimizer = optimizer
        self._state = copy.deepcopy(OptimizerState(optimizer, model).state_dict())

    def state_dict(self) -> Any:
        return self._state

    def load_state_dict(self, state_dict: Any) -> None:
        raise AssertionError("nothing is loaded")


def _another_optimizer(trainee: Trainee) -> OptimizerState:
    """One that was the same once, and is not the one that is stepped."""
    model, optimizer = copy.deepcopy((trainee.model, trainee.optimizer))
    return OptimizerState(optimizer, model)


def _a_copy_of_its_state(trainee: Trainee) -> Frozen:
    return Frozen(trainee.optimizer, trainee.model)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("frozen", [_another_optimizer, _a_copy_of_its_state], ids=lambda one: one.__name__)
def test_an_optimizer_that_stands_still_while_the_model_moves_raises_an_alarm_that_names_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, frozen: Callable[[Trainee], Any], mode: str
) -> None:
    trainee = Trainee(1)
    trainee.step()
    stale = StateComponent("optimizer", frozen(trainee), "replicated")
    parts = [stale if one.key == "optimizer" else one for one in trainee.components()]
    with caplog.at_level(logging.WARNING, logger="ckpt"):
        found = _alarms_of(trainee, tmp_path, lambda _: trainee.step(), parts=parts, mode=mode)
    assert found[0] == []
    for number in (2, 3, 4):
        (alarm,) = found[number - 1]
        assert alarm.startswith(f"optimizer in checkpoint-{number} ") and f"checkpoint-{number - 1}" in alarm
        assert any(alarm in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_run_that_learns_raises_no_alarm_nor_does_a_save_of_the_same_step_again(tmp_path: Path, mode: str) -> None:
    trainee = Trainee(1)
    assert _alarms_of(trainee, tmp_path / "learns", lambda _: trainee.step(), mode=mode) == [[]] * 4
    options = {"saves": settings()} if mode == "async" else {}
    with coordinator(
        Topology.alone(), tmp_path / "again", trainee.components(), pattern_check="off", **options
    ) as made:
        for _ in range(2):
            made.save_checkpoint(checkpoint_id="7")
            made.wait()
            assert made.last_save is not None
            assert list(made.last_save.alarms) == []


def test_the_alarm_is_raised_on_every_rank_alike(tmp_path: Path) -> None:
    def save(topology: Topology) -> list[list[str]]:
        trainee = Trainee(1)
        trainee.step()
        found = []
        with trainee.coordinator(topology, tmp_path, settings()) as made:
            for number in (1, 2):
                made.save_checkpoint(checkpoint_id=f"{number}")
                made.wait()
                assert made.last_save is not None
                found.append(list(made.last_save.alarms))
        return found

    first, *others = run_threads(3, save, agree_s=AGREE_S)
    assert first[0] == [] and first[1] != []
    assert all(one == first for one in others)


# The memory that is staged, between the snapshot and the disk


@pytest.mark.parametrize(
    ("backend", "at"),
    [
        ("zarr", "a chunk"),
        ("safetensors", "packed tensors"),
        pytest.param("zarr", "packed tensors", marks=pytest.mark.full),
        pytest.param("safetensors", "a chunk", marks=pytest.mark.full),
    ],
)
def test_a_bit_that_turns_between_the_snapshot_and_the_disk_is_refused_with_the_arrays_name(
    tmp_path: Path, backend: str, at: str
) -> None:
    state = {"one": random_bits(SHAPE, torch.float32, 1), "two": random_bits(SHAPE, torch.float32, 2)}
    state |= {f"small {n}": random_bits((5,), torch.float32, n) for n in range(9)}
    made = coordinator(
        Topology.alone(),
        tmp_path / "root",
        [StateComponent("model", Held(state), "replicated")],
        backend=Troubled("flips", tmp_path, at=2 if at == "a chunk" else 3, backend=backend),
        saves=settings(),
    )
    with made:
        made.save_checkpoint(checkpoint_id="1")
        kind, said, _, _ = error_of(made.wait)
        assert kind == StorageError.__name__
        assert (
            "two" if at == "a chunk" else "packed"
        ) in said and "was changed in memory between the snapshot and the disk" in said
        assert names_in(tmp_path / "root") == []
        path = made.save_checkpoint(checkpoint_id="2")
        made.wait()
    assert path is not None
    assert same_values(loaded(Path(path), state), state)


@pytest.mark.parametrize("overlap", [False, True])
def test_training_does_not_wait_for_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    threads: list[str] = []

    def digested(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        return staged_digests(*arguments)

    monkeypatch.setattr("ckpt.saving.background.snapshot.staged_digests", digested)
    trainee = Trainee(0, width=2048)
    with trainee.coordinator(Topology.alone(), tmp_path, settings(overlap=overlap)) as made:
        trainee.step()
        made.save_checkpoint(checkpoint_id="1")
        made.wait()
    assert threads and threading.current_thread().name not in threads
    assert ("copier" in threads) == overlap


def test_the_digests_of_a_copy_are_given_up_and_are_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are taken before the first byte is written: a rank that is asked to end, or is watched, must not wait for all of them."""
    state = {f"w{n}": random_bits(SHAPE, torch.float32, n) for n in range(6)}
    digested: list[int] = []
    parts = [StateComponent("model", Held(state), "replicated")]
    with coordinator(Topology.alone(), tmp_path, parts, saves=settings(), pattern_check="off") as made:
        background = made._background
        assert background is not None

        def slowly(*arguments: Any) -> Any:
            digested.append(len(digested))
            if len(digested) == 2:
                background.give_up()
            return staged_digests(*arguments)

        monkeypatch.setattr("ckpt.saving.background.snapshot.staged_digests", slowly)
        made.save_checkpoint(checkpoint_id="1")
        with pytest.raises(CheckpointError, match="was asked to end"):
            made.wait()
    assert len(digested) == 2
    assert names_in(tmp_path) == []


def test_it_is_refused_on_every_rank_and_the_checkpoint_before_stays(tmp_path: Path) -> None:
    state = {f"w{n}": random_bits(SHAPE, torch.float32, n) for n in range(6)}
    notes = tmp_path / "notes"
    notes.mkdir()

    def save(topology: Topology) -> Any:
        parts = [StateComponent("model", Held(dict(state)), "replicated")]
        backend = Troubled("flips", notes, checkpoint_id="2", rank=1, at=2)
        with coordinator(topology, tmp_path / "root", parts, backend=backend, saves=settings()) as made:
            made.save_checkpoint(checkpoint_id="1")
            made.save_checkpoint(checkpoint_id="2")
            return error_of(made.wait)

    first, *others = run_threads(3, save, agree_s=AGREE_S)
    assert first[2] == 1
    assert "between the snapshot and the disk" in first[1] and "save of checkpoint-2" in first[1]
    assert all(one == first for one in others)
    assert names_in(tmp_path / "root") == ["checkpoint-1"]
    assert verify_checkpoint(tmp_path / "root" / "checkpoint-1") == []
