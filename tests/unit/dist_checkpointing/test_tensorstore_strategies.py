"""The TensorStore strategies on one rank: a second library for one format, loading into the model's own memory, and helper functions."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
import torch
import zarr
from hypothesis import given
from hypothesis import strategies as st

from ckpt import dist_checkpointing
from ckpt.catalog.verify import verify_checkpoint
from ckpt.dist_checkpointing import ShardedTensor
from ckpt.dist_checkpointing.strategies import base
from ckpt.dist_checkpointing.strategies.base import LoadShardedStrategy, StrategyAction
from ckpt.dist_checkpointing.strategies.tensorstore import (
    TensorStoreLoadShardedStrategy,
    TensorStoreSaveShardedStrategy,
    merge_global_slice_with_shape,
    open_ts_array,
    register_default_tensorstore_strategies,
)
from ckpt.dist_checkpointing.strategies.zarr import (
    ZarrLoadShardedStrategy,
    ZarrSaveShardedStrategy,
    register_default_zarr_strategies,
)
from ckpt.errors import ConfigurationError, CorruptCheckpointError, ShapeMismatchError
from ckpt.ranks.default_topology import use_topology
from tests.support.ranks import Topology, run_threads
from tests.support.states import global_index, random_bits, same_bits

VALUES = global_index((6, 4))
DIRECT: dict[str, type[Any]] = {"zarr": ZarrLoadShardedStrategy, "tensorstore": TensorStoreLoadShardedStrategy}
either_library = pytest.mark.parametrize("library", DIRECT)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint that holds `VALUES` as w."""
    dist_checkpointing.save({"w": ShardedTensor.from_rank_offsets("w", VALUES)}, tmp_path)
    return tmp_path


def loaded_into(folder: Path, library: str, *wanted: ShardedTensor) -> Sequence[torch.Tensor]:
    """What is put in the place of each of `wanted`, which need not make up the tensor: other ranks have the rest."""
    loader = DIRECT[library](load_directly_on_device=True)
    state = dist_checkpointing.load({"all": list(wanted)}, folder, loader, validate_access_integrity=False)
    assert isinstance(state, dict)
    found: list[torch.Tensor] = state["all"]
    return found


# Who reads what


def test_tensorstore_is_another_library_for_the_zarr_format_and_saves_one_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """S1.44: the loader of ("zarr", 1), whoever registers first; the saver of that format stays Zarr's."""
    for order in (1, -1):
        registered: dict[str, dict[tuple[str, int], Any]] = {action.value: {} for action in StrategyAction}
        monkeypatch.setattr(base, "default_strategies", registered)
        for register in (register_default_zarr_strategies, register_default_tensorstore_strategies)[::order]:
            register()
        assert {at: type(one) for at, one in registered["load_sharded"].items()} == {
            ("zarr", 1): TensorStoreLoadShardedStrategy,
            ("tensorstore", 1): TensorStoreLoadShardedStrategy,
        }
        assert {at: type(one) for at, one in registered["save_sharded"].items()} == {
            ("zarr", 1): ZarrSaveShardedStrategy,
            ("tensorstore", 1): TensorStoreSaveShardedStrategy,
        }
        assert not registered["load_common"] and not registered["save_common"]


@pytest.mark.parametrize(
    "saver", [None, ("zarr", 1), ("tensorstore", 1), TensorStoreSaveShardedStrategy(kvstore="file")]
)
@pytest.mark.parametrize("loader", [None, ZarrLoadShardedStrategy(), TensorStoreLoadShardedStrategy(), ("zarr", 1)])
def test_whatever_one_library_saved_the_other_loads(tmp_path: Path, saver: Any, loader: Any) -> None:
    """S1.44, S1.68: both ways, and without a word about it."""
    values = random_bits((6, 5), torch.bfloat16, seed=8)
    dist_checkpointing.save({"w": ShardedTensor.from_rank_offsets("w/x", values)}, tmp_path, saver)
    state = dist_checkpointing.load(
        {"w": ShardedTensor.from_rank_offsets("w/x", torch.zeros_like(values))}, tmp_path, loader
    )
    assert isinstance(state, dict) and same_bits(state["w"], values)
    said = json.loads((tmp_path / "metadata.json").read_text())
    assert (said["sharded_backend"], said["sharded_backend_version"]) == (
        "zarr" if saver in (None, ("zarr", 1)) else "tensorstore",
        1,
    )
    assert verify_checkpoint(tmp_path) == []


def test_an_ocdbt_database_is_read_by_tensorstore_alone(tmp_path: Path) -> None:
    """S1.23, S1.38: the arrays in it are Zarr v3 too, and few files hold them all."""
    state = {str(i): ShardedTensor.from_rank_offsets(f"layer/{i}", VALUES + i) for i in range(50)}
    TensorStoreSaveShardedStrategy().save(state, tmp_path)
    assert sum(path.is_file() for path in tmp_path.rglob("*")) < 12
    database = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{tmp_path}/arrays.ocdbt/"}}
    for i in (0, 49):
        spec = {"driver": "zarr3", "kvstore": {**database, "path": f"sharded/layer%2F{i}/"}}
        assert np.array_equal(ts.open(spec, open=True, read=True).result().read().result(), (VALUES + i).numpy())


def test_an_unknown_store_is_refused_when_it_is_used(tmp_path: Path) -> None:
    """S1.44: with those that there are."""
    with pytest.raises(ConfigurationError, match="kvstore=s3: expected ocdbt or file"):
        dist_checkpointing.save(
            {"w": ShardedTensor.from_rank_offsets("w", VALUES)}, tmp_path, TensorStoreSaveShardedStrategy(kvstore="s3")
        )
    assert not dist_checkpointing.check_is_distributed_checkpoint(tmp_path)


def _load_twice(topology: Topology, folder: Path) -> None:
    with use_topology(topology):
        loader = TensorStoreLoadShardedStrategy()
        for _ in range(2):
            loader.load(
                {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(6, 4), replica_id=topology.rank)}, folder
            )


def test_who_loads_is_logged_once_by_rank_0(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    """S1.41: not by every rank, not at every load."""
    with caplog.at_level(logging.INFO, "ckpt"):
        run_threads(3, _load_twice, saved, agree_s=30.0)
    said = [record.getMessage() for record in caplog.records if "loaded by" in record.getMessage()]
    assert said == ["sharded tensors are loaded by TensorStoreLoadShardedStrategy"]


# Into the memory of the model


@either_library
def test_by_default_a_load_makes_new_tensors_of_the_stored_type(saved: Path, library: str) -> None:
    """S1.39: load_directly_on_device is False, by name and by position."""
    loader = DIRECT[library]()
    assert loader.load_directly_on_device is False and DIRECT[library](True).load_directly_on_device is True
    own = torch.full((6, 4), 7.0, dtype=torch.float64)
    state = dist_checkpointing.load({"w": ShardedTensor.from_rank_offsets("w", own)}, saved, loader)
    assert isinstance(state, dict)
    assert state["w"] is not own and same_bits(state["w"], VALUES)
    assert torch.equal(own, torch.full((6, 4), 7.0, dtype=torch.float64))


@either_library
def test_the_tensor_that_the_model_holds_is_filled_and_returned_itself(saved: Path, library: str) -> None:
    """S1.40: identity, whatever memory it lies in: parameters, transposed and strided views, other data types."""
    parameter = torch.nn.Parameter(torch.zeros(6, 4))
    transposed, spread = torch.zeros(4, 6).t(), torch.full((6, 8), -1.0)
    every_second, half = spread[:, ::2], torch.zeros(6, 4, dtype=torch.bfloat16)
    wide = torch.zeros(6, 4, dtype=torch.float64).t().contiguous().t()
    rows = torch.full((2, 4), -1.0)
    tensors = [parameter, transposed, every_second, half, wide, rows]
    pieces = [ShardedTensor.from_rank_offsets("w", one, replica_id=i) for i, one in enumerate(tensors[:-1])]
    pieces.append(ShardedTensor.from_rank_offsets("w", rows, (0, 1, 3), replica_id=9))
    for one, got in zip(tensors, loaded_into(saved, library, *pieces), strict=True):
        assert got is one
        want = VALUES[2:4] if one is rows else VALUES
        assert same_bits(got.detach().contiguous(), want.to(one.dtype))
    assert parameter.requires_grad and parameter.is_leaf and parameter.grad is None
    assert bool((spread[:, 1::2] == -1).all()), "what lies in between belongs to somebody else"


@either_library
def test_a_flattened_range_is_filled_in_place(saved: Path, library: str) -> None:
    """S1.40: a view of the optimizer's one buffer, contiguous or not."""
    buffer, strided = torch.full((30,), -1.0), torch.full((34,), -1.0)
    run = slice(3, 17)
    wanted = [
        ShardedTensor.from_rank_offsets_flat("w", data, (6, 4), flattened_range=run)
        for data in (buffer[5:19], strided[1:29:2])
    ]
    first, second = loaded_into(saved, library, *wanted)
    assert first is wanted[0].data and second is wanted[1].data
    want = VALUES.flatten()[run]
    assert same_bits(buffer, torch.cat([torch.full((5,), -1.0), want, torch.full((11,), -1.0)]))
    assert same_bits(strided[1:29:2].contiguous(), want)
    assert bool((strided[::2] == -1).all()) and bool((strided[29:] == -1).all())


@either_library
def test_padding_is_written_into_the_memory_that_is_filled(saved: Path, library: str) -> None:
    """S1.31, S1.40, S1.42: rows that the checkpoint lacks become zeros, whatever was there; a shard of padding alone too."""
    for rank, want in ((0, VALUES[:5]), (1, torch.cat([VALUES[5:], torch.zeros(4, 4)])), (2, torch.zeros(5, 4))):
        for dtype in (torch.float32, torch.float64):
            own = torch.full((4, 5), 7.0, dtype=dtype).t()
            wanted = ShardedTensor.from_rank_offsets("w", own, (0, rank, 3), allow_shape_mismatch=True)
            (got,) = loaded_into(saved, library, wanted)
            assert got is own and same_bits(own.contiguous(), want.to(dtype))


@either_library
def test_memory_is_needed_to_load_into_memory(saved: Path, library: str) -> None:
    """S1.40: a ShardedTensor without data is refused, by name."""
    wanted = ShardedTensor.from_rank_offsets("w", VALUES).without_data()
    with pytest.raises(
        ConfigurationError, match="w: load_directly_on_device=True fills the tensor .* holds none; .*init_data"
    ):
        loaded_into(saved, library, wanted)
    wanted.init_data("cpu", torch.zeros)
    assert wanted.data is not None
    (got,) = loaded_into(saved, library, wanted)
    assert got is wanted.data and same_bits(got, VALUES)


@pytest.mark.cuda
@either_library
def test_tensors_of_a_device_are_saved_from_it_and_filled_on_it(tmp_path: Path, library: str) -> None:
    """S1.18, S1.39, S1.40: no copy of the model on the host is needed to load it; strided views and flattened ranges too."""
    own = VALUES.cuda()
    spread = torch.zeros(6, 8, device="cuda")[:, ::2].copy_(own)
    run = own.flatten()[5:]
    state = {
        "w": ShardedTensor.from_rank_offsets("w", own),
        "spread": ShardedTensor.from_rank_offsets("spread", spread),
        "flat": [
            ShardedTensor.from_rank_offsets_flat("flat", own.flatten()[:5], (6, 4), flattened_range=slice(0, 5)),
            ShardedTensor.from_rank_offsets_flat("flat", run, (6, 4), flattened_range=slice(5, 24)),
        ],
    }
    request = dist_checkpointing.save(state, tmp_path, async_sharded_save=True)
    assert request is not None
    for tensor in (own, spread, run):
        tensor.zero_()
    request.execute_sync()
    assert verify_checkpoint(tmp_path) == []
    first, second, third = loaded_into(tmp_path, library, state["w"], state["spread"], state["flat"][1])
    assert first is own and second is spread and third is run
    assert (
        same_bits(own.cpu(), VALUES) and same_bits(spread.cpu(), VALUES) and same_bits(run.cpu(), VALUES.flatten()[5:])
    )
    found = dist_checkpointing.load({"w": ShardedTensor.from_rank_offsets("w", own)}, tmp_path, DIRECT[library]())
    assert isinstance(found, dict) and found["w"].device.type == "cpu"


# The functions around TensorStore arrays


def test_a_slice_is_cut_off_where_the_stored_array_ends() -> None:
    """S1.42: clamps the stop; integer indices pass through."""
    assert merge_global_slice_with_shape((3, slice(8, 16), slice(0, 2)), (4, 13, 2), "wte") == (
        3, slice(8, 13), slice(0, 2),
    )  # fmt: skip
    assert merge_global_slice_with_shape((), (), "step") == ()


def test_a_slice_that_does_not_fit_is_an_error() -> None:
    """S1.42: equal rank required; an empty slice is an error, which names the key."""
    with pytest.raises(ShapeMismatchError) as caught:
        merge_global_slice_with_shape((slice(0, 3),), (4, 5), "wte")
    assert str(caught.value) == "wte: a slice of 1 axes is asked for, the stored array has 2"
    for start in (13, 20):
        with pytest.raises(ShapeMismatchError) as caught:
            merge_global_slice_with_shape((slice(start, 24), 0), (13, 1), "wte")
        assert str(caught.value) == (
            f"wte: elements from {start} on are asked for, and the stored axis ends at 13: nothing is left to read"
        )


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 6), st.integers(1, 6)), max_size=4))
def test_a_cut_slice_reads_what_numpy_would_read(axes: list[tuple[int, int, int]]) -> None:
    """S1.42: for any place and shape, or nothing is left of it."""
    asked = tuple(slice(start, start + length) for start, length, _ in axes)
    shape = tuple(size for _, _, size in axes)
    array = np.arange(int(np.prod(shape))).reshape(shape)
    if array[asked].size:
        assert np.array_equal(array[merge_global_slice_with_shape(asked, shape, "w")], array[asked])
    else:
        with pytest.raises(ShapeMismatchError, match="nothing is left to read"):
            merge_global_slice_with_shape(asked, shape, "w")


def test_an_array_of_either_version_of_zarr_is_opened_for_reading(tmp_path: Path, saved: Path) -> None:
    """S1.43: the source knows version 2 alone."""
    zarr.create_array(
        tmp_path / "old 100%", data=VALUES.numpy(), chunks=(4, 3), zarr_format=2, compressors=None, fill_value=None
    )
    for path in (tmp_path / "old 100%", saved / "sharded" / "w"):
        found = open_ts_array(path)
        assert np.array_equal(found.read().result(), VALUES.numpy())
        with pytest.raises(ValueError, match="not support writing"):
            found[0, 0].write(1.0).result()


def test_what_is_no_array_is_named(tmp_path: Path) -> None:
    """S1.43: any failure becomes an error of ours with the path."""
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "zarr.json").write_text("{")
    (tmp_path / "file").write_text("no folder")
    for name in ("nowhere", "bad", "file", "."):
        with pytest.raises(CorruptCheckpointError) as caught:
            open_ts_array(tmp_path / name)
        assert str(caught.value).startswith(f"tensorstore cannot open {tmp_path / name} as a Zarr array: ")
        assert isinstance(caught.value, dist_checkpointing.CheckpointingException) and "\n" not in str(caught.value)


def test_a_chunk_that_is_missing_is_never_read_as_zeros(saved: Path) -> None:
    """S1.43: by the array that is opened, and by the strategies of either library."""
    opened = open_ts_array(saved / "sharded" / "w")
    (saved / "sharded" / "w" / "c" / "0" / "0").unlink()
    with pytest.raises(ValueError, match="missing"):
        opened.read().result()
    loaders: list[LoadShardedStrategy] = [ZarrLoadShardedStrategy(), TensorStoreLoadShardedStrategy()]
    for loader in loaders:
        with pytest.raises(CorruptCheckpointError, match="w: .*/sharded/w/c/0/0 is missing"):
            loader.load({"w": ShardedTensor.from_rank_offsets("w", torch.zeros(6, 4))}, saved)
