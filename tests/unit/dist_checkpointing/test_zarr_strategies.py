"""The Zarr strategies on one rank: what lies on disk, who else can read it, and the functions around Zarr arrays."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
import torch
import zarr
from hypothesis import example, given
from hypothesis import strategies as st

from ckpt import dist_checkpointing
from ckpt.backends.zarr import described_as
from ckpt.catalog.verify import verify_checkpoint
from ckpt.dist_checkpointing import ShardedTensor
from ckpt.dist_checkpointing.strategies import base
from ckpt.dist_checkpointing.strategies.base import AsyncSaveShardedStrategy, LoadShardedStrategy, StrategyAction
from ckpt.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
from ckpt.dist_checkpointing.strategies.tensorstore import (
    TensorStoreLoadShardedStrategy,
    TensorStoreSaveShardedStrategy,
)
from ckpt.dist_checkpointing.strategies.zarr import (
    ZarrLoadShardedStrategy,
    ZarrSaveShardedStrategy,
    flatten_range,
    load_zarr_based_sharded_metadata,
    pad_to_expected_shape,
    postprocess_numpy_array,
    register_default_zarr_strategies,
)
from ckpt.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigurationError,
    MissingStateError,
    ShapeMismatchError,
    ShardingError,
)
from ckpt.format import zarr_dtypes
from tests.support.states import ALL_DTYPES, global_index, random_bits, same_bits

SAVES = {
    "zarr": ZarrSaveShardedStrategy(),
    "zarr, compressed": ZarrSaveShardedStrategy(
        compressors=[{"name": "zstd", "configuration": {"level": 1, "checksum": False}}]
    ),
    "tensorstore, files": TensorStoreSaveShardedStrategy(kvstore="file"),
    "tensorstore, ocdbt": TensorStoreSaveShardedStrategy(),
}
LOADS: dict[str, LoadShardedStrategy] = {
    "zarr": ZarrLoadShardedStrategy(),
    "tensorstore": TensorStoreLoadShardedStrategy(),
}
KEYS = (
    "a/b", "a/b/c", "a.b", "", ".", "..", "../up", "/", "é☃", "x" * 300, "x" * 300 + "y", "zarr.json", "c", "sharded",
    "packed-float32-00000", "index-00000.json", "%", "~", " ", "x\0y", "\ud800", "A", "a",
)  # fmt: skip

every_save = pytest.mark.parametrize("save", SAVES.values(), ids=SAVES.keys())
every_load = pytest.mark.parametrize("load", LOADS.values(), ids=LOADS.keys())


def uncut(key: str, tensor: torch.Tensor, **options: Any) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, tensor, **options)


def blank(one: ShardedTensor) -> ShardedTensor:
    """The same place, with memory in which every bit that nobody reads shows."""
    assert one.data is not None
    return type(one)(**{**vars(one), "data": random_bits(tuple(one.data.shape), one.dtype, seed=99)})


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def document_of(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "zarr.json").read_text())
    return document


def read_by_zarr(folder: Path) -> np.ndarray[Any, Any]:
    zarr_dtypes.register()
    return np.asarray(zarr.open_array(folder, mode="r")[...])


def read_by_tensorstore(folder: Path) -> np.ndarray[Any, Any]:
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder}/"}, "fill_missing_data_reads": False}
    found: np.ndarray[Any, Any] = ts.open(spec, open=True, read=True).result().read().result()
    return found


# Who saves what


def test_the_zarr_format_gets_its_saver_here_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """S1.22: one registration, of the saver for ("zarr", 1)."""
    registered: dict[str, dict[tuple[str, int], Any]] = {action.value: {} for action in StrategyAction}
    monkeypatch.setattr(base, "default_strategies", registered)
    register_default_zarr_strategies()
    saver = registered["save_sharded"].pop(("zarr", 1))
    assert isinstance(saver, ZarrSaveShardedStrategy)
    assert not any(registered.values())
    assert (saver.backend, saver.version, str(saver)) == ("zarr", 1, "ZarrSaveShardedStrategy(zarr, 1)")
    assert not saver.can_handle_sharded_objects and isinstance(saver, AsyncSaveShardedStrategy)


def test_the_constructor_takes_backend_and_version_by_position_as_before(tmp_path: Path) -> None:
    """S1.7, S1.23: they are what metadata.json will say."""
    dist_checkpointing.save({"w": uncut("w", torch.arange(3))}, tmp_path, ZarrSaveShardedStrategy("mine", 7))
    said = json.loads((tmp_path / "metadata.json").read_text())
    assert (said["sharded_backend"], said["sharded_backend_version"]) == ("mine", 7)


# What lies on disk


def test_an_array_has_the_chunks_of_its_shards_and_raw_elements_in_one_version_of_zarr(
    tmp_path: Path,
) -> None:
    """S1.26, S1.38: global shape, chunk = global shape / fragmentation, no compressor, Zarr v3 however zarr-python's default drifts."""
    values = global_index((4, 6), torch.int32)
    pieces = [
        ShardedTensor.from_rank_offsets("w", values[2 * i : 2 * i + 2, 3 * j : 3 * j + 3], (0, i, 2), (1, j, 2))
        for i in range(2)
        for j in range(2)
    ]
    ZarrSaveShardedStrategy().save({"w": pieces}, tmp_path)
    document = document_of(tmp_path / "sharded" / "w")
    assert (document["zarr_format"], document["node_type"], document["shape"]) == (3, "array", [4, 6])
    assert document["chunk_grid"]["configuration"]["chunk_shape"] == list(pieces[0].max_allowed_chunks()) == [2, 3]
    assert document["codecs"] == [{"name": "bytes", "configuration": {"endian": "little"}}]
    for number, piece in enumerate(pieces):
        chunk = tmp_path / "sharded" / "w" / "c" / str(number // 2) / str(number % 2)
        assert chunk.read_bytes() == raw(piece.data)
    assert all(document_of(path.parent)["zarr_format"] == 3 for path in tmp_path.rglob("zarr.json"))
    assert [path for path in tmp_path.rglob("*") if path.name in (".zarray", ".zgroup", ".zattrs")] == []
    assert zarr.open_array(tmp_path / "sharded" / "w", mode="r").metadata.zarr_format == 3
    assert verify_checkpoint(tmp_path) == []


@pytest.mark.parametrize("save", [SAVES["zarr"], SAVES["tensorstore, files"]], ids=["zarr", "tensorstore"])
def test_a_chunk_of_zeros_is_written_like_any_other(tmp_path: Path, save: Any) -> None:
    """S1.26: so that a lost chunk is never read as zeros."""
    zeros = torch.zeros(2, 3)
    pieces = [ShardedTensor.from_rank_offsets("w", zeros, (0, i, 2)) for i in range(2)]
    save.save({"w": pieces, "step": uncut("step", torch.tensor(0.0))}, tmp_path)
    for chunk in (tmp_path / "sharded" / "w" / "c" / "0" / "0", tmp_path / "sharded" / "w" / "c" / "1" / "0"):
        assert chunk.read_bytes() == bytes(24)
    assert (tmp_path / "sharded" / "step" / "c").read_bytes() == bytes(4)


@every_save
def test_every_data_type_is_read_back_bit_for_bit_by_both_loaders(tmp_path: Path, save: Any) -> None:
    """S1.27, S1.28: the table of the source, and the unsigned and float8 types that it lacks; NaN payloads included."""
    state = {str(dtype): uncut(f"of {dtype}", random_bits((5, 7), dtype, seed=3)) for dtype in ALL_DTYPES}
    save.save(dict(state), tmp_path)
    assert verify_checkpoint(tmp_path) == []
    for load in LOADS.values():
        loaded = load.load({name: blank(one) for name, one in state.items()}, tmp_path)
        assert [name for name, one in state.items() if not same_bits(loaded[name], one.data)] == []


@pytest.mark.parametrize("save", [SAVES["zarr"], SAVES["tensorstore, files"]], ids=["zarr", "tensorstore"])
def test_zarr_python_and_tensorstore_alone_read_every_data_type_bit_for_bit(tmp_path: Path, save: Any) -> None:
    """S1.23, S1.26, S1.27, S1.28: without a line of ours, and as the very data type."""
    state = {str(dtype).removeprefix("torch."): random_bits((3, 5), dtype, seed=5) for dtype in ALL_DTYPES}
    save.save({name: uncut(name, tensor) for name, tensor in state.items()}, tmp_path)
    for name, tensor in state.items():
        for read in (read_by_zarr, read_by_tensorstore):
            found = read(tmp_path / "sharded" / name)
            assert (found.dtype.name, found.shape, found.tobytes()) == (described_as(name), (3, 5), raw(tensor)), read


def test_every_bit_pattern_of_bfloat16_survives(tmp_path: Path) -> None:
    """S1.27: not via float32, which has no place for what a NaN carries."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    dist_checkpointing.save({"w": uncut("w", every)}, tmp_path)
    for load in LOADS.values():
        loaded = dist_checkpointing.load({"w": uncut("w", torch.empty_like(every))}, tmp_path, load)
        assert isinstance(loaded, dict) and same_bits(loaded["w"], every)
    assert document_of(tmp_path / "sharded" / "w")["data_type"] == "bfloat16"
    assert read_by_zarr(tmp_path / "sharded" / "w").dtype == ml_dtypes.bfloat16


def test_a_data_type_without_a_stored_form_is_refused_with_those_that_have_one(tmp_path: Path) -> None:
    """S1.28: a clear error for the rest, and nothing is left that looks like a checkpoint."""
    odd = torch.zeros(4, dtype=torch.uint8).view(torch.bits8)
    with pytest.raises(ConfigurationError, match="torch.bits8 cannot be saved; .* bool, .*complex128.*view"):
        dist_checkpointing.save({"w": uncut("w", odd)}, tmp_path)
    assert not dist_checkpointing.check_is_distributed_checkpoint(tmp_path)


@every_save
def test_a_tensor_without_dimensions_is_an_array_like_any_other(tmp_path: Path, save: Any) -> None:
    """S1.24: the set of its offsets is empty, and the source lets nobody create it: Adam's step."""
    step = torch.tensor(1234.5)
    flat = ShardedTensor.from_rank_offsets_flat("flat step", step[None], (), flattened_range=slice(0, 1))
    layers = [
        ShardedTensor.from_rank_offsets("layers", torch.tensor(10 + i), (0, i, 3), prepend_axis_num=1) for i in range(3)
    ]
    save.save({"step": uncut("step", step), "flat": flat, "layers": layers}, tmp_path)
    for load in LOADS.values():
        loaded = load.load(
            {
                "step": uncut("step", torch.zeros(())),
                "flat": blank(flat),
                "layers": uncut("layers", torch.zeros(3).long()),
            },
            tmp_path,
        )
        assert same_bits(loaded["step"], step) and same_bits(loaded["flat"], step[None])
        assert loaded["layers"].tolist() == [10, 11, 12]
    found = load.load_tensors_metadata(tmp_path)
    assert {key: one.global_shape for key, one in found.items()} == {"step": (), "flat step": (), "layers": (3,)}


@every_save
def test_tensors_without_elements_are_saved_and_loaded(tmp_path: Path, save: Any) -> None:
    """S1.24, S1.29: the flattened one too, whose range is empty because all of it is."""
    state = {
        "plain": uncut("plain", torch.zeros(0, 5)),
        "flat": ShardedTensor.from_rank_offsets_flat(
            "flat", torch.zeros(0), (0, 5), (0, 0, 1), flattened_range=slice(0, 0)
        ),
    }
    dist_checkpointing.save(dict(state), tmp_path, save)
    for load in LOADS.values():
        loaded = dist_checkpointing.load(dict(state), tmp_path, load)
        assert isinstance(loaded, dict)
        assert {name: tuple(one.shape) for name, one in loaded.items()} == {"plain": (0, 5), "flat": (0,)}
    assert {one.global_shape for one in dist_checkpointing.load_tensors_metadata(tmp_path).values()} == {(0, 5)}
    assert verify_checkpoint(tmp_path) == []


@every_save
def test_what_does_not_lie_in_memory_row_by_row_is_saved_by_value(tmp_path: Path, save: Any) -> None:
    """S1.23: transposed, strided, expanded, conjugated, negative views, and parameters that want a gradient."""
    base_values = torch.arange(48, dtype=torch.float32).view(6, 8)
    spread = torch.arange(96, dtype=torch.float64)[::2]
    numbers = torch.complex(torch.arange(4.0), torch.arange(4.0) + 10)
    state = {
        "transposed": uncut("transposed", base_values.t()),
        "expanded": uncut("expanded", torch.arange(3).expand(4, 3)),
        "conjugated": uncut("conjugated", numbers.conj()),
        "negative": uncut("negative", numbers.conj().imag),
        "parameter": uncut("parameter", torch.nn.Parameter(base_values.clone())),
        "run": ShardedTensor.from_rank_offsets_flat("flat", spread[5:], (6, 8), flattened_range=slice(5, 48)),
        "rest": ShardedTensor.from_rank_offsets_flat("flat", spread[:5], (6, 8), flattened_range=slice(0, 5)),
    }
    want = {name: one.data.detach().resolve_conj().resolve_neg().clone() for name, one in state.items()}
    save.save(dict(state), tmp_path)
    loaded = ZarrLoadShardedStrategy().load(dict(state), tmp_path)
    assert [name for name in state if not same_bits(loaded[name], want[name])] == []


@every_save
def test_a_key_may_be_any_text(tmp_path: Path, save: Any) -> None:
    """S1.36: a rule for `/`, and one key never hits another's array or leaves the checkpoint."""
    state = {str(number): uncut(key, torch.tensor([number, -number])) for number, key in enumerate(KEYS)}
    (tmp_path / "it").mkdir()
    dist_checkpointing.save(dict(state), tmp_path / "it", save)
    assert [path.name for path in tmp_path.iterdir()] == ["it"]
    assert verify_checkpoint(tmp_path / "it") == []
    for load in LOADS.values():
        loaded = dist_checkpointing.load({name: blank(one) for name, one in state.items()}, tmp_path / "it", load)
        assert isinstance(loaded, dict)
        assert [key for name, key in enumerate(KEYS) if loaded[str(name)].tolist() != [name, -name]] == []
        assert set(load.load_tensors_metadata(tmp_path / "it")) == set(KEYS)


def test_an_array_that_is_there_already_is_an_error(tmp_path: Path) -> None:
    """S1.26: of a checkpoint that is whole, and of one that has lost its records; by every strategy, and nothing is changed."""
    for number, save in enumerate(SAVES.values()):
        folder = tmp_path / str(number)
        folder.mkdir()
        save.save({"w": uncut("w", torch.arange(4))}, folder)
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for other in SAVES.values():
            with pytest.raises(
                CheckpointExistsError, match=f"^save into {folder}: {folder} holds a checkpoint already; "
            ):
                other.save({"w": uncut("w", torch.ones(4).long())}, folder)
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
        for record in [folder / "checkpoint_manifest.json", *folder.glob("index-*.json")]:
            record.unlink()
            with pytest.raises(
                CheckpointExistsError, match=f"{folder}/.* is in the way, and no save that was interrupted lists it"
            ):
                save.save({"v": uncut("v", torch.ones(4).long())}, folder)


def test_a_strategy_makes_no_folder(tmp_path: Path) -> None:
    """S1.67: the folder is the caller's to make."""
    with pytest.raises(CheckpointNotFoundError, match="nowhere does not exist: make the folder"):
        ZarrSaveShardedStrategy().save({"w": uncut("w", torch.arange(4))}, tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []


@every_save
def test_what_is_not_a_sharded_tensor_is_refused_by_strategies(tmp_path: Path, save: Any) -> None:
    """S1.23, S1.30: they are given nothing else."""
    with pytest.raises(ConfigurationError, match="a sharded strategy saves ShardedTensors, and was given a Tensor"):
        save.save({"w": torch.arange(3)}, tmp_path)
    with pytest.raises(ShardingError, match="w: the main replica of a shard has no data to save"):
        save.save({"w": uncut("w", torch.arange(3)).without_data()}, tmp_path)
    assert list(tmp_path.iterdir()) == []
    save.save({"w": uncut("w", torch.arange(3))}, tmp_path)
    with pytest.raises(ConfigurationError, match="a sharded strategy loads ShardedTensors, and was given a int"):
        ZarrLoadShardedStrategy().load({"w": 3}, tmp_path)


# Loading


@every_load
def test_a_load_puts_tensors_in_the_place_of_the_sharded_ones_and_returns_the_very_dictionary(
    tmp_path: Path, load: LoadShardedStrategy
) -> None:
    """S1.30: in place, however they are nested."""
    values = global_index((4, 3))
    ZarrSaveShardedStrategy().save({"w": uncut("w", values)}, tmp_path)
    shared = uncut("w", torch.zeros(4, 3))
    row = [ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, i, 2)) for i in range(2)]
    inner = [{"rows": row}, shared]
    wanted: dict[str, Any] = {"a": {"b": inner}, "c": shared}
    loaded = load.load(wanted, tmp_path)
    assert loaded is wanted and loaded["a"]["b"] is inner and inner[0]["rows"] is row
    assert torch.equal(torch.cat(row), values)
    assert inner[1] is loaded["c"] and same_bits(loaded["c"], values)
    assert torch.equal(shared.data, torch.zeros(4, 3)), "the caller's own memory is left alone"


@every_load
def test_another_global_shape_is_refused_with_both_shapes_and_the_key(
    tmp_path: Path, load: LoadShardedStrategy
) -> None:
    """S1.31: unless a mismatch is allowed; never in the number of axes."""
    ZarrSaveShardedStrategy().save({"w": uncut("wte", torch.zeros(5, 4))}, tmp_path)
    for wanted in (
        uncut("wte", torch.zeros(8, 4)),
        uncut("wte", torch.zeros(20), allow_shape_mismatch=True),
        uncut("wte", torch.zeros(5, 4, 1), allow_shape_mismatch=True),
    ):
        with pytest.raises(ShapeMismatchError) as caught:
            load.load({"w": wanted}, tmp_path)
        message = str(caught.value)
        assert "wte: the checkpoint holds global shape [5, 4], " in message
        assert f"asks for {list(wanted.global_shape)}." in message


@every_load
@every_save
def test_what_the_checkpoint_lacks_of_a_larger_tensor_is_zeros_even_a_whole_shard(
    tmp_path: Path, save: Any, load: LoadShardedStrategy
) -> None:
    """S1.31, S1.42: of a vocabulary of 5 rows padded to 12 over 4 ranks, the last two hold padding alone."""
    values = random_bits((5, 4), torch.bfloat16, seed=1)
    save.save({"w": uncut("wte", values)}, tmp_path)
    larger = torch.cat([values, torch.zeros(7, 4, dtype=torch.bfloat16)])
    for rank in range(4):
        rows = torch.full((3, 4), 7.0, dtype=torch.bfloat16)
        part = ShardedTensor.from_rank_offsets("wte", rows, (0, rank, 4), allow_shape_mismatch=True)
        assert same_bits(load.load([part], tmp_path)[0], larger[3 * rank : 3 * rank + 3])
        for run in (slice(0, 5), slice(5, 11), slice(11, 12), slice(0, 0)):
            flat = ShardedTensor.from_rank_offsets_flat(
                "wte", rows.flatten()[run], (3, 4), (0, rank, 4), flattened_range=run, allow_shape_mismatch=True
            )
            assert same_bits(load.load([flat], tmp_path)[0], larger[3 * rank : 3 * rank + 3].flatten()[run])
    wider = uncut("wte", torch.ones(3, 6).bfloat16(), allow_shape_mismatch=True)
    cut = torch.nn.functional.pad(values.view(torch.int16)[:3], (0, 2)).view(torch.bfloat16)
    assert same_bits(load.load([wider], tmp_path)[0], cut), "fewer rows, more columns"


@every_load
def test_an_array_that_is_missing_is_an_error_and_the_debug_log_lists_the_folder(
    tmp_path: Path, load: LoadShardedStrategy, caplog: pytest.LogCaptureFixture
) -> None:
    """S1.32: the error says what there is instead."""
    ZarrSaveShardedStrategy().save({str(i): uncut(f"layer.{i}", torch.arange(4)) for i in range(8)}, tmp_path)
    with caplog.at_level(logging.DEBUG, "ckpt"), pytest.raises(MissingStateError) as caught:
        load.load({"w": uncut("layer.9", torch.arange(4))}, tmp_path)
    assert isinstance(caught.value, dist_checkpointing.CheckpointingException)
    assert f"layer.9 is asked for, and {tmp_path} does not hold it; it holds 8 (layer.0, layer.1" in str(caught.value)
    assert "layer.4 and 3 more" in str(caught.value) and "layer.5" not in str(caught.value)
    (listed,) = [record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG]
    assert listed.startswith(f"{tmp_path} holds [") and "'sharded'" in listed


@every_load
def test_the_metadata_of_tensors_go_by_their_own_keys_and_are_of_uncut_tensors_without_data(
    tmp_path: Path, load: LoadShardedStrategy
) -> None:
    """S1.37, S1.45, S1.12: global shape and data type, whoever saved."""
    for number, save in enumerate(SAVES.values()):
        folder = tmp_path / str(number)
        folder.mkdir()
        half = torch.zeros(2, 3, dtype=torch.float8_e5m2)
        state = {
            "in the state dict": [ShardedTensor.from_rank_offsets("model/w", half, (0, i, 2)) for i in range(2)],
            "step": uncut("step", torch.tensor(1)),
        }
        save.save(state, folder)
        found = load.load_tensors_metadata(folder)
        assert {
            key: (one.key, one.dtype, one.local_shape, one.global_shape, one.data) for key, one in found.items()
        } == {
            "model/w": ("model/w", torch.float8_e5m2, (4, 3), (4, 3), None),
            "step": ("step", torch.int64, (), (), None),
        }
        assert list(load.load_sharded_metadata(folder)) == list(found)


@every_load
def test_a_loader_takes_what_either_saver_wrote_and_refuses_other_formats(load: LoadShardedStrategy) -> None:
    """S1.5, S1.37, S1.45: the checks compare."""
    for backend in ("zarr", "tensorstore"):
        load.check_backend_compatibility(backend)
    load.check_version_compatibility(1)
    with pytest.raises(ConfigurationError, match="has backend 'torch_dist', this strategy reads backend 'zarr' or"):
        load.check_backend_compatibility("torch_dist")
    with pytest.raises(ConfigurationError, match="has version 2, this strategy reads version 1"):
        load.check_version_compatibility(2)
    assert not load.can_handle_sharded_objects


# The functions around Zarr arrays


def test_the_flattened_range_is_cut_out_of_a_whole_shard() -> None:
    """S1.33: by rows, whatever memory the shard lies in."""
    chunk = global_index((3, 4), torch.int64)
    flat = ShardedTensor.from_rank_offsets_flat("w", torch.zeros(5).long(), (3, 4), flattened_range=slice(2, 7))
    assert flatten_range(flat, chunk).tolist() == [2, 3, 4, 5, 6]
    assert flatten_range(flat, chunk.t().contiguous().t()).tolist() == [2, 3, 4, 5, 6]


@example(shapes=[(1, 1)], dtype=torch.float4_e2m1fn_x2, replicate=True)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), max_size=3),
    dtype=st.sampled_from(ALL_DTYPES),
    replicate=st.booleans(),
)
def test_padding_is_at_the_far_end_of_each_axis(
    shapes: list[tuple[int, int]], dtype: torch.dtype, replicate: bool
) -> None:
    """S1.34: zeros, or the last element along the axis where that is asked for; every data type, bit for bit."""
    small, large = tuple(n for n, _ in shapes), tuple(n + more for n, more in shapes)
    x = random_bits(small, dtype, seed=7)
    expected = ShardedTensor("w", None, dtype, large, large, (0,) * len(large), (1,) * len(large))
    padded = pad_to_expected_shape(x, expected, replicate_last=replicate)
    bits = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}[x.element_size()]
    values = np.frombuffer(raw(x), bits).reshape(small)
    widths = [(0, more) for _, more in shapes]
    want = np.pad(values, widths, **({"mode": "edge"} if replicate else {})) if shapes else values
    assert padded.shape == large and raw(padded) == want.tobytes()


def test_a_tensor_that_is_larger_than_expected_cannot_be_padded() -> None:
    """S1.34: stored larger than expected is an error, and so is another number of axes."""
    expected = uncut("wte", torch.zeros(3, 4))
    for shape in ((4, 4), (3, 5), (3,), (3, 4, 1)):
        with pytest.raises(ShapeMismatchError) as caught:
            pad_to_expected_shape(torch.zeros(shape), expected)
        assert str(caught.value) == f"wte: shape {list(shape)} cannot be padded to the expected [3, 4]"
    with pytest.raises(ShapeMismatchError, match=r"^wte: nothing of shape \[0, 4\] can be replicated to \[3, 4\]$"):
        pad_to_expected_shape(torch.zeros(0, 4), expected, replicate_last=True)
    assert same_bits(pad_to_expected_shape(torch.zeros(0, 4), expected), torch.zeros(3, 4))


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_what_a_library_has_read_becomes_a_tensor_of_the_same_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    """S1.35: to torch; bfloat16 not via float32; scalars and arrays that torch does not like as they are."""
    values = random_bits((4, 6), dtype, seed=2)
    ZarrSaveShardedStrategy().save({"w": uncut("w", values), "step": uncut("step", values[0, 0])}, tmp_path)
    for read in (read_by_zarr, read_by_tensorstore):
        found = read(tmp_path / "sharded" / "w")
        assert same_bits(postprocess_numpy_array(found, uncut("w", values)), values)
        assert same_bits(postprocess_numpy_array(found[::2, 1:3], uncut("w", values[::2, 1:3])), values[::2, 1:3])
        assert same_bits(postprocess_numpy_array(found[::-1], uncut("w", values)), values.flip(0))
        step = read(tmp_path / "sharded" / "step")
        for scalar in (step, step[()], np.broadcast_to(step, ())):
            assert same_bits(postprocess_numpy_array(scalar, uncut("step", values[0, 0])), values[0, 0])


@pytest.mark.parametrize("dtype", ["<i2", ">i2", ">f4", ">f8", ">c16", "|b1"])
def test_elements_in_either_byte_order_become_the_same_values(dtype: str) -> None:
    """S1.35: Zarr knows both orders, torch the machine's own."""
    array = np.arange(6).astype(dtype)
    tensor = postprocess_numpy_array(array, uncut("w", torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))))
    assert tensor.tolist() == array.tolist()


def test_what_was_read_is_checked_then_padded_and_the_range_is_cut_last() -> None:
    """S1.35: local shape, padding, range; the last on request alone."""
    rows = np.arange(8, dtype=np.float32).reshape(2, 4)
    whole = ShardedTensor.from_rank_offsets_flat(
        "w", torch.zeros(6), (3, 4), (0, 1, 2), flattened_range=slice(5, 11), allow_shape_mismatch=True
    )
    padded = torch.cat([torch.from_numpy(rows), torch.zeros(1, 4)])
    assert same_bits(postprocess_numpy_array(rows, whole), padded.flatten()[5:11])
    assert same_bits(postprocess_numpy_array(rows, whole, apply_flattened_range=False), padded)
    with pytest.raises(ShapeMismatchError) as caught:
        postprocess_numpy_array(rows, uncut("w", torch.zeros(3, 4)))
    assert str(caught.value) == "w: an array of shape [2, 4] was read, for a shard of local shape [3, 4]"
    with pytest.raises(ConfigurationError, match="^w: torch has no data type for arrays of <U3$"):
        postprocess_numpy_array(np.array(["abc"]), uncut("w", torch.zeros(1)))


def test_only_folders_with_array_metadata_are_described_also_where_a_key_has_a_slash(
    tmp_path: Path,
) -> None:
    """S1.36: whatever library says shape and data type."""
    for key, dtype in (("w", "<f4"), ("layers/0/bias", "|i1"), ("layers/0/weight", ">f8")):
        zarr.create_array(tmp_path / key, shape=(6, 2), chunks=(3, 2), dtype=dtype, zarr_format=2, fill_value=None)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "chunk.0.0").write_bytes(b"no array")
    asked: list[str] = []

    def shape_and_dtype(path: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        asked.append(path)
        found = zarr.open_array(path, mode="r")
        return found.shape, found.dtype

    found = load_zarr_based_sharded_metadata(tmp_path, shape_and_dtype)
    assert sorted(asked) == [str(tmp_path / key) for key in ("layers/0/bias", "layers/0/weight", "w")]
    assert {key: (one.key, one.dtype, one.global_shape, one.data) for key, one in found.items()} == {
        "w": ("w", torch.float32, (6, 2), None),
        "layers/0/bias": ("layers/0/bias", torch.int8, (6, 2), None),
        "layers/0/weight": ("layers/0/weight", torch.float64, (6, 2), None),
    }
    with pytest.raises(ConfigurationError, match="layers/0/bias: torch has no data type for arrays of <U2"):
        load_zarr_based_sharded_metadata(tmp_path, lambda path: ((6, 2), np.dtype("<U2")))


def test_in_a_checkpoint_of_ours_the_manifest_says_which_folder_is_whose(tmp_path: Path) -> None:
    """S1.36: whatever the folders are called."""
    keys = ["a/b", "..", "w"]
    dist_checkpointing.save(
        {key: ShardedTensor.from_rank_offsets(key, torch.arange(6).view(2, 3)) for key in keys}, tmp_path
    )
    found = load_zarr_based_sharded_metadata(
        tmp_path, lambda path: (zarr.open_array(path).shape, zarr.open_array(path).dtype)
    )
    assert {key: (one.global_shape, one.dtype) for key, one in found.items()} == dict.fromkeys(
        keys, ((2, 3), torch.int64)
    )


def _raising(*_: Any) -> Any:
    raise ZeroDivisionError("of the user")


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda d: dist_checkpointing.save({}, d, common_strategy=("torch", 1)), "would write a pickle"),
        (lambda d: TorchCommonSaveStrategy("torch", 1), "would write a pickle"),
        (lambda d: dist_checkpointing.save({}, d, ("torch_dist", 1)), 'save with ("zarr", 1)'),
        (
            lambda d: dist_checkpointing.save({}, d, ZarrSaveShardedStrategy),
            "ZarrSaveShardedStrategy is no SaveShardedStrategy; give an object",
        ),
        (lambda d: dist_checkpointing.save({}, d, "zarr"), "a str is no SaveShardedStrategy"),
        (lambda d: dist_checkpointing.save([1], d), "sharded_state_dict is a list; give a dictionary"),
        (lambda d: dist_checkpointing.save({}, d / "file"), "is a file, where a folder"),
        (
            lambda d: dist_checkpointing.save(
                {"x": dist_checkpointing.ShardedTensorFactory("x", torch.zeros(1), _raising, _raising)}, d
            ),
            "x: build_fn of its factory raised ZeroDivisionError: of the user",
        ),
    ],
)
def test_what_a_user_gets_wrong_is_one_sentence_that_says_what_to_give(tmp_path: Path, call: Any, says: str) -> None:
    """S1.64, S1.67, S1.74"""
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError) as refused:
        call(tmp_path)
    assert says in str(refused.value) and "\n" not in str(refused.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_a_merge_function_that_raises_is_named_with_its_key(tmp_path: Path) -> None:
    """S1.64"""

    def build(key: str, data: torch.Tensor, *_: Any) -> ShardedTensor:
        return ShardedTensor.from_rank_offsets(key, data)

    state = {"x": dist_checkpointing.ShardedTensorFactory("x", torch.zeros(1), build, _raising)}
    dist_checkpointing.save(state, tmp_path)
    with pytest.raises(CheckpointError, match="x: merge_fn of its factory raised ZeroDivisionError: of the user"):
        dist_checkpointing.load(state, tmp_path)
