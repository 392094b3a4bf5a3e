"""Everything on a device comes late, and what was let go of is overwritten: no wait of a save or a load may be missing.

On the stand-in a copy begins half a second after it was asked for, unless somebody waits for it, and memory that is new or was let go of
is filled with a pattern. So a wait that is left out shows as wrong bytes: at the start (what the program had queued is not in the
checkpoint, or comes after the load), in the middle (pinned memory or a bucket is used again too early) and at the end (bytes that are
not there yet).
"""

from __future__ import annotations

import functools
import itertools
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import dist_checkpointing
from ckpt.dist_checkpointing import ShardedTensor
from ckpt.dist_checkpointing.strategies.tensorstore import (
    TensorStoreLoadShardedStrategy,
    TensorStoreSaveShardedStrategy,
)
from ckpt.dist_checkpointing.strategies.zarr import ZarrLoadShardedStrategy, ZarrSaveShardedStrategy
from ckpt.errors import CorruptCheckpointError, ReplicationError
from ckpt.loading.direct import DirectLoad
from ckpt.loading.strategy import LoadingStrategy
from ckpt.ranks.default_topology import use_topology
from ckpt.ranks.topology import Topology
from ckpt.saving.background.async_utils import AsyncCallsQueue, AsyncRequest
from ckpt.state.state_digest import state_digest
from tests.device.devices import ADVERSARY, CUDA, NPU, why_too_many
from tests.device.memory import AWKWARD, Kind, Memory, require_same, state_of, tiny, values_of
from tests.device.saves import Saved, coordinator, require_saved, torch_device
from tests.support.covering import and_in_full, sampled
from tests.support.ranks import run_ranks
from tests.support.states import Fitted, random_bits, sized, spreading

pytestmark = pytest.mark.parametrize("device", [NPU, CUDA])

TWO_STAGE = {
    "one host": ([2], True),
    "two hosts": ([1, 1], True),
    "one host, by the device": ([2], False),
    "two hosts, by the device": ([1, 1], False),
}
"""Ranks per host, and `cpu_transfer`."""


class Undisturbed:
    """What a save or load leaves as it was: the current device and stream, and the device's memory."""

    def __init__(self, device: str) -> None:
        self._module = torch.get_device_module(device)

    def __enter__(self) -> None:
        self._before = self._state()

    def __exit__(self, *raised: object) -> None:
        assert self._state() == self._before, f"{self._state()} != {self._before}"

    def _state(self) -> tuple[Any, ...]:
        count = self._module.device_count()
        return (
            self._module.current_device(),
            [self._module.current_stream(at) for at in range(count)],
            [self._module.memory_allocated(at) for at in range(count)],
        )


# Saves


@and_in_full(
    ("backend", "pinned_mib"), [("zarr", 32), ("ocdbt", 1)], itertools.product(["zarr", "ocdbt", "safetensors"], [32, 1])
)
def test_a_save_holds_what_was_on_its_way_when_it_began_and_nothing_later(
    tmp_path: Path, device: str, backend: str, pinned_mib: int
) -> None:
    """Three saves, one right after another, through the same pinned memory; on the stream in use, on others, on that in use."""
    (paths,) = run_ranks(
        1, _change_and_save, tmp_path, device, backend, pinned_mib, device=device, environment=ADVERSARY
    )  # fmt: skip
    for seed, path in zip((2, 3, 4), paths, strict=True):
        require_saved(path, AWKWARD, seed)


def _change_and_save(topology: Topology, root: Path, device: str, backend: str, pinned_mib: int) -> list[str]:
    memory = Memory(AWKWARD, 1, torch_device(device, topology))
    made = coordinator(topology, root, Fitted(memory.tensors()), device=device, backend=backend, pinned_mib=pinned_mib)
    paths = []
    for seed in (2, 3, 4):
        memory.change(seed, on_new_streams=seed == 3)
        with Undisturbed(device):
            paths.append(made.save_checkpoint(checkpoint_id=f"{seed}"))
    memory.change(5)
    return paths


def test_ranks_compare_and_save_what_was_on_its_way_to_each(tmp_path: Path, device: str) -> None:
    """The copies are equal only once they have arrived; a look at all bits after the write finds nothing changed."""
    paths = run_ranks(2, _change_and_save_replicas, tmp_path, device, device=device, environment=ADVERSARY)
    require_saved(paths[0], AWKWARD, 2)


def _change_and_save_replicas(topology: Topology, root: Path, device: str) -> str:
    memory = Memory(AWKWARD, topology.rank, torch_device(device, topology))
    validated = {"validate_replication": True, "validation_level": "full"}
    made = coordinator(topology, root, Fitted(memory.tensors()), device=device, component=validated)
    memory.change(2, on_new_streams=True)
    path = made.save_checkpoint(checkpoint_id="1")
    memory.change(2 + topology.rank, on_new_streams=True)
    with pytest.raises(ReplicationError, match="component model .* on rank 1"):
        made.save_checkpoint(checkpoint_id="2")
    return path


def test_views_that_are_no_memory_of_their_own_are_saved_as_what_they_stand_for(tmp_path: Path, device: str) -> None:
    (path,) = run_ranks(1, _save_views, tmp_path, device, device=device, environment=ADVERSARY)
    held = Fitted({key: torch.empty_like(one) for key, one in views(torch.device("cpu")).items()})
    coordinator(Topology.alone(), tmp_path, held).load_checkpoint(path)
    assert held.loaded is not None
    require_same(
        held.loaded, {key: one.resolve_conj().resolve_neg() for key, one in views(torch.device("cpu")).items()}
    )


def views(device: torch.device) -> dict[str, torch.Tensor]:
    """Of 4 MiB and more, and of few bytes."""
    found: dict[str, torch.Tensor] = {}
    for name, rows in {"large": 1 << 10, "small": 3}.items():
        matrix = torch.arange(1024.0 * rows).view(rows, 1024).to(device)
        complex_ones = torch.complex(matrix, matrix + 0.5)
        found |= {
            f"{name}, expanded": matrix[0].expand(rows, 1024),
            f"{name}, conjugated": complex_ones.conj(),
            f"{name}, conjugated and transposed": complex_ones.t().conj(),
            f"{name}, imaginary of the conjugated": complex_ones.conj().imag,
        }
    return found


def _save_views(topology: Topology, root: Path, device: str) -> str:
    held = Fitted(views(torch_device(device, topology)))
    return coordinator(topology, root, held, device=device).save_checkpoint(checkpoint_id="1")


def test_a_digest_is_that_of_what_was_on_its_way(tmp_path: Path, device: str) -> None:
    (found,) = run_ranks(1, _digest, device, device=device, environment=ADVERSARY)
    assert found == state_digest({"model": Fitted(state_of(AWKWARD, 2))}, Topology.alone())


def _digest(topology: Topology, device: str) -> str:
    memory = Memory(AWKWARD, 1, torch_device(device, topology))
    memory.change(2)
    return state_digest({"model": Fitted(memory.tensors())}, topology)


# Loads


@pytest.mark.parametrize(
    "backend", ["zarr", "zstd", *(pytest.param(name, marks=pytest.mark.full) for name in ("ocdbt", "safetensors"))]
)
def test_a_direct_load_comes_after_all_that_was_queued_and_is_over_when_it_returns(
    saved: Saved, device: str, backend: str
) -> None:
    paths = [saved(AWKWARD, seed, backend) for seed in (2, 3)]
    run_ranks(1, _load, paths, device, None, device=device, environment=ADVERSARY)


@and_in_full(
    ("hosts", "backend"),
    [("two hosts", "zstd"), ("one host, by the device", "zarr")],
    itertools.product(TWO_STAGE, ["zarr", "zstd"]),
)
def test_a_load_in_two_stages_comes_after_all_that_was_queued_and_is_over_when_it_returns(
    saved: Saved, device: str, backend: str, hosts: str
) -> None:
    paths = [saved(AWKWARD, seed, backend) for seed in (2, 3)]
    nodes, cpu_transfer = TWO_STAGE[hosts]
    run_ranks(
        2, _load, paths, device, cpu_transfer, nodes=nodes, process_group=True, device=device, environment=ADVERSARY
    )  # fmt: skip


def _load(topology: Topology, paths: list[Path], device: str, cpu_transfer: bool | None) -> None:
    """Loads one right after the other through the same memory, after changes on the stream in use and on others."""
    memory = Memory(AWKWARD, 1, torch_device(device, topology))
    loader = coordinator(
        topology, paths[0].parent, Fitted(memory.tensors()), device=device, strategy=_strategy(cpu_transfer)
    )
    for on_new_streams, some in ((False, paths), (True, paths[:1])):
        memory.change(7, on_new_streams=on_new_streams)
        for seed, path in enumerate(some, 2):
            with Undisturbed(device):
                loader.load_checkpoint(path)
            memory.require_filled(values_of(AWKWARD, seed), around=7)


def _strategy(cpu_transfer: bool | None) -> LoadingStrategy:
    """Directly, or in two stages through as few slots as there may be."""
    if cpu_transfer is None:
        return sized(DirectLoad(), in_flight_bytes=1 << 20)
    return spreading(cpu_transfer=cpu_transfer, in_flight_bytes=8 << 20)


def test_an_optional_component_is_whole_when_the_load_returns(saved: Saved, device: str) -> None:
    run_ranks(1, _load_optional, saved(AWKWARD, 2), device, device=device, environment=ADVERSARY)


def _load_optional(topology: Topology, path: Path, device: str) -> None:
    memory = Memory(AWKWARD, 1, torch_device(device, topology))
    optional = {"required": False}
    loader = coordinator(topology, path.parent, Fitted(memory.tensors()), device=device, component=optional)
    memory.change(7, on_new_streams=True)
    loader.load_checkpoint(path)
    memory.require_filled(values_of(AWKWARD, 2), around=7)


@pytest.mark.parametrize(
    "cpu_transfer",
    [
        pytest.param(None, id="direct"),
        pytest.param(True, id="two-stage", marks=pytest.mark.full),
        pytest.param(False, id="two-stage by the device"),
    ],
)
def test_a_load_that_fails_leaves_no_copy_under_way(
    tmp_path: Path, saved: Saved, device: str, cpu_transfer: bool | None
) -> None:
    """The last block of the largest file is damaged: those before it may be on their way when that is found."""
    path = tmp_path / "checkpoint-2"
    shutil.copytree(saved(AWKWARD, 2), path)
    largest = max((one for one in path.rglob("*") if one.is_file()), key=lambda one: one.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[-100] ^= 1
    largest.write_bytes(data)
    run_ranks(
        2, _load_in_vain, path, device, cpu_transfer, process_group=True, device=device, environment=ADVERSARY
    )  # fmt: skip


def _load_in_vain(topology: Topology, path: Path, device: str, cpu_transfer: bool | None) -> None:
    memory = Memory(AWKWARD, 1, torch_device(device, topology))
    loader = coordinator(topology, path.parent, Fitted(memory.tensors()), device=device, strategy=_strategy(cpu_transfer))
    with pytest.raises(CorruptCheckpointError):
        loader.load_checkpoint(path)
    memory.change(8, late=False, on_new_streams=True)
    memory.require_filled(values_of(AWKWARD, 8), around=8)


# Other places, other sizes


def test_tensors_of_several_devices_and_of_the_host_are_one_state(tmp_path: Path, saved: Saved, device: str) -> None:
    if reason := why_too_many(device, 2):
        pytest.skip(reason)
    (path,) = run_ranks(
        1, _load_and_save_on_two, saved(AWKWARD, 2), tmp_path, device, device=device, environment=ADVERSARY
    )  # fmt: skip
    require_saved(path, AWKWARD, 3)


def _load_and_save_on_two(topology: Topology, path: Path, root: Path, device: str) -> str:
    memory = Memory(AWKWARD, 1, *(torch.device(one) for one in (f"{device}:1", f"{device}:0", "cpu")))
    made = coordinator(topology, root, Fitted(memory.tensors()), device=device)
    memory.change(7, on_new_streams=True)
    with Undisturbed(device):
        made.load_checkpoint(path)
    memory.require_filled(values_of(AWKWARD, 2), around=7)
    memory.change(3, on_new_streams=True)
    with Undisturbed(device):
        return made.save_checkpoint(checkpoint_id="3")


def test_a_thread_whose_current_device_is_another_one_saves_and_loads_all_the_same(
    tmp_path: Path, saved: Saved, device: str
) -> None:
    """Each thread has a current device of its own, which is the first one; this rank's is the second."""
    paths = run_ranks(
        2, _load_and_save_in_a_thread, saved(AWKWARD, 2), tmp_path, device, device=device, environment=ADVERSARY
    )  # fmt: skip
    require_saved(paths[0], AWKWARD, 3)


def _load_and_save_in_a_thread(topology: Topology, path: Path, root: Path, device: str) -> str:
    memory = Memory(AWKWARD, 1, torch_device(device, topology))
    made = coordinator(topology, root, Fitted(memory.tensors()), device=device)
    outcomes: list[Any] = []

    def load_and_save() -> None:
        try:
            made.load_checkpoint(path)
            memory.require_filled(values_of(AWKWARD, 2), around=7)
            memory.change(3, on_new_streams=True)
            outcomes.append(made.save_checkpoint(checkpoint_id="3"))
        except BaseException as error:
            outcomes.append(error)

    memory.change(7)
    thread = threading.Thread(target=load_and_save)
    thread.start()
    thread.join()
    if isinstance(outcomes[0], BaseException):
        raise outcomes[0]
    return str(outcomes[0])


@pytest.mark.full
def test_very_many_small_tensors_travel_together(tmp_path: Path, saved: Saved, device: str) -> None:
    many = tiny(20_000)
    (path,) = run_ranks(
        1, _load_and_save_many, saved(many, 2), tmp_path, device, device=device, environment=ADVERSARY
    )  # fmt: skip
    require_saved(path, many, 3)


def _load_and_save_many(topology: Topology, path: Path, root: Path, device: str) -> str:
    many = tiny(20_000)
    memory = Memory(many, 1, torch_device(device, topology))
    made = coordinator(topology, root, Fitted(memory.tensors()), device=device)
    made.load_checkpoint(path)
    memory.require_filled(values_of(many, 2), around=1)
    memory.change(3, late=False)
    return made.save_checkpoint(checkpoint_id="3")


# Parts of what was saved


MATRICES = {
    "f32": (300, 1100, torch.float32),
    "bf16": (301, 1003, torch.bfloat16),
    "few rows": (7, 50_001, torch.float32),
    "fp8": (300, 311, torch.float8_e4m3fn),
    "bool": (77, 131, torch.bool),
    "complex": (50, 61, torch.complex64),
}
"""Global tensors: rows, columns, data type."""


def matrices() -> dict[str, torch.Tensor]:
    return {
        key: random_bits((rows, columns), dtype, n) for n, (key, (rows, columns, dtype)) in enumerate(MATRICES.items())
    }


def cuts(rank: int, ranks: int) -> dict[str, tuple[str, tuple[int, int], tuple[int, int], str]]:
    """What a rank holds of them: name -> (matrix, offset, shape, how it lies). Columns, rows, and all of it on every rank."""
    found: dict[str, tuple[str, tuple[int, int], tuple[int, int], str]] = {}
    lies = itertools.cycle(("dense", "transposed", "inside"))
    for key, (rows, columns, _) in MATRICES.items():
        first, last = columns * rank // ranks, columns * (rank + 1) // ranks
        top, bottom = rows * rank // ranks, rows * (rank + 1) // ranks
        for number in range(2):
            found[f"columns of {key}, {number}"] = key, (0, first), (rows, last - first), next(lies)
        found[f"rows of {key}"] = key, (top, 0), (bottom - top, columns), next(lies)
        found[f"all of {key}"] = key, (0, 0), (rows, columns), next(lies)
    return found


def _lying(dtype: torch.dtype, shape: tuple[int, int], lies: str) -> Kind:
    rows, columns = shape
    if lies == "transposed":
        return Kind(dtype, rows * columns, lambda flat: flat.view(columns, rows).t())
    if lies == "inside":
        wide = columns + 3
        return Kind(dtype, (rows + 2) * wide, lambda flat: flat.view(rows + 2, wide)[1:-1, 1:-2])
    return Kind(dtype, rows * columns, lambda flat: flat.view(rows, columns))


class Pieces:
    """A rank's pieces of the matrices, in device memory."""

    def __init__(self, topology: Topology, device: str) -> None:
        self._cuts = cuts(topology.rank, topology.world_size)
        kinds = {name: _lying(MATRICES[key][2], shape, lies) for name, (key, _, shape, lies) in self._cuts.items()}
        self.memory = Memory(kinds, 1, torch_device(device, topology))

    def sharded(self) -> dict[str, ShardedTensor]:
        tensors = self.memory.tensors()
        return {
            name: ShardedTensor.at(name, tensors[name], MATRICES[key][:2], offset)
            for name, (key, offset, _, _) in self._cuts.items()
        }

    def values(self) -> dict[str, torch.Tensor]:
        whole = matrices()
        return {
            name: whole[key][top : top + rows, left : left + columns]
            for name, (key, (top, left), (rows, columns), _) in self._cuts.items()
        }


@pytest.fixture(scope="module")
def saved_whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a checkpoint of whole matrices, under every name that a rank holds a piece by; once of each backend."""

    @functools.cache
    def save(backend: str) -> Path:
        whole = matrices()
        held = Fitted({name: whole[key] for name, (key, _, _, _) in cuts(0, 2).items()})
        host = coordinator(Topology.alone(), tmp_path_factory.mktemp("whole"), held, backend=backend)
        return Path(host.save_checkpoint(checkpoint_id="1"))

    return save


@and_in_full(
    ("strategy", "backend"),
    [("direct", "zarr"), ("one host", "ocdbt"), ("two hosts, by the device", "safetensors")],
    itertools.product(["direct", *TWO_STAGE], ["zarr", "ocdbt", "safetensors"]),
)
def test_every_cut_of_a_tensor_is_loaded_into_device_memory(
    saved_whole: Callable[[str], Path], device: str, backend: str, strategy: str
) -> None:
    nodes, cpu_transfer = TWO_STAGE.get(strategy, ([2], None))
    run_ranks(
        2, _load_pieces, saved_whole(backend), device, cpu_transfer,
        nodes=nodes, process_group=True, device=device, environment=ADVERSARY,
    )  # fmt: skip


def _load_pieces(topology: Topology, path: Path, device: str, cpu_transfer: bool | None) -> None:
    pieces = Pieces(topology, device)
    loader = coordinator(
        topology, path.parent, Fitted(pieces.sharded()), device=device, strategy=_strategy(cpu_transfer),
        pattern="sharded",
    )  # fmt: skip
    pieces.memory.change(7, on_new_streams=True)
    loader.load_checkpoint(path)
    pieces.memory.require_filled(pieces.values(), around=7)


# The same of dist_checkpointing.save and dist_checkpointing.load


FORMATS: dict[str, tuple[Any, Any]] = {
    "zarr": (ZarrSaveShardedStrategy, ZarrLoadShardedStrategy),
    "tensorstore": (TensorStoreSaveShardedStrategy, TensorStoreLoadShardedStrategy),
}


@sampled(("form", "in_background"), [("zarr", False), ("tensorstore", True)])
def test_ckpt_save_and_ckpt_load_wait_alike(tmp_path: Path, device: str, form: str, in_background: bool) -> None:
    run_ranks(
        2, _save_and_load_sharded, tmp_path, device, form, in_background,
        process_group=True, device=device, environment=ADVERSARY,
    )  # fmt: skip


def _save_and_load_sharded(topology: Topology, root: Path, device: str, form: str, in_background: bool) -> None:
    save, load = FORMATS[form]
    memory = Memory(AWKWARD, 1, torch_device(device, topology))
    memory.change(2, on_new_streams=True)
    queue = AsyncCallsQueue()
    request = dist_checkpointing.save(replicas(topology, memory), root, save(), async_sharded_save=in_background)
    if in_background:
        queue.schedule_async_request(request)
    memory.change(5, late=False)
    if in_background:
        assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    memory.change(7, on_new_streams=True)
    dist_checkpointing.load(replicas(topology, memory), root, load(load_directly_on_device=True))
    memory.require_filled(values_of(AWKWARD, 2), around=7)


def replicas(topology: Topology, memory: Memory) -> dict[str, Any]:
    return {
        key: ShardedTensor.from_rank_offsets(key, tensor, replica_id=topology.rank)
        for key, tensor in memory.tensors().items()
    }


def test_copies_that_a_preload_leaves_under_way_are_over_before_its_function_runs(device: str) -> None:
    """A request of a caller's own, run by the queue in a thread or process of its choice."""
    run_ranks(1, _preload_late, device, device=device, environment=ADVERSARY)


def _preload_late(topology: Topology, device: str) -> None:
    memory = Memory(AWKWARD, 1, torch_device(device, topology))
    found: dict[str, torch.Tensor] = {}
    memory.change(2)

    def preload() -> dict[str, torch.Tensor]:
        hosts = {key: torch.empty(one.shape, dtype=one.dtype, pin_memory=True) for key, one in memory.tensors().items()}
        for key, tensor in memory.tensors().items():
            hosts[key].copy_(tensor, non_blocking=True)
        return hosts

    def take(_: str, hosts: dict[str, torch.Tensor]) -> None:
        found.update({key: one.clone() for key, one in hosts.items()})

    queue = AsyncCallsQueue()
    with use_topology(topology):
        queue.schedule_async_request(AsyncRequest(take, ("", None), [], preload_fn=preload))
        queue.maybe_finalize_async_calls(blocking=True)
    require_same(found, values_of(AWKWARD, 2))


@pytest.mark.parametrize("form", FORMATS)
def test_ckpt_load_waits_where_it_converts_the_data_type(tmp_path: Path, device: str, form: str) -> None:
    run_ranks(1, _save_and_load_as_another_type, tmp_path, device, form, device=device, environment=ADVERSARY)


DOUBLE = {"w": Kind(torch.float64, 3 << 18, lambda flat: flat.view(3, 1 << 18).t())}


def _save_and_load_as_another_type(topology: Topology, root: Path, device: str, form: str) -> None:
    save, load = FORMATS[form]
    values = torch.arange(3.0 * (1 << 18)).view(1 << 18, 3)
    dist_checkpointing.save({"w": ShardedTensor.from_rank_offsets("w", values)}, root, save())
    memory = Memory(DOUBLE, 1, torch_device(device, topology))
    memory.change(7, on_new_streams=True)
    dist_checkpointing.load(replicas(topology, memory), root, load(load_directly_on_device=True))
    memory.require_filled({"w": values.double()}, around=7)


def test_an_old_folder_of_pickled_files_is_loaded_after_all_that_was_queued(tmp_path: Path, device: str) -> None:
    path = tmp_path / "old" / "checkpoint-1"
    path.mkdir(parents=True)
    torch.save(state_of(AWKWARD, 2), path / "model_state.pt")
    run_ranks(1, _load_old, path, device, device=device, environment=ADVERSARY)


def _load_old(topology: Topology, path: Path, device: str) -> None:
    """On two devices, where there are two."""
    count = min(torch.get_device_module(device).device_count(), 2)
    memory = Memory(AWKWARD, 1, *(torch.device(device, at) for at in range(count)))
    loader = coordinator(topology, path.parent, Fitted(memory.tensors()), device=device, allow_pickle=True)
    memory.change(7, on_new_streams=True)
    loader.load_checkpoint(path)
    memory.require_filled(values_of(AWKWARD, 2), around=7)
