"""Two-stage loads between hosts through the engine's own groups: without torch's default one, two blocks at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import CheckpointCoordinator, StateComponent
from ckpt.backends.kimi_engine import KimiEngineBackend
from ckpt.backends.zarr import ZarrBackend
from ckpt.engine.wire.load_transport import EngineTransport
from ckpt.errors import CheckpointError, ConfigurationError
from ckpt.loading.two_stage.two_stage import TwoStageLoad
from ckpt.ranks.topology import Topology
from tests.support.ranks import run_ranks
from tests.support.states import Held, coordinator, cpu, random_bits, same_bits, sized, spreading

SHAPES = {f"w{number}": (257, 4001 + number) for number in range(6)}
"""Of 3.9 MiB each: all of them are several blocks of 4 MiB, which are read and checked as one, for each of three hosts."""


def state() -> dict[str, torch.Tensor]:
    """Any bits at all, other ones in each tensor."""
    bits = random_bits((max(rows * width for rows, width in SHAPES.values()) + len(SHAPES),), torch.float32, seed=5)
    return {
        name: bits[n : n + rows * width].view(rows, width).clone()
        for n, (name, (rows, width)) in enumerate(SHAPES.items())
    }


def made(topology: Topology, root: Path, held: dict[str, torch.Tensor], **options: Any) -> CheckpointCoordinator:
    components = [StateComponent("model", Held(held), "replicated")]
    return coordinator(topology, root, components, pattern_check="off", **options)


def saved(topology: Topology, root: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A checkpoint that nobody holds in memory; returns what it holds, and as much of zeros."""
    wanted = state()
    with made(topology, root, wanted, backend=KimiEngineBackend(pool=False)) as checkpoints:
        checkpoints.save_checkpoint(checkpoint_id="1")
    return wanted, {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}


def require_same(held: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    differing = [name for name, tensor in wanted.items() if not same_bits(held[name], tensor)]
    assert not differing


def load_three_times(topology: Topology, root: Path, options: dict[str, Any]) -> None:
    assert not torch.distributed.is_initialized()
    wanted, held = saved(topology, root)
    size = sum(tensor.nbytes for tensor in wanted.values())
    strategy = spreading(**options)
    with made(topology, root, held, backend=KimiEngineBackend(), strategy=strategy) as checkpoints:
        for _ in range(3):
            for tensor in held.values():
                tensor.zero_()
            checkpoints.load_checkpoint()
            require_same(held, wanted)
            assert checkpoints.last_load is not None and checkpoints.last_load.bytes_read == size


@pytest.mark.parametrize(
    "nodes", [[2, 1], pytest.param([1, 1], marks=pytest.mark.full), pytest.param([2, 2, 1], marks=pytest.mark.full)]
)
def test_a_checkpoint_is_read_once_for_all_hosts_without_a_default_group(tmp_path: Path, nodes: Sequence[int]) -> None:
    run_ranks(sum(nodes), load_three_times, tmp_path, {"in_flight_bytes": 8 << 20}, nodes=nodes)


def fail_and_load_again(topology: Topology, root: Path) -> float:
    wanted, held = saved(topology, root)
    reads = 0

    def failing(fd: int, buffers: Sequence[memoryview], at: int) -> int:
        nonlocal reads
        reads += 1
        if fails and topology.rank == 1 and reads == 2:
            raise OSError(5, "Input/output error")
        return os.preadv(fd, buffers, at)

    strategy = sized(TwoStageLoad(read_at=failing), in_flight_bytes=8 << 20)
    with made(topology, root, held, backend=KimiEngineBackend(), strategy=strategy) as checkpoints:
        fails = False
        checkpoints.load_checkpoint()
        first = strategy._transports._engine
        reads, fails = 0, True
        began = time.monotonic()
        with pytest.raises(CheckpointError, match=r"rank 1.*Input/output error"):
            checkpoints.load_checkpoint(root / "checkpoint-1")
        took = time.monotonic() - began
        fails = False
        checkpoints.load_checkpoint()
        require_same(held, wanted)
        assert isinstance(first, EngineTransport) and strategy._transports._engine is not first
    return took


def test_a_rank_that_fails_ends_the_load_of_all_and_the_next_goes_through_new_groups(tmp_path: Path) -> None:
    assert max(run_ranks(3, fail_and_load_again, tmp_path, nodes=[1, 1, 1])) < 20


def die_in_the_middle(topology: Topology, root: Path) -> float:
    _, held = saved(topology, root)

    def dying(fd: int, buffers: Sequence[memoryview], at: int) -> int:
        if topology.rank == 1 and at > 4_000_000:
            os._exit(3)
        return os.preadv(fd, buffers, at)

    strategy = sized(TwoStageLoad(read_at=dying), in_flight_bytes=8 << 20)
    with made(topology, root, held, backend=KimiEngineBackend(), strategy=strategy) as checkpoints:
        began = time.monotonic()
        with pytest.raises(CheckpointError, match="rank 1"):
            checkpoints.load_checkpoint(root / "checkpoint-1")
        return time.monotonic() - began


def test_a_rank_that_dies_in_the_middle_is_named_and_nobody_hangs(tmp_path: Path) -> None:
    took = run_ranks(3, die_in_the_middle, tmp_path, nodes=[1, 1, 1], expect_dead=[1], agree_s=10.0)
    assert max(seconds for seconds in took if isinstance(seconds, float)) < 20


class Recorded:
    """Passes blocks on, and notes when each is begun, and waited for."""

    def __init__(self, transport: EngineTransport) -> None:
        self.transport = transport
        self.under_way = self.most = 0

    def begin(self, buffer: torch.Tensor, source: int, to: Sequence[int]) -> Callable[[], None]:
        wait = self.transport.begin(buffer, source, to)
        self.under_way += 1
        self.most = max(self.most, self.under_way)

        def finish() -> None:
            wait()
            self.under_way -= 1

        return finish


def count_under_way(topology: Topology, root: Path) -> int:
    wanted, held = saved(topology, root)
    store = topology.store_for("test")
    assert store is not None
    engine = EngineTransport(store, "test", topology.rank, device=cpu(), timeout_s=20.0)
    recorded = Recorded(engine)
    strategy = spreading(in_flight_bytes=32 << 20, transport=recorded)
    with made(topology, root, held, backend=ZarrBackend(), strategy=strategy) as checkpoints:
        checkpoints.load_checkpoint()
    require_same(held, wanted)
    assert recorded.under_way == 0
    engine.close()
    return recorded.most


def test_two_blocks_are_on_their_way_at_a_time(tmp_path: Path) -> None:
    assert run_ranks(2, count_under_way, tmp_path, nodes=[1, 1]) == [2, 2]


def test_a_transport_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="transport=pigeon of TwoStageLoad: expected torch or engine"):
        TwoStageLoad(transport="pigeon")
