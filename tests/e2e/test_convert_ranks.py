"""`recipes.convert` on several ranks: the same files as on one, or the same error on all ranks and nothing at `dst`."""

from __future__ import annotations

import re
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import StateComponent
from ckpt.catalog.verify import verify_checkpoint
from ckpt.cli.converting import ConvertKeys, LoadKeys, convert_on_ranks, run_of
from ckpt.dist_checkpointing import ShardedTensor
from ckpt.errors import CheckpointError, CorruptCheckpointError, StorageError
from ckpt.interop.safetensors import writing as exporting_safetensors
from ckpt.interop.torch_save import writing as exporting_torch
from ckpt.ranks.topology import Topology
from ckpt.storage.stored import read_index, read_manifest
from tests.e2e.test_convert import require_all_of
from tests.golden.megatron.truth import truth
from tests.support.anonymous_memory import growth
from tests.support.covering import sampled
from tests.support.ranks import run_ranks, run_threads
from tests.support.sharded_saves import bytes_of
from tests.support.states import Held, coordinator, random_bits

SHAPE = (12, 9000)
CASES = {
    "ours to safetensors": ("zarr", {"to": "safetensors", "component": None, "max_shard_size": "300KB"}),
    "ours to torch": ("ocdbt", {"to": "torch"}),
    "zarr to tensorstore": ("zarr", {"to": "tensorstore"}),
    "tensorstore to kimi-engine": ("ocdbt", {"to": "kimi-engine"}),
    "megatron zarr to safetensors": ("megatron", {"to": "safetensors", "component": None}),
}
QUICK = ("ours to safetensors", "ours to torch", "zarr to tensorstore")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of four ranks, in two formats, and one of Megatron-Core's."""
    root = tmp_path_factory.mktemp("sources")
    for name in ("zarr", "ocdbt"):
        run_threads(4, _save, root / name, name, agree_s=60.0)
    return {name: root / name / "checkpoint-1" for name in ("zarr", "ocdbt")} | {"megatron": truth("tp2").path}


def _save(topology: Topology, root: Path, backend: str) -> None:
    """Rows of a large tensor, large and small tensors of each rank, tied and empty ones, and plain values."""
    rows = slice(3 * topology.rank, 3 * topology.rank + 3)
    tile = random_bits(SHAPE, torch.float32, 0)[rows].contiguous()
    tied = random_bits((150, 120), torch.bfloat16, 1)
    model = {"w": ShardedTensor.at("w", tile, SHAPE, (rows.start, 0)), "lr": 0.1}
    common = {"a": tied, "b": tied, "small": torch.arange(7), "empty": torch.zeros(0, 3), "step": 5}
    own = {"state": random_bits((120_000,), torch.uint8, topology.rank), "seed": topology.rank}
    components = [
        StateComponent("model", Held(model), "sharded"),
        StateComponent("common", Held(common), "replicated"),
        StateComponent("own", Held(own), "per_rank"),
    ]
    coordinator(topology, root, components, backend=backend).save_checkpoint(checkpoint_id="1")


def _convert(topology: Topology, src: Path, dst: Path, keys: dict[str, Any]) -> dict[str, Any]:
    """Convert in pieces that are small against the tensors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting_safetensors, "AT_ONCE_BYTES", 50_000)
        patch.setattr(exporting_torch, "PIECE_BYTES", 50_000)
        wanted = ConvertKeys(src=str(src), dst=str(dst), load=LoadKeys(allow_pickle=True), **keys)
        return convert_on_ranks(run_of(wanted), topology)


def content(dst: Path) -> dict[str, bytes] | bytes:
    """The bytes of all files; of TensorStore's, whose names and number are not always the same, as Zarr directories."""
    if not (dst / "arrays.ocdbt").is_dir():
        return dst.read_bytes() if dst.is_file() else bytes_of(dst)
    back = dst.with_name(f"{dst.name} as zarr")
    _convert(Topology.alone(), dst, back, {"to": "zarr"})
    return bytes_of(back)


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        pytest.param(case, ranks, marks=() if ranks == 3 and case in QUICK[1:] else pytest.mark.full)
        for case in CASES
        for ranks in (3, 4, 6)
    ],
)
def test_several_ranks_write_what_one_writes(sources: dict[str, Path], tmp_path: Path, case: str, ranks: int) -> None:
    name, keys = CASES[case]
    one, many = tmp_path / "one" / "dst", tmp_path / "many" / "dst"
    alone = _convert(Topology.alone(), sources[name], one, keys)
    told = run_ranks(ranks, _convert, sources[name], many, keys)[0]
    assert (told["held"], told["lines"]) == (alone["held"], alone["lines"])
    assert told["num_files"] == sum(path.is_file() for path in (many, *many.rglob("*")))
    assert [*many.parent.iterdir()] == [many]
    assert content(many) == content(one)


@pytest.mark.parametrize("to", ["zarr", pytest.param("tensorstore", marks=pytest.mark.full)])
def test_what_megatron_core_saved_loads_as_ours_to_the_bit(tmp_path: Path, to: str) -> None:
    expected, dst = truth("tp2"), tmp_path / "dst"
    told = run_ranks(3, _convert, expected.path, dst, {"to": to})[0]
    sizes = [path.stat().st_size for path in dst.rglob("*") if path.is_file()]
    assert (told["num_files"], told["num_bytes"]) == (len(sizes), sum(sizes))
    require_all_of(expected, dst, expected.common)
    assert read_manifest(dst).index_ranks() == [0, 1, 2]
    assert verify_checkpoint(dst) == []


def _refused(topology: Topology, src: Path, dst: Path, keys: dict[str, Any], full: int | None) -> tuple[type, str]:
    """Convert, with a disk that is full for one rank, and return the error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if topology.rank == full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        with pytest.raises(CheckpointError) as refused:
            _convert(topology, src, dst, keys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return type(refused.value), str(refused.value)


def refused_on_ranks(src: Path, dst: Path, keys: dict[str, Any], full: int | None = None) -> tuple[type, str]:
    (told,) = set(run_ranks(3, _refused, src, dst, keys, full))
    assert not dst.exists() and [*dst.parent.glob(".*")] == []
    return told


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK[1:] else pytest.mark.full) for case in CASES]
)
def test_a_disk_that_is_full_for_one_rank_fails_all(sources: dict[str, Path], tmp_path: Path, case: str) -> None:
    name, keys = CASES[case]
    kind, says = refused_on_ranks(sources[name], tmp_path / "dst", keys, full=1)
    assert kind is StorageError
    assert "failed in phase write on rank 1: " in says and "File too large: '" in says


@sampled("case", QUICK)
def test_a_chunk_that_is_damaged_fails_all_ranks(sources: dict[str, Path], tmp_path: Path, case: str) -> None:
    """One of the last saved rank, which one rank reads."""
    name, keys = CASES[case]
    src = shutil.copytree(sources[name], tmp_path / "src" / "checkpoint-1")
    extent = read_index(src, read_manifest(src), 3).chunks["own/rank-00003/state"][0]
    data = bytearray((src / extent.file).read_bytes())
    data[extent.offset] ^= 1
    (src / extent.file).write_bytes(data)
    kind, says = refused_on_ranks(src, tmp_path / "dst", keys)
    assert kind is CorruptCheckpointError
    assert re.search(r"failed in phase write on rank \d: own: rank-00003/state: bytes ", says), says


def _growth(topology: Topology, src: Path, dst: Path, to: str) -> int:
    keys = ConvertKeys(src=str(src), dst=str(dst), to=to, load=LoadKeys(allow_pickle=True))
    with growth() as most:
        convert_on_ranks(run_of(keys), topology)
    return most[0]


@pytest.mark.full
@pytest.mark.parametrize("to", ["safetensors", "torch", "tensorstore"])
def test_no_rank_needs_memory_of_the_size_of_the_checkpoint(tmp_path: Path, to: str) -> None:
    """1 GiB in 16 tensors, of two saved ranks."""
    run_threads(2, _save_large, tmp_path / "root", agree_s=60.0)
    src = tmp_path / "root" / "checkpoint-1"
    told = run_ranks(2, _growth, src, tmp_path / "dst", to, is_only=True, timeout_s=120.0)
    assert max(told) < 256 << 20


def _save_large(topology: Topology, root: Path) -> None:
    state = {f"w{number}": torch.rand(16, 1 << 20) for number in range(topology.rank, 16, 2)}
    component = StateComponent("model", Held(state), "sharded")
    coordinator(topology, root, [component]).save_checkpoint(checkpoint_id="1")
