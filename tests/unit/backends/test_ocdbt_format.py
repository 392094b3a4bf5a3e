"""Databases put together by us are read, value by value, by TensorStore, however high their trees."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.backends.ocdbt_format import Value, manifest_of, tree_of

FILE = "d/0123456789abcdef0123456789abcdef"


OTHERS = ("d/01ffffffffffffffffffffffffffffff", "d/0123456789abcdef0123456789abcdee", "d/z")


def put_together(folder: Path, values: dict[bytes, bytes], node_bytes: int, files: Sequence[str] = (FILE,)) -> int:
    """Make a database of these values, dealt out to these files, below `folder`, and return the height of its root."""
    data = dict.fromkeys((FILE, *files), b"")
    entries = []
    for (key, value), file in zip(values.items(), cycle(files)):
        entries.append(Value(key, file, len(data[file]), len(value)))
        data[file] += value
    nodes, root = tree_of(entries, FILE, len(data[FILE]), node_bytes=node_bytes)
    data[FILE] += b"".join(nodes)
    (folder / "d").mkdir()
    for file, content in data.items():
        (folder / file).write_bytes(content)
    (folder / "manifest.ocdbt").write_bytes(manifest_of(root, FILE, bytes(range(16)), 1_700_000_000_000_000_000))
    return root.height


def opened(folder: Path) -> ts.KvStore:
    return ts.KvStore.open({"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}}).result()


@given(
    st.dictionaries(
        st.one_of(st.binary(min_size=1, max_size=40), st.integers(0, 99).map(lambda at: b"model/layer.%d/c/0" % at)),
        st.binary(max_size=20),
        min_size=1,
        max_size=60,
    ),
    st.integers(40, 2000),
    st.lists(st.sampled_from([FILE, *OTHERS]), min_size=1, max_size=5),
)
@settings(max_examples=60, deadline=None)
def test_any_keys_in_nodes_of_any_size_are_found_again_in_whatever_files_their_values_lie(
    tmp_path_factory: pytest.TempPathFactory, values: dict[bytes, bytes], node_bytes: int, files: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("database")
    put_together(folder, values, node_bytes, files)
    database = opened(folder)
    assert sorted(database.list().result()) == sorted(values)
    for key, value in values.items():
        assert database.read(key).result().value == value
    assert database.read(b"\xff" * 41).result().state == "missing"


@pytest.mark.parametrize(("node_bytes", "height"), [(1 << 20, 0), (2000, 1), (300, 3)])
def test_a_tree_is_as_high_as_its_nodes_are_small(tmp_path: Path, node_bytes: int, height: int) -> None:
    values = {b"model/layer.%03d.weight/c/0" % at: b"%d" % at for at in range(400)}
    assert put_together(tmp_path, values, node_bytes) == height
    database = opened(tmp_path)
    assert sorted(database.list().result()) == sorted(values)
    statistics = ts.ocdbt.dump(database.base).result()["versions"][0]["root"]["statistics"]
    nodes = (tmp_path / FILE).stat().st_size - sum(map(len, values.values()))
    assert statistics == {
        "num_keys": 400,
        "num_tree_bytes": nodes,
        "num_indirect_value_bytes": sum(map(len, values.values())),
    }


def test_tensorstore_goes_on_from_a_database_of_ours(tmp_path: Path) -> None:
    put_together(tmp_path, {b"a": b"1", b"b": b"2"}, 1000)
    database = opened(tmp_path)
    database.write("c", b"3").result()
    database.delete_range(ts.KvStore.KeyRange("a", "b")).result()
    assert {key: opened(tmp_path)[key] for key in (b"b", b"c")} == {b"b": b"2", b"c": b"3"}
    assert sorted(opened(tmp_path).list().result()) == [b"b", b"c"]
