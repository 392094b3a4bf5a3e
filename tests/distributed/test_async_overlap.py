"""`save.overlap=true`: the copy goes on beside the next forward and backward, and only the step of an optimizer waits for it.

The copier is held back at will here, so that what must wait for it waits, and what must not wait is done before it.
"""

from __future__ import annotations

import copy
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ckpt import CheckpointCoordinator, StateComponent
from ckpt.catalog.verify import verify_checkpoint
from ckpt.errors import CheckpointError, StateChangedError, StorageError
from ckpt.ranks.topology import Topology
from ckpt.saving.background.snapshot import Snapshot
from ckpt.state.statefuls import ModelState, OptimizerState
from tests.support.async_runs import (
    PATIENCE_S,
    Trainee,
    Troubled,
    committed,
    deadline,
    error_of,
    names_in,
    require_holds,
    settings,
)
from tests.support.covering import and_in_full
from tests.support.ranks import run_ranks, run_threads
from tests.support.states import Held, coordinator, staging


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    with deadline(60.0):
        yield


WIDTH = 2048
"""Of a `Trainee` whose weights are arrays of their own: small ones are copied before control returns."""


class Copier:
    """The thread that copies beside training, held back until `go`; and what happened when."""

    def __init__(self, delay: Callable[[], float] | None = None) -> None:
        self._go = threading.Event()
        self._delay = delay
        self._copy = Snapshot._copy_later
        self._events: list[str] = []
        self._snapshots: list[Snapshot] = []

    @property
    def events(self) -> list[str]:
        """What tests have noted, and "copied" where a copy was found to be over."""
        while self._snapshots and self._snapshots[0]._is_over.is_set():
            self._events.append("copied")
            del self._snapshots[0]
        return self._events

    def go(self) -> None:
        self._go.set()

    def go_after(self, seconds: float) -> None:
        threading.Timer(seconds, self.go).start()

    def hold(self) -> None:
        self._go.clear()

    def __enter__(self) -> Copier:
        def held_back(snapshot: Snapshot, *args: Any) -> None:
            self._snapshots.append(snapshot)
            if self._delay is None:
                assert self._go.wait(PATIENCE_S), "nobody let the copier go"
            else:
                time.sleep(self._delay())
            self._copy(snapshot, *args)

        Snapshot._copy_later = held_back  # type: ignore[method-assign]
        return self

    def __exit__(self, *raised: object) -> None:
        self.go()
        Snapshot._copy_later = self._copy  # type: ignore[method-assign]


@contextmanager
def trained(
    root: Path, make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, **options: Any
) -> Iterator[tuple[Trainee, CheckpointCoordinator, Copier]]:
    """A run after its first step, with a coordinator that copies beside it."""
    trainee = Trainee(1, make, WIDTH)
    trainee.step()
    with Copier() as copier:
        made = trainee.coordinator(Topology.alone(), root, settings(overlap=True), **options)
        try:
            yield trainee, made, copier
        finally:
            copier.go()
        made.close()


@pytest.mark.parametrize("accumulated", [1, 3])
def test_forward_and_backward_run_before_the_copy_is_complete_and_the_optimizers_step_after(
    tmp_path: Path, accumulated: int
) -> None:
    """What changes in the forward pass, statistics, counters and plain values, is saved as it was at the call all the same."""
    with trained(tmp_path) as (trainee, made, copier):
        wanted = trainee.state()
        path = made.save_checkpoint(checkpoint_id="1")
        assert copier.events == [], "control returned before the copy was complete"
        trainee.optimizer.zero_grad()
        for _ in range(accumulated):
            trainee.forward().backward()
            copier.events.append("backward")
        trainee.scheduler.step()
        copier.go_after(0.3)
        before = copy.deepcopy(trainee.model[0].weight)
        trainee.optimizer.step()
        copier.events.append("step")
        assert not torch.equal(trainee.model[0].weight, before)
        assert copier.events == ["backward"] * accumulated + ["copied", "step"]
        trainee.step()
        made.wait()
        assert made.last_save is not None
        assert made.last_save.blocked_s >= 0.2, "the wait of the step is training that stands still"
    require_holds(path, wanted, width=WIDTH)


@pytest.mark.parametrize("name", ["copier", "async call 0"])
def test_a_thread_that_cannot_start_fails_the_save_and_not_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    trainee = Trainee(1, width=WIDTH)
    trainee.step()
    with trainee.coordinator(Topology.alone(), tmp_path, settings(overlap=True)) as made:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            made.save_checkpoint(checkpoint_id="1")
            trainee.step()
        with pytest.raises(CheckpointError, match=f"no more threads, here for {name}: "):
            made.wait()
        wanted = trainee.state()
        path = made.save_checkpoint(checkpoint_id="2")
    assert path is not None
    require_holds(path, wanted, width=WIDTH)


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
@pytest.mark.parametrize("which", [0, 1])
def test_of_several_optimizers_each_waits(tmp_path: Path, which: int) -> None:
    trainee = Trainee(1, width=WIDTH)
    first, last = trainee.model[0], trainee.model[3]
    others = [
        torch.optim.SGD([*first.parameters()], lr=0.1, momentum=0.9),
        torch.optim.Adam([*last.parameters()], lr=0.1),
    ]
    parts = [StateComponent("model", ModelState(trainee.model), "replicated")]
    parts += [
        StateComponent(f"optimizer-{n}", OptimizerState(one, trainee.model), "replicated")
        for n, one in enumerate(others)
    ]
    trainee.forward().backward()
    for one in others:
        one.step()
    with Copier() as copier:
        made = coordinator(Topology.alone(), tmp_path, parts, saves=settings(overlap=True), pattern_check="off")
        with made:
            wanted = copy.deepcopy(trainee.model.state_dict())
            path = made.save_checkpoint(checkpoint_id="1")
            copier.go_after(0.3)
            others[which].step()
            copier.events.append("step")
            others[1 - which].step()
            assert copier.events == ["copied", "step"]
    assert path is not None
    found = Trainee(2, width=WIDTH)
    found_parts = [StateComponent("model", ModelState(found.model), "replicated")]
    coordinator(Topology.alone(), tmp_path, found_parts).load_checkpoint(path, strict=False)
    assert all(torch.equal(one, wanted[key]) for key, one in found.model.state_dict().items())


class Own(torch.optim.Optimizer):
    """An optimizer of somebody's own, whose step takes a closure and whose state has more than tensors in it."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                mean = state.setdefault("mean", torch.zeros_like(parameter))
                mean.lerp_(parameter.grad, 0.5)
                parameter.sub_(mean, alpha=group["lr"])
        return loss


def _lbfgs(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params, lr=lr, max_iter=2)


def _fused(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr, fused=True)


@pytest.mark.parametrize(
    "make", [Own, _fused, torch.optim.Adagrad, torch.optim.RMSprop, _lbfgs], ids=lambda one: one.__name__
)
def test_any_optimizer_waits_with_a_closure_and_without(
    tmp_path: Path, make: Callable[..., torch.optim.Optimizer]
) -> None:
    """The optimizers of torch, and one's own, also where the first step is yet to come."""
    trainee = Trainee(1, make, WIDTH)
    is_lbfgs = make is _lbfgs
    parts = trainee.components() if not is_lbfgs else [trainee.components()[0]]
    if is_lbfgs:
        parts.append(StateComponent("optimizer", _ByPosition(trainee.optimizer), "replicated"))

    def closure() -> Any:
        trainee.optimizer.zero_grad()
        loss = trainee.model(torch.ones(16, 32)).square().mean()
        loss.backward()
        return loss

    for number in (1, 2):
        with Copier() as copier:
            made = coordinator(Topology.alone(), tmp_path, parts, saves=settings(overlap=True), pattern_check="off")
            with made:
                wanted = copy.deepcopy(trainee.model.state_dict())
                path = made.save_checkpoint(checkpoint_id=f"{number}")
                closure()
                assert copier.events == []
                copier.go_after(0.2)
                trainee.optimizer.step(closure)
                assert copier.events == ["copied"]
                assert not torch.equal(wanted["0.weight"], trainee.model[0].weight)
        assert path is not None
        found = Trainee(2, width=WIDTH)
        found_parts = [StateComponent("model", ModelState(found.model), "replicated")]
        coordinator(Topology.alone(), tmp_path, found_parts).load_checkpoint(path, strict=False)
        for key in ("0.weight", "0.bias", "3.weight", "3.bias"):
            assert torch.equal(found.model.state_dict()[key], wanted[key]), key


class _ByPosition:
    """An optimizer's state as torch gives it out."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return {"groups": len(self.optimizer.param_groups)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict == self.state_dict()


def test_an_optimizer_that_accelerate_has_wrapped_waits(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    trainee = Trainee(1, width=WIDTH)
    trainee.step()
    accelerator = accelerate.Accelerator(cpu=True)
    wrapped = accelerator.prepare_optimizer(trainee.optimizer)
    parts = [one for one in trainee.components() if one.key != "optimizer"]
    parts.append(StateComponent("optimizer", OptimizerState(wrapped, trainee.model), "replicated"))
    with Copier() as copier:
        made = coordinator(Topology.alone(), tmp_path, parts, saves=settings(overlap=True), pattern_check="off")
        with made:
            wanted = trainee.state()
            path = made.save_checkpoint(checkpoint_id="1")
            trainee.forward().backward()
            assert copier.events == []
            copier.go_after(0.2)
            wrapped.step()
            assert copier.events == ["copied"]
    require_holds(path, wanted, width=WIDTH)


def test_parameters_that_join_an_optimizer_later_are_waited_for_like_the_others(tmp_path: Path) -> None:
    trainee = Trainee(1, width=WIDTH)
    parts = [StateComponent("model", ModelState(trainee.model), "replicated")]
    parts.append(StateComponent("optimizer", _ByPosition(trainee.optimizer), "replicated"))
    with Copier() as copier:
        made = coordinator(Topology.alone(), tmp_path, parts, saves=settings(overlap=True), pattern_check="off")
        with made:
            late = torch.nn.Linear(32, WIDTH)
            trainee.model.append(late)
            trainee.optimizer.add_param_group({"params": [*late.parameters()]})
            for tensor in late.parameters():
                tensor.grad = torch.ones_like(tensor)
            wanted = copy.deepcopy(trainee.model.state_dict())
            path = made.save_checkpoint(checkpoint_id="1")
            copier.go_after(0.2)
            trainee.optimizer.step()
            assert copier.events == ["copied"]
            assert not torch.equal(late.weight, wanted["4.weight"])
    assert path is not None
    found = Trainee(2, width=WIDTH)
    found.model.append(torch.nn.Linear(32, WIDTH))
    found_parts = [StateComponent("model", ModelState(found.model), "replicated")]
    coordinator(Topology.alone(), tmp_path, found_parts).load_checkpoint(path, strict=False)
    assert all(torch.equal(one, wanted[key]) for key, one in found.model.state_dict().items())


def test_a_step_in_another_thread_waits_too(tmp_path: Path) -> None:
    with trained(tmp_path) as (trainee, made, copier):
        wanted = trainee.state()
        path = made.save_checkpoint(checkpoint_id="1")
        thread = threading.Thread(target=trainee.optimizer.step)
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        copier.go()
        thread.join(PATIENCE_S)
        assert not thread.is_alive() and copier.events == ["copied"]
    require_holds(path, wanted, width=WIDTH)


def test_a_load_waits_for_the_copy_and_goes_back_to_the_state_of_the_call(tmp_path: Path) -> None:
    """It fills the very tensors that are being copied."""
    with trained(tmp_path) as (trainee, made, copier):
        copier.go()
        made.save_checkpoint(checkpoint_id="1")
        first = trainee.state()
        trainee.step()
        copier.hold()
        wanted = trainee.state()
        path = made.save_checkpoint(checkpoint_id="2")
        copier.go_after(0.3)
        made.load_checkpoint(tmp_path / "checkpoint-1")
        assert torch.equal(trainee.model[0].weight, first["model"]["0.weight"])
        made.wait()
    require_holds(path, wanted, width=WIDTH)


def test_who_waits_for_the_snapshot_may_change_anything_after(tmp_path: Path) -> None:
    with trained(tmp_path) as (trainee, made, copier):
        wanted = trainee.state()
        path = made.save_checkpoint(checkpoint_id="1")
        copier.go_after(0.2)
        made.wait_for_snapshot()
        assert copier.events == ["copied"]
        with torch.no_grad():
            for tensor in trainee.model.parameters():
                tensor.zero_()
        made.wait()
    require_holds(path, wanted, width=WIDTH)


def test_nothing_is_copied_late_of_a_model_whose_optimizer_is_not_saved(tmp_path: Path) -> None:
    """Nobody knows what changes it, and when."""
    trainee = Trainee(1, width=WIDTH)
    parts = [StateComponent("model", ModelState(trainee.model), "replicated")]
    with Copier() as copier:
        made = coordinator(Topology.alone(), tmp_path, parts, saves=settings(overlap=True), pattern_check="off")
        with made:
            wanted = {"model": copy.deepcopy(trainee.model.state_dict())}
            path = made.save_checkpoint(checkpoint_id="1")
            with torch.no_grad():
                for tensor in trainee.model.parameters():
                    tensor.zero_()
            made.wait()
            assert copier.events == []
    require_holds_model(path, wanted)


def test_the_report_counts_the_bytes_for_which_training_waited(tmp_path: Path) -> None:
    """The tensors of the model and its optimizer are copied later, plain ones and small ones at once; without overlap, all are."""
    plain = torch.arange(1 << 18)
    counted = {}
    for overlap in (False, True):

        def save(topology: Topology, overlap: bool = overlap) -> int:
            trainee = Trainee(1, width=WIDTH)
            trainee.step()
            parts = [*trainee.components(), StateComponent("plain", Held({"table": plain}), "replicated")]
            root = tmp_path / str(overlap)
            with coordinator(topology, root, parts, saves=settings(overlap=overlap), pattern_check="off") as made:
                made.save_checkpoint(checkpoint_id="1")
                made.wait()
                assert made.last_save is not None
                return made.last_save.blocked_bytes

        found = run_threads(2, save)
        assert found[0] == found[1]
        counted[overlap] = found[0]
    weights = 3 * 4 * WIDTH * (32 + 8)
    assert plain.nbytes < counted[True] < plain.nbytes + weights // 4
    assert counted[False] - counted[True] >= weights - (64 << 10)


def require_holds_model(path: str | None, wanted: dict[str, Any]) -> None:
    assert path is not None
    found = Trainee(2, width=WIDTH)
    found_parts = [StateComponent("model", ModelState(found.model), "replicated")]
    coordinator(Topology.alone(), Path(path).parent, found_parts).load_checkpoint(path, strict=False)
    assert all(torch.equal(one, wanted["model"][key]) for key, one in found.model.state_dict().items())


# What is written to between the call and the copy


def _weight(trainee: Trainee) -> None:
    trainee.model[0].weight.add_(1)


def _part_of_a_weight(trainee: Trainee) -> None:
    trainee.model[0].weight[5, 7] = 3.0


def _state_of_the_optimizer(trainee: Trainee) -> None:
    trainee.optimizer.state[trainee.model[0].weight]["exp_avg"].mul_(2)


def _by_an_optimizer_of_its_own(trainee: Trainee) -> None:
    other = torch.optim.SGD(trainee.model.parameters(), lr=1.0)
    trainee.model[0].weight.grad = torch.ones_like(trainee.model[0].weight)
    other.step()


@pytest.mark.parametrize(
    "change",
    [_weight, _part_of_a_weight, _state_of_the_optimizer, _by_an_optimizer_of_its_own],
    ids=lambda one: one.__name__,
)
def test_a_tensor_that_is_written_to_before_it_is_copied_fails_the_save_with_its_name(
    tmp_path: Path, change: Callable[[Trainee], None]
) -> None:
    with trained(tmp_path) as (trainee, made, copier):
        copier.go()
        wanted = trainee.state()
        made.save_checkpoint(checkpoint_id="1")
        made.wait()
        copier.hold()
        made.save_checkpoint(checkpoint_id="2")
        with torch.no_grad():
            change(trainee)
        copier.go()
        kind, said, _, _ = error_of(made.wait)
        assert kind == StateChangedError.__name__
        assert "0.weight" in said and "save of checkpoint-2" in said
        assert ("exp_avg" in said) == (change is _state_of_the_optimizer), said
        assert names_in(tmp_path) == ["checkpoint-1"]
        last = trainee.state()
        path = made.save_checkpoint(checkpoint_id="3")
        made.wait()
    require_holds(tmp_path / "checkpoint-1", wanted, width=WIDTH)
    require_holds(path, last, width=WIDTH)


def test_one_rank_whose_tensor_is_written_to_fails_the_save_on_all(tmp_path: Path) -> None:
    said = run_ranks(3, _change_on_one_rank, tmp_path, process_group=True, agree_s=10.0)
    assert said[0] == said[1] == said[2]
    kind, sentence, rank, _ = said[0]
    assert (kind, rank) == (StateChangedError.__name__, 1)
    assert "weight" in sentence
    assert committed(tmp_path) == []


def _sharded_model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = torch.nn.Linear(96, 1024, bias=False)
    whole = torch.arange(96 * 1024.0).view(1024, 96)
    model.weight = torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    model.weight.grad = distribute_tensor(torch.ones_like(whole), mesh, [Shard(0)])
    optimizer.step()
    return model, optimizer


def _change_on_one_rank(topology: Topology, root: Path) -> tuple[Any, ...]:
    """By the local part of a DTensor, whose own count of writes does not see it."""
    model, optimizer = _sharded_model()
    parts = [
        StateComponent("model", ModelState(model), "sharded"),
        StateComponent("optimizer", OptimizerState(optimizer, model), "sharded"),
    ]
    with Copier() as copier:
        made = coordinator(topology, root, parts, saves=settings(overlap=True), pattern_check="off")
        made.save_checkpoint(checkpoint_id="1")
        if topology.rank == 1:
            assert isinstance(model.weight, DTensor)
            with torch.no_grad():
                model.weight._local_tensor.add_(1)
        copier.go()
        said = error_of(made.wait)
        made.close()
    return said


def test_shards_are_copied_beside_training_and_hold_the_state_of_the_call(tmp_path: Path) -> None:
    assert run_ranks(3, _save_shards, tmp_path, process_group=True) == [["copied", "step"]] * 3


def _save_shards(topology: Topology, root: Path) -> list[str]:
    model, optimizer = _sharded_model()
    parts = [
        StateComponent("model", ModelState(model), "sharded"),
        StateComponent("optimizer", OptimizerState(optimizer, model), "sharded"),
    ]
    with Copier() as copier:
        with coordinator(topology, root, parts, saves=settings(overlap=True), pattern_check="off") as made:
            wanted = [_local(model.weight), _local(optimizer.state[model.weight]["momentum_buffer"])]
            path = made.save_checkpoint(checkpoint_id="1")
            assert copier.events == []
            copier.go_after(0.3)
            optimizer.step()
            copier.events.append("step")
            made.wait()
        assert path is not None
        coordinator(topology, root, parts, pattern_check="off").load_checkpoint(path)
    found = [_local(model.weight), _local(optimizer.state[model.weight]["momentum_buffer"])]
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    return copier.events


def _local(tensor: Any) -> torch.Tensor:
    return tensor._local_tensor.clone()


def test_what_goes_past_the_count_of_writes_is_not_noticed_and_harms_nothing_else(tmp_path: Path) -> None:
    """Documented: torch does not count what is written through `.data`. The copy has the old or the new value of that tensor."""
    with trained(tmp_path) as (trainee, made, copier):
        wanted = trainee.state()
        path = made.save_checkpoint(checkpoint_id="1")
        trainee.model[0].weight.data.add_(1)
        copier.go()
        made.wait()
        written = trainee.model[0].weight.detach().clone()
    assert path is not None
    assert verify_checkpoint(Path(path)) == []
    wanted["model"]["0.weight"] = written
    require_holds(path, wanted, width=WIDTH)


# Where the copy waits for the disk


def _fail_with_little_room(topology: Topology, root: Path) -> tuple[Any, float]:
    trainee = Trainee(1, width=1 << 15)  # 4 MiB a weight, of which there are six
    trainee.step()
    backend = Troubled("full", root, rank=1, at=2)
    options = {"saves": settings(overlap=True), "memory_budget_mib": staging(8), "pattern_check": "off"}
    made = coordinator(topology, root / "root", trainee.components("per_rank"), backend=backend, **options)
    made.save_checkpoint(checkpoint_id="1")
    began = time.monotonic()
    trainee.step()
    took_s = time.monotonic() - began
    said = error_of(made.wait)
    made.close()
    return said, took_s


def test_a_step_that_waits_for_room_goes_on_when_the_disk_is_full(tmp_path: Path) -> None:
    """Nobody would ever take what fills the memory."""
    ranks = run_ranks(2, _fail_with_little_room, tmp_path, agree_s=10.0)
    assert ranks[0][0] == ranks[1][0]
    assert ranks[0][0][0] == StorageError.__name__ and ranks[0][0][2] == 1
    assert max(took_s for _, took_s in ranks) < PATIENCE_S
    assert committed(tmp_path / "root") == []


def _save_twice_at_once(topology: Topology, root: Path, budget_mib: int | None) -> None:
    trainee = Trainee(1, width=LARGE)
    trainee.step()
    saves, delays = settings(overlap=True, when_busy="queue"), Random(1)
    run = trainee.coordinator(topology, root, saves, memory_budget_mib=staging(budget_mib))
    with Copier(delay=lambda: delays.uniform(0, 0.2)), run as made:
        for number in range(1, 7):
            torch.save(trainee.state(), root.parent / f"wanted-{number}")
            made.save_checkpoint(checkpoint_id=f"{number}")
            if number % 3 == 0:
                trainee.step()


@pytest.mark.parametrize("budget_mib", [1, None])
def test_two_saves_one_right_after_another_share_what_room_there_is(tmp_path: Path, budget_mib: int | None) -> None:
    """Nothing of the second is written before the first is over: it must not take the room that the first still needs."""
    run_ranks(1, _save_twice_at_once, tmp_path / "root", budget_mib, timeout_s=30.0)
    for number in range(1, 7):
        state = torch.load(tmp_path / f"wanted-{number}", weights_only=False)
        require_holds(tmp_path / "root" / f"checkpoint-{number}", state, width=LARGE)


# Any program


LARGE = 1 << 12
"""Of a `Trainee` whose state takes 2 MiB: one save does not fit the smaller budget below, and two do not fit the larger one."""
PROGRAMS = [(0, 1), (1, 3)]
"""Seeds and numbers of ranks of the default run."""
OPTIMIZERS: list[Callable[..., torch.optim.Optimizer]] = [torch.optim.AdamW, torch.optim.Adagrad]


def _train_at_random(topology: Topology, root: Path, seed: int) -> list[str]:
    """Steps, changes and saves in any order; the copier is slow at random. Rank 0 notes what each checkpoint should hold."""
    delays = Random(f"{seed} {topology.rank} delays")
    with Copier(delay=lambda: delays.uniform(0, 0.1) if delays.random() < 0.7 else 0.0):
        return _save_at_random(topology, root, seed)


def _save_at_random(topology: Topology, root: Path, seed: int) -> list[str]:
    random = Random(seed)
    own = Random(f"{seed} {topology.rank}")
    saves = settings(overlap=random.random() < 0.8, when_busy=random.choice(["wait", "queue", "skip"]))
    budget = staging(random.choice([None, 1, 3]))
    trainee = Trainee(1, OPTIMIZERS[seed % 2], LARGE)
    saved = []
    with trainee.coordinator(topology, root, saves, backend=random.choice(["zarr", "ocdbt", "file"]), memory_budget_mib=budget) as made:
        for number in range(1, 9):
            for _ in range(random.randrange(3)):
                trainee.step()
            trainee.forward().backward()
            state = trainee.state()
            if made.save_checkpoint(checkpoint_id=f"{number}") is not None:
                saved.append(f"checkpoint-{number}")
                if topology.is_lead:
                    torch.save(state, root.parent / f"wanted-{saved[-1]}")
            if own.random() < 0.3:
                time.sleep(own.uniform(0, 0.05))
            match random.randrange(5):
                case 0:
                    made.maybe_finalize()
                case 1:
                    made.wait()
                case 2:
                    made.wait_for_snapshot()
                    with torch.no_grad():
                        trainee.model[0].weight.mul_(1.5)
    return saved


@and_in_full(("seed", "ranks"), PROGRAMS, itertools.product(range(30), (1, 3)))
def test_every_checkpoint_of_any_program_holds_the_state_of_its_call(tmp_path: Path, seed: int, ranks: int) -> None:
    root = tmp_path / "root"
    first, *others = run_ranks(ranks, _train_at_random, root, seed, agree_s=20.0, timeout_s=45.0)
    assert all(one == first for one in others)
    assert committed(root) == first
    for name in first:
        state = torch.load(tmp_path / f"wanted-{name}", weights_only=False)
        require_holds(root / name, state, OPTIMIZERS[seed % 2], LARGE)
