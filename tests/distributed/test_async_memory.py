"""What saves in the background take: a copy of the state, kept from save to save, or as much as they are given."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ckpt import CheckpointCoordinator, StateComponent
from ckpt.backends.base import Backend
from ckpt.backends.zarr import ZarrBackend
from ckpt.dist_checkpointing import ShardedTensor
from ckpt.loading.direct import DirectLoad
from ckpt.memory.host import staging_memory
from ckpt.ranks.topology import Topology
from ckpt.saving.save_settings import SaveSettings
from ckpt.state.overlap import Optimizers
from ckpt.state.statefuls import OptimizerState
from recipes.benchmark.measuring import PeakMemory
from tests.support.async_runs import Troubled, committed, deadline, has_come, let_go, settings, until
from tests.support.ranks import run_ranks
from tests.support.states import Held, buffered, coordinator, random_bits, same_bits, sized, staging

BUFFER_MIB = 8
SLACK_MIB = 14  # Python's own, and what malloc keeps
STATE_MIB = 48
LARGEST_MIB = 4


def _state() -> dict[str, torch.Tensor]:
    """A third of it small tensors, one tensor transposed."""
    pool = (
        torch.arange(STATE_MIB << 18, dtype=torch.int32).mul_(-1640531535).view(torch.float32)
    )  # each element is another
    state = {f"large {n}": pool[n << 20 : n + 1 << 20].view(16, 1 << 16) for n in range(7)}
    state["turned"] = pool[7 << 20 : 8 << 20].view(1 << 9, 1 << 11).t()
    state |= {f"small {n}": pool[(8 << 20) + (n << 12) : (8 << 20) + (n + 1 << 12)] for n in range(1024)}
    return state


def _coordinator(
    topology: Topology, root: Path, state: dict[str, torch.Tensor], saves: SaveSettings, backend: Backend | None = None, **options: Any
) -> CheckpointCoordinator:
    return coordinator(
        topology,
        root,
        [StateComponent("model", Held(state), "per_rank")],
        backend=backend or buffered(ZarrBackend(), num_bytes=BUFFER_MIB << 20),
        strategy=sized(DirectLoad(), in_flight_bytes=8 << 20),
        pattern_check="off",
        saves=saves,
        **options,
    )


def _warm(topology: Topology, root: Path, saves: SaveSettings) -> None:
    """What is imported, started and made once is there when this returns."""
    with _coordinator(topology, root, {"w": torch.arange(9), "large": torch.zeros(1 << 16)}, saves) as made:
        made.save_checkpoint(checkpoint_id="1")


def _grown(topology: Topology, root: Path, saves: SaveSettings, num_saves: int, budget_mib: int | None = None) -> list[float]:
    """What each of several saves takes, in MiB, of which all but the first begin when the one before is over."""
    state = _state()
    _warm(topology, root / "tiny", saves)
    grown = []
    with _coordinator(topology, root, state, saves, memory_budget_mib=staging(budget_mib)) as made:
        for number in range(1, num_saves + 1):
            memory = PeakMemory()
            state["large 0"].view(torch.int32).add_(1)
            made.save_checkpoint(checkpoint_id=f"{number}")
            made.wait()
            grown.append(memory.mib())
    held = Held({key: torch.zeros_like(one) for key, one in state.items()})
    loader = coordinator(topology, root, [StateComponent("model", held, "per_rank")], pattern_check="off")
    loader.load_checkpoint(root / f"checkpoint-{num_saves}")
    assert held.loaded is not None and all(same_bits(held.loaded[key], one) for key, one in state.items())
    return grown


def test_a_save_over_budget_streams_part_by_part_through_what_it_is_given(tmp_path: Path) -> None:
    budget_mib = 12
    for grown in run_ranks(2, _grown, tmp_path, settings(), 2, budget_mib, is_only=True):
        assert max(grown) <= budget_mib + 2 * LARGEST_MIB + BUFFER_MIB + SLACK_MIB
        assert max(grown) < 0.9 * STATE_MIB


def test_the_memory_of_the_first_save_is_that_of_all_later_ones(tmp_path: Path) -> None:
    for first, *later in run_ranks(2, _grown, tmp_path, settings(), 3, is_only=True):
        assert first <= STATE_MIB + 2 * LARGEST_MIB + BUFFER_MIB + SLACK_MIB
        assert max(later) <= 2 * LARGEST_MIB + SLACK_MIB


def _two_at_once(topology: Topology, root: Path, notes: Path) -> tuple[float, float]:
    state = _state()
    saves = settings(when_busy="queue")
    _warm(topology, root / "tiny", saves)
    with _coordinator(topology, root, state, saves, Troubled("waits", notes, checkpoint_id="1")) as made:
        memory = PeakMemory()
        made.save_checkpoint(checkpoint_id="1")
        until(lambda: has_come(notes, "1", topology.rank))
        state["large 0"].view(torch.int32).add_(1)
        made.save_checkpoint(checkpoint_id="2")
        assert made.num_pending == 2 and committed(root) == []
        state["large 0"].view(torch.int32).add_(1)
        let_go(notes)
        made.wait()
        both = memory.mib()
        memory = PeakMemory()
        made.save_checkpoint(checkpoint_id="3")
        made.wait()
        third = memory.mib()
    for number in (1, 2, 3):
        held = Held({key: torch.zeros_like(one) for key, one in state.items()})
        loader = coordinator(topology, root, [StateComponent("model", held, "per_rank")], pattern_check="off")
        loader.load_checkpoint(root / f"checkpoint-{number}")
        wanted = state["large 0"].view(torch.int32) - (3 - number)
        assert held.loaded is not None
        assert torch.equal(held.loaded["large 0"].view(torch.int32), wanted)
        assert all(same_bits(held.loaded[key], one) for key, one in state.items() if key != "large 0")
    return both, third


def test_two_saves_in_flight_take_two_copies_and_a_third_takes_none(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    for both, third in run_ranks(2, _two_at_once, tmp_path / "root", notes):
        assert both <= 2 * STATE_MIB + 2 * LARGEST_MIB + 32 + SLACK_MIB
        assert third <= 2 * LARGEST_MIB + SLACK_MIB


def _with_tensors_over_budget(topology: Topology, root: Path, notes: Path) -> None:
    """There is room for one of them at a time, in memory that is used again and again; and whoever writes takes its time."""
    state = {f"w{n}": random_bits((1 << 20,), torch.float32, 9 * topology.rank + n) for n in range(5)}
    state["b"] = torch.zeros(0, 3)
    wanted = {key: one.clone() for key, one in state.items()}
    slow = Troubled("dawdles", notes, checkpoint_id=None)
    with _coordinator(topology, root, state, settings(), slow, memory_budget_mib=staging(1)) as made:
        path = made.save_checkpoint(checkpoint_id="1")
        for tensor in state.values():
            tensor.zero_()
        made.wait()
    assert path is not None
    held = Held({key: torch.ones_like(one) for key, one in state.items()})
    loader = coordinator(topology, root, [StateComponent("model", held, "per_rank")], pattern_check="off")
    loader.load_checkpoint(path)
    assert held.loaded is not None and all(same_bits(held.loaded[key], one) for key, one in wanted.items())


def test_chunks_that_are_larger_than_the_budget_are_saved_all_the_same(tmp_path: Path) -> None:
    run_ranks(2, _with_tensors_over_budget, tmp_path / "root", tmp_path)


def _send_parts(topology: Topology, root: Path, wanted: list[torch.Tensor]) -> None:
    """Shards whose borders are no chunks', in each of several arrays, and room for one chunk."""
    first, end = ((0, 7), (7, 48))[topology.rank]
    state = {
        f"w{n}": ShardedTensor.at(f"w{n}", one[first:end].clone(), tuple(one.shape), (first, 0))
        for n, one in enumerate(wanted)
    }
    parts = [StateComponent("model", Held(state), "sharded")]
    with coordinator(topology, root, parts, pattern_check="off", saves=settings(), memory_budget_mib=staging(1)) as made:
        made.save_checkpoint(checkpoint_id="1")
        for one in state.values():
            one.data.zero_()


def test_parts_of_chunks_are_sent_to_other_ranks_before_there_is_room_for_the_rest(tmp_path: Path) -> None:
    wanted = [random_bits((48, 5000), torch.float32, n) for n in range(8)]
    run_ranks(2, _send_parts, tmp_path, wanted, timeout_s=45.0)
    held = Held({f"w{n}": torch.zeros_like(one) for n, one in enumerate(wanted)})
    alone = coordinator(Topology.alone(), tmp_path, [StateComponent("model", held, "sharded")])
    alone.load_checkpoint()
    assert held.loaded is not None and all(same_bits(held.loaded[f"w{n}"], one) for n, one in enumerate(wanted))


def test_a_state_of_nothing_but_tiny_tensors_has_room(tmp_path: Path) -> None:
    state = {f"{n}": torch.arange(n, n + 1 + n % 5) for n in range(3000)}
    wanted = {key: one.clone() for key, one in state.items()}
    with _coordinator(Topology.alone(), tmp_path, state, settings()) as made:
        path = made.save_checkpoint(checkpoint_id="1")
        for tensor in state.values():
            tensor.zero_()
    assert path is not None
    held = Held({key: torch.zeros_like(one) for key, one in state.items()})
    coordinator(Topology.alone(), tmp_path, [StateComponent("model", held, "per_rank")]).load_checkpoint(path)
    assert held.loaded is not None and all(same_bits(held.loaded[key], one) for key, one in wanted.items())


def test_memory_too_small_for_the_next_save_is_made_anew_once_nothing_is_written_from_it(
    tmp_path: Path,
) -> None:
    """Two saves are queued, of which the second is four times as large: the first keeps its bytes until they are written."""
    notes = tmp_path / "notes"
    notes.mkdir()
    state = {"w": random_bits((1 << 18,), torch.float32, 1)}
    held = Held(state)
    made = coordinator(
        Topology.alone(),
        tmp_path,
        [StateComponent("model", held, "per_rank")],
        backend=Troubled("waits", notes),
        saves=settings(when_busy="queue"),
    )
    with made, deadline(60):
        made.save_checkpoint(checkpoint_id="1")
        until(lambda: has_come(notes, "1"))
        held.state = {f"w{n}": random_bits((1 << 18,), torch.float32, n) for n in range(2, 10)}
        threading.Timer(0.5, let_go, [notes]).start()
        made.save_checkpoint(checkpoint_id="2")
        made.save_checkpoint(checkpoint_id="3")
        made.wait()
        made.save_checkpoint(checkpoint_id="4")
    for number, wanted in ((1, state), (2, held.state), (3, held.state), (4, held.state)):
        found = Held({key: torch.zeros_like(one) for key, one in wanted.items()})
        loader = coordinator(Topology.alone(), tmp_path, [StateComponent("model", found, "per_rank")])
        loader.load_checkpoint(tmp_path / f"checkpoint-{number}")
        assert found.loaded is not None and all(same_bits(found.loaded[key], one) for key, one in wanted.items())


def _trainee() -> tuple[list[StateComponent], torch.optim.Optimizer]:
    """A module of 16 MiB and its optimizer, whose moments take another 32 MiB from its first step on."""
    module = torch.nn.Linear(2048, 2048, bias=False)
    optimizer = torch.optim.AdamW(module.parameters())
    return [
        StateComponent("model", module, "replicated"),
        StateComponent("optimizer", OptimizerState(optimizer, module), "replicated"),
    ], optimizer


def _stepped(optimizer: torch.optim.Optimizer) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_the_memory_of_the_first_save_is_there_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(
        "ckpt.saving.background.background.staging_memory", lambda size: made.append(size) or staging_memory(size)
    )
    components, optimizer = _trainee()
    with coordinator(Topology.alone(), tmp_path, components, saves=settings()) as one:
        warming = one._background._warming
        assert warming is not None
        warming.join()
        assert len(made) == 1 and 48 << 20 <= made[0] <= 52 << 20
        _stepped(optimizer)
        one.save_checkpoint(checkpoint_id="1")
        one.wait()
    assert len(made) == 1, "the first save uses it"


def test_the_memory_of_the_first_save_keeps_within_its_budget(tmp_path: Path) -> None:
    components, _ = _trainee()
    with coordinator(Topology.alone(), tmp_path, components, saves=settings(), memory_budget_mib=staging(8)) as one:
        one._background._warming.join()
        assert one._background._arena.num_bytes == 8 << 20


def test_a_first_save_finds_memory_of_its_own_where_there_was_none_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[int] = []

    def refuse_once(num_bytes: int) -> torch.Tensor:
        if not refused:
            refused.append(num_bytes)
            raise MemoryError("none for now")
        return staging_memory(num_bytes)

    monkeypatch.setattr("ckpt.saving.background.background.staging_memory", refuse_once)
    components, _ = _trainee()
    with coordinator(Topology.alone(), tmp_path, components, saves=settings()) as one:
        one._background._warming.join()
        one.save_checkpoint(checkpoint_id="1")
        one.wait()
        assert refused and one.last_save is not None


def test_the_share_of_a_save_is_foreseen_from_optimizers_and_placements() -> None:
    components, optimizer = _trainee()
    foreseen = Optimizers(components).foreseen_bytes
    assert [foreseen(1), foreseen(4)] == [48 << 20, 12 << 20]
    _stepped(optimizer)
    assert [foreseen(1), foreseen(4)] == [(48 << 20) + 4, (12 << 20) + 1], "the number of steps is a tensor, too"
    run_ranks(4, _require_foreseen, process_group=True)


@pytest.mark.parametrize(
    ("make", "tensors"),
    [
        (partial(torch.optim.AdamW, lr=0.1), 3),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), 2),
        (partial(torch.optim.SGD, lr=0.1), 1),
    ],
)
def test_as_many_states_are_foreseen_as_the_optimizer_makes(make: Callable[..., Any], tensors: int) -> None:
    parameter = torch.nn.Parameter(torch.ones(1 << 10))
    one = Optimizers([StateComponent("optimizer", make([parameter]), "replicated")])
    before = one.foreseen_bytes(1)
    parameter.grad = torch.ones_like(parameter)
    one._optimizers[0].step()
    assert before == tensors << 12 and before <= one.foreseen_bytes(1) <= before + 8


def test_parameters_without_memory_of_their_own_yet_are_not_foreseen(tmp_path: Path) -> None:
    lazy = torch.nn.LazyLinear(3)
    sparse = torch.nn.Parameter(torch.ones(4, 4).to_sparse())
    one = Optimizers([StateComponent("optimizer", torch.optim.SGD([*lazy.parameters(), sparse]), "replicated")])
    assert one.foreseen_bytes(1) == 0
    parts = [StateComponent("model", lazy, "replicated")]
    parts += [StateComponent("optimizer", OptimizerState(torch.optim.SGD(lazy.parameters()), lazy), "replicated")]
    with coordinator(Topology.alone(), tmp_path, parts, saves=settings()) as made:
        lazy(torch.ones(2, 5))
        made.save_checkpoint(checkpoint_id="1")
        made.wait()
        assert made.last_save is not None


def _require_foreseen(topology: Topology) -> None:
    """Rows in halves on two ranks, each half on two: a rank holds 512 KiB of each tensor, and writes half of them."""
    mesh = init_device_mesh("cpu", (2, 2))
    parameter = torch.nn.Parameter(distribute_tensor(torch.ones(256, 1024), mesh, [Replicate(), Shard(0)]))
    optimizer = torch.optim.SGD([parameter], momentum=0.9)
    one = Optimizers([StateComponent("optimizer", optimizer, "sharded")])
    assert one.foreseen_bytes(4) == 2 * 256 << 10
    parameter.grad = parameter.detach().clone()
    optimizer.step()
    assert one.foreseen_bytes(4) == 2 * 256 << 10
