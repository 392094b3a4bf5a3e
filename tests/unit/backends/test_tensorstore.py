"""What is special about TensorStore: databases joined by reference, extents inside of data files, chunks never copied."""

from __future__ import annotations

import json
import shutil
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import psutil
import pytest
import tensorstore as ts
import torch

from ckpt.backends import tensorstore as backend_module
from ckpt.backends.ocdbt_format import tree_of
from ckpt.backends.tensorstore import TensorStoreBackend
from ckpt.errors import ConfigurationError, StorageError
from ckpt.format.box import Box, whole
from tests.support.arrays import array, read_by_extents, save
from tests.support.states import buffered, random_bits


def test_an_unknown_kvstore_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigurationError, match="kvstore=s3: expected ocdbt or file"):
        TensorStoreBackend(kvstore="s3")


def test_arrays_in_files_are_neither_listed_nor_removed_by_database(tmp_path: Path) -> None:
    backend = TensorStoreBackend(kvstore="file")
    save(backend, tmp_path, dict([array("model/w", torch.arange(6.0))]))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigurationError, match="TensorStoreBackend.list_arrays needs kvstore='ocdbt'"):
        backend.list_arrays(tmp_path)
    with pytest.raises(ConfigurationError, match="TensorStoreBackend.remove needs kvstore='ocdbt'"):
        backend.remove(tmp_path, ["model/w"])
    assert sorted(tmp_path.rglob("*")) == before


def test_each_rank_has_a_database_and_the_joined_one_refers_to_them(tmp_path: Path) -> None:
    arrays = dict(array(f"model/w{at}", torch.arange(200.0) + at, 100) for at in range(4))
    saved = save(TensorStoreBackend(), tmp_path, arrays, ranks=(0, 2, 11))
    assert {Path(file).parts[:2] for file in saved.rank_files} == {
        ("arrays.ocdbt", "rank-00000"), ("arrays.ocdbt", "rank-00002"), ("arrays.ocdbt", "rank-00011")
    }  # fmt: skip
    assert all(Path(file).parts[1] in ("d", "manifest.ocdbt") for file in saved.lead_files)
    joined = sum((tmp_path / file).stat().st_size for file in saved.lead_files)
    assert joined < 16_000  # descriptions and B-tree nodes: no chunk has been copied
    database = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{tmp_path}/arrays.ocdbt/"}).result()
    keys = [key.decode() for key in database.list().result()]
    assert keys == sorted([*(f"model/w{at}/c/{n}" for at in range(4) for n in range(2)),
                           *(f"model/w{at}/zarr.json" for at in range(4)), "model/zarr.json", "zarr.json"])  # fmt: skip
    assert json.loads(database.read("zarr.json").result().value)["node_type"] == "group"


def test_extents_are_found_in_b_trees_of_any_height(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "_CONFIG", {**backend_module._CONFIG, "max_decoded_node_bytes": 400})
    monkeypatch.setattr(backend_module, "tree_of", partial(tree_of, node_bytes=400))
    arrays = dict(array(f"model/layer.{at:03}.weight", torch.arange(3.0) + at) for at in range(300))
    saved = save(TensorStoreBackend(), tmp_path, arrays)
    for database in ("arrays.ocdbt", "arrays.ocdbt/rank-00000"):
        assert _newest(tmp_path / database)["height"] >= 2
    for spec, value in arrays.items():
        assert torch.equal(read_by_extents(saved, spec, whole((3,))), value)


def test_every_value_lies_outside_of_the_nodes(tmp_path: Path) -> None:
    arrays = dict([array("model/tiny", torch.tensor(3, dtype=torch.int8))])
    save(TensorStoreBackend(), tmp_path, arrays)
    entries = _newest(tmp_path / "arrays.ocdbt")["entries"]
    assert all("indirect_value" in entry for entry in entries)


def test_a_value_inside_a_node_is_refused_because_no_extent_can_name_it(tmp_path: Path) -> None:
    folder = tmp_path / "arrays.ocdbt/rank-00000"
    kvstore = {"driver": "ocdbt", "base": f"file://{folder}/", "config": {"max_inline_value_bytes": 100}}
    ts.KvStore.open(kvstore).result().write("model/tiny/c", b"\3").result()
    with pytest.raises(StorageError, match="'model/tiny/c' lies inside a B-tree node"):
        TensorStoreBackend().join(tmp_path, [0], lambda _: None)


def test_joining_without_one_rank_s_database_names_the_rank(tmp_path: Path) -> None:
    arrays = dict([array("model/w", torch.arange(8.0), 2)])
    backend = TensorStoreBackend()
    save(backend, tmp_path, arrays, ranks=(0, 1))
    with pytest.raises(StorageError, match="arrays.ocdbt/rank-00007 is missing, where rank 7 has committed"):
        backend.join(tmp_path, [0, 1, 7], lambda _: None)


def test_a_join_that_fails_writes_nothing_afterwards_into_a_folder_that_is_removed(tmp_path: Path) -> None:
    backend = TensorStoreBackend()
    roots = [tmp_path / str(turn) for turn in range(12)]
    for root in roots:
        root.mkdir()
        for rank in range(6):
            writer = backend.writer(root, rank, lambda _: None)
            spec, value = array(f"model/{rank}", torch.arange(16.0), 16)
            writer.write(spec, 0, value)
            writer.describe([spec])
            writer.finish()
        for data in root.glob("arrays.ocdbt/rank-00000/d/*"):
            data.write_bytes(b"damaged")
        with pytest.raises(StorageError, match="tensorstore could not join the databases"):
            backend.join(root, range(6), lambda _: None)
        shutil.rmtree(root)
    time.sleep(0.2)
    assert list(tmp_path.iterdir()) == []


def test_a_join_that_loses_values_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def as_rank_0(folder: Path) -> dict[str, Any]:
        return original(folder.parent / "rank-00000" if folder.name == "rank-00001" else folder)

    original = backend_module._database
    monkeypatch.setattr(backend_module, "_database", as_rank_0)
    with pytest.raises(StorageError, match="holds 3 values where 7 were joined, 3 of them in their places"):
        save(TensorStoreBackend(), tmp_path, dict([array("model/w", torch.arange(8.0), 2)]), ranks=(0, 1))


@pytest.mark.parametrize("kvstore", ["ocdbt", "file"])
def test_chunks_are_written_from_little_more_than_the_caller_s_memory(tmp_path: Path, kvstore: str) -> None:
    spec, value = array("model/w", random_bits((16 << 20,), torch.int32, 0), 4 << 20)  # 64 MiB
    writer = buffered(TensorStoreBackend(kvstore=kvstore), num_bytes=8 << 20).writer(tmp_path, 0, lambda num_bytes: None)
    process = psutil.Process()
    before = process.memory_info().rss
    peak = 0
    for number, host in enumerate(value.split(4 << 20)):
        writer.write(spec, number, host)
        peak = max(peak, process.memory_info().rss)
    writer.finish()
    assert max(peak, process.memory_info().rss) - before < 16 << 20


@pytest.mark.parametrize("kvstore", ["ocdbt", "file"])
def test_the_caller_may_reuse_its_memory_after_finish(tmp_path: Path, kvstore: str) -> None:
    spec, value = array("model/w", torch.arange(40_000.0), 20_000)
    backend = TensorStoreBackend(kvstore=kvstore)
    host = value[:20_000].clone()
    writer = backend.writer(tmp_path, 0, lambda num_bytes: None)
    writer.write(spec, 0, host)
    writer.describe([spec], ["model"])
    written = writer.finish()
    host.fill_(-1)
    writer.make_durable()
    backend.join(tmp_path, [0], lambda _: None)
    out = torch.zeros(20_000)
    backend.read(tmp_path, spec, Box((0,), (20_000,)), out)
    assert torch.equal(out, value[:20_000])
    assert list(written.chunks) == [("model/w", 0)]


class SlowFuture:
    """A commit that takes a while, and during which this process is sent a signal."""

    def __init__(self) -> None:
        self.polls = 0

    def result(self, timeout: float) -> str:
        self.polls += 1
        if self.polls == 3:
            signal.raise_signal(signal.SIGUSR1)
        if self.polls < 6:
            raise TimeoutError
        assert timeout < 1
        return "committed"


def test_a_long_commit_leaves_room_for_signals() -> None:
    seen: list[Any] = []
    previous = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append("signal"))
    try:
        assert backend_module._wait(SlowFuture()) == "committed"
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert seen == ["signal"]


def test_other_threads_run_while_a_commit_is_waited_for() -> None:
    promise, future = ts.Promise.new()
    waiting = threading.Thread(target=backend_module._wait, args=(future,))
    waiting.start()
    promise.set_result(7)  # a wait that held the interpreter would never let us come here
    waiting.join(timeout=5)
    assert not waiting.is_alive()


def test_the_checksum_is_crc32c() -> None:
    assert google_crc32c.value(b"123456789") == 0xE3069283


def test_the_values_of_a_rank_take_no_more_than_one_file_and_it_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = TensorStoreBackend().writer(tmp_path, 3, lambda num_bytes: None)
    for at in range(5):
        spec, value = array(f"model/w{at}", torch.arange(1000.0) + at, 500)
        writer.write(spec, 0, value[:500])
        writer.write(spec, 1, value[500:])
    monkeypatch.setattr(Path, "open", None)
    monkeypatch.setattr("builtins.open", None)
    written = writer.finish()
    monkeypatch.undo()
    kinds = sorted(Path(file).parts[2] for file in written.files)
    assert kinds == ["d", "manifest.ocdbt"]
    assert {chunk.file for chunk in written.chunks.values()} < set(written.files)


def _newest(database: Path) -> dict[str, Any]:
    base = ts.KvStore.open({"driver": "file", "path": f"{database}/"}).result()
    root = ts.ocdbt.dump(base).result()["versions"][-1]["root"]["location"]
    node: dict[str, Any] = ts.ocdbt.dump(base, root).result()
    return node


def test_the_numpy_type_of_every_stored_type_has_the_size_of_torch_s() -> None:
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.complex128):
        spec, _ = array("w", torch.zeros(1, dtype=dtype))
        assert np.dtype(ts.dtype(spec.dtype).numpy_dtype).itemsize == dtype.itemsize
