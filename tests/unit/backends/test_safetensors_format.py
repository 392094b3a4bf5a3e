"""Headers of safetensors files: what we write the library reads, what it writes we read, and no two tensors share a name."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from ckpt.backends import kimi_engine
from ckpt.backends.kimi_engine import KimiEngineBackend
from ckpt.backends.safetensors_format import (
    Header,
    are_sound,
    entries_of,
    index_bytes,
    name_of,
    parse_any_header,
    parse_header,
    read_shard,
)
from ckpt.errors import CorruptCheckpointError, StorageError
from ckpt.format.box import Box, chunk_box, num_chunks, whole
from ckpt.format.dtypes import item_bytes, torch_dtype, zarr_name
from ckpt.format.records import ArraySpec, Content, Expected
from ckpt.storage import direct_io
from tests.support import plain_safetensors
from tests.support.arrays import array, expected, save
from tests.support.states import ALL_DTYPES, buffered, random_bits, same_bits

keys = st.text(st.characters(), max_size=12) | st.sampled_from(
    ["__metadata__", "w[0:2]", "w[0:2]?", "[]", "w[0:2][0:2]"]
)


@st.composite
def contents(draw: st.DrawFn) -> Content:
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    offsets = tuple(draw(st.integers(0, side)) for side in shape)
    box = Box(offsets, tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offsets, strict=True)))
    return Content(draw(keys), shape, draw(st.sampled_from([box, whole(shape)])))


@given(contents(), contents())
@example(Content("w[0:2]", (2,), whole((2,))), Content("w", (4,), Box((0,), (2,))))
@example(Content("\udcff", (2,), whole((2,))), Content("%ED%B3%BF", (4,), Box((0,), (2,))))
@example(Content("w[0:2]", (), whole(())), Content("w[0:2][]", (), whole(())))
def test_two_tensors_or_parts_never_share_a_name(a: Content, b: Content) -> None:
    if name_of(a) == name_of(b):
        assert a.key == b.key
    if a.shape == b.shape:
        assert (name_of(a) == name_of(b)) == ((a.key, a.box) == (b.key, b.box))
    assert name_of(a).encode().decode() == name_of(a)


def _repeated(text: str, length: int) -> str:
    return text * -(-length // len(text))


# Not st.text(min_size=3000): most examples would be too large for hypothesis, which now and then refuses to go on.
long_keys = st.builds(_repeated, st.text(min_size=1, max_size=50), st.integers(3000, 5000))


@given(
    st.lists(st.tuples(keys | long_keys, st.lists(st.integers(0, 3), max_size=3)), max_size=12),
    st.sampled_from(ALL_DTYPES),
    st.randoms(use_true_random=False),
)
@settings(max_examples=30)
def test_room_left_for_a_header_is_enough_and_the_library_opens_the_file(
    tmp_path_factory: pytest.TempPathFactory,
    tensors: list[tuple[str, list[int]]],
    dtype: torch.dtype,
    dice: object,
) -> None:
    """Some of them in the file, in any order, as a save that links others leaves it."""
    name = zarr_name(dtype)
    unique = {key: Content(key, tuple(shape), whole(tuple(shape))) for key, shape in tensors}
    header = Header(entries_of(name, unique.values(), 0))
    chosen = [one for one in unique.values() if dice.random() < 0.7]  # type: ignore[attr-defined]
    dice.shuffle(chosen)  # type: ignore[attr-defined]
    at, placed, data = 0, [], b""
    for seed, one in enumerate(chosen):
        placed.append((at, entries_of(name, [one], 0)))
        data += bytes(random_bits((math.prod(one.shape), item_bytes(name)), torch.uint8, seed).flatten().tolist())
        at = len(data)
    file = tmp_path_factory.mktemp("header") / "it.safetensors"
    file.write_bytes(header.to_bytes(placed) + data)
    assert header.num_bytes % 64 == 0
    assert {entry.content for entry in read_shard(file).entries} == set(chosen)
    with safe_open(file, "pt") as opened:
        assert set(opened.keys()) == {name_of(one) for one in chosen}
    for one in chosen:
        found = plain_safetensors.tensor(file, name_of(one))
        assert (found.dtype, tuple(found.shape)) == (torch_dtype(name), one.shape)


def test_files_of_others_are_read_by_name(tmp_path: Path) -> None:
    tensors = {f"t.{number}": random_bits((3, number), torch.float32, number) for number in range(4)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"epoch": "3"})
    shard = read_shard(tmp_path / "model.safetensors")
    assert {entry.content.key: entry.content.shape for entry in shard.entries} == {
        key: tuple(tensor.shape) for key, tensor in tensors.items()
    }
    data = (tmp_path / "model.safetensors").read_bytes()
    for entry in shard.entries:
        begin = shard.data_start + entry.start
        assert data[begin : begin + entry.num_bytes] == tensors[entry.name].numpy().tobytes()


odd = (
    st.none() | st.booleans() | st.integers(-2, 1 << 64) | st.floats() | keys | st.lists(st.integers(-1, 9), max_size=3)
)
a_row = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "I8"]) | odd,
        "shape": st.lists(st.integers(0, 9), max_size=3) | odd,
        "data_offsets": st.lists(st.integers(0, 99), min_size=2, max_size=2) | odd,
    },
    optional={"more": odd},
)


@given(
    st.lists(st.tuples(keys, a_row), max_size=4),
    st.none() | odd | st.dictionaries(keys, st.text(max_size=3) | odd, max_size=3),
    st.integers(0, 1 << 16),
    st.sampled_from([b"", b"{", b'"', b",", b":", b"\\", b"\xff", b'"dtype":"I8",', b"NaN", b" "]),
)
@example([("w", {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]})], {"dtype": "a", "shape": "b"}, 0, b"")
@example([("w", {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]})] * 2, None, 0, b"")
def test_a_header_is_parsed_in_the_fast_way_as_in_the_strict_one(
    rows: list[tuple[str, dict[str, object]]], metadata: object, at: int, noise: bytes
) -> None:
    """Rows may repeat a name; bytes are put in somewhere."""
    named = [(name, one) for name, one in rows if name != "__metadata__"] + [("__metadata__", metadata)] * (
        metadata is not None
    )
    text = f"{{{','.join(f'{json.dumps(name)}:{json.dumps(one)}' for name, one in named)}}}".encode()
    text = text[: at % (len(text) + 1)] + noise + text[at % (len(text) + 1) :]

    def outcome(parsed: object) -> object:
        try:
            return parsed(text, "it")  # type: ignore[operator]
        except CorruptCheckpointError as error:
            return str(error)

    assert outcome(parse_header) == outcome(parse_any_header)


places = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(0, 12)), max_size=5)


@given(places, st.integers(0, 14), st.booleans())
@example([(0, (1 << 63) - 1, (1 << 63) - 1)], 8, False)
def test_places_are_sound_if_they_have_their_sizes_lie_in_the_file_and_no_two_overlap(
    ranges: list[tuple[int, int, int]], num_bytes: int, true_sizes: bool
) -> None:
    sizes = [end - begin if true_sizes and end >= begin else size for begin, end, size in ranges]
    used = [byte for begin, end, _ in ranges if num_bytes >= end for byte in range(begin, end)]
    expected = (
        all(end - begin == size for (begin, end, _), size in zip(ranges, sizes, strict=True))
        and all(begin <= end <= num_bytes for begin, end, _ in ranges)
        and len(used) == len(set(used))
    )
    table = np.array([one[:2] for one in ranges], np.int64).reshape(-1, 2)
    assert are_sound(table, np.array(sizes, np.int64), num_bytes) == expected


def row(dtype: str, shape: list[object], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def header_of(rows: dict[str, object], num_bytes: int = 24) -> bytes:
    text = json.dumps(rows).encode()
    return len(text).to_bytes(8, "little") + text + bytes(num_bytes)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ({"w": row("F32", [2], 0, 8), "v": row("F32", [2], 4, 12)}, "bytes of its tensors are used twice, from 4 to 8"),
        ({"w": row("F32", [-2], 0, 8)}, "Expected `int` >= 0"),
        ({"w": row("F32", [1 << 62, 1 << 62], 0, 8)}, "cannot be 'w'"),
        ({"w": row("F32", [2], -8, 0)}, "Expected `int` >= 0"),
        ({"w": row("F32", [float("nan")], 0, 8)}, "NaN is no JSON"),
        ({"w": row("F32", [True, 2], 0, 8)}, "Expected `int`, got `bool`"),
        ({"w": row("F32", [6], 0, 24) | {"dtype": ["F32"]}}, "Expected `str`"),
        ({"__metadata__": {"ckpt.parts": "[1]"}, "w": row("F32", [2], 0, 8)}, "Expected `object`"),
        ({"__metadata__": {"ckpt.parts": '{"w": ["k", [3], [2]]}'}, "w": row("F32", [2], 0, 8)}, "is no part of a tensor"),
        ({"__metadata__": {"complex128": '["w"]'}, "w": row("F32", [2], 0, 8)}, "cannot be pairs"),
        ({"__metadata__": {"complex128": "[" * 90_000 + "]" * 90_000}, "w": row("F32", [2], 0, 8)}, "nested too deeply"),
        ({"__metadata__": {"more": 5}}, "Expected `str`"),
    ],
)  # fmt: skip
def test_a_header_that_lies_is_refused(tmp_path: Path, rows: dict[str, object], sentence: str) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(header_of(rows))
    with pytest.raises(CorruptCheckpointError) as caught:
        read_shard(file)
    assert sentence in str(caught.value)


def test_a_header_that_claims_to_be_longer_than_any_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes((100 << 30).to_bytes(8, "little"))
    os.truncate(file, 200 << 30)
    with pytest.raises(CorruptCheckpointError, match=f"its header should have {100 << 30}"):
        read_shard(file)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda data: b"", "is an empty file"),
        (lambda data: data[:5], "has 5 bytes"),
        (lambda data: (1 << 62).to_bytes(8, "little") + data[8:], "its header should have 4611686018427387904"),
        (lambda data: data[:60], "its header should have"),
        (lambda data: data[:-1], "bytes 0 to 24 of 23 cannot be 'w'"),
        (lambda data: data.replace(b'"F32"', b'"F33"'), "its header has 'F33'"),
        (lambda data: data.replace(b"[2,3]", b"[2,4]"), "cannot be 'w' of shape \\[2, 4\\]"),
        (lambda data: data.replace(b"{", b"[", 1), "is no safetensors file"),
        (lambda data: data.replace(b'"data_offsets"', b'"data_offxets"'), "required field `data_offsets`"),
        (lambda data: (2).to_bytes(8, "little") + b"[]" + data, "its header is no object"),
    ],
)
def test_a_file_that_is_none_or_is_damaged_is_refused_by_name(tmp_path: Path, damage: object, sentence: str) -> None:
    save(KimiEngineBackend(pool=False), tmp_path, dict([array("model/w", torch.arange(6.0).reshape(2, 3))]), ranks=(0,))
    file = tmp_path / "model/rank-00000-float32.safetensors"
    file.write_bytes(damage(file.read_bytes()))  # type: ignore[operator]
    with pytest.raises(CorruptCheckpointError, match=f"{file} is no safetensors file: .*{sentence}|{sentence}"):
        read_shard(file)
    file.unlink()
    with pytest.raises(CorruptCheckpointError, match=f"{file} cannot be read: No such file or directory"):
        index_bytes(file.parent, [file.name], lambda _: None)


def test_the_index_names_whole_tensors_as_hugging_face_does_and_every_part_of_the_others(tmp_path: Path) -> None:
    arrays = dict(
        [
            array("model/a", torch.arange(6.0), 3),
            array("model/b", torch.arange(4)),
            array("model/c", random_bits((3, 4), torch.complex128, 0), 2, 4),
        ]
    )
    save(KimiEngineBackend(pool=False), tmp_path, arrays)
    text = (tmp_path / "model/model.safetensors.index.json").read_text()
    assert json.loads(text) == {
        "metadata": {"total_size": 24 + 32 + 192},
        "weight_map": {"b": "rank-00000-int64.safetensors"},
        "parts": {
            "a": {
                "dtype": "float32",
                "shape": [6],
                "parts": [
                    {"file": "rank-00000-float32.safetensors", "name": "a[0:3]", "offset": [0], "shape": [3]},
                    {"file": "rank-00003-float32.safetensors", "name": "a[3:6]", "offset": [3], "shape": [3]},
                ],
            },
            "c": {
                "dtype": "complex128",
                "shape": [3, 4],
                "parts": [
                    {"file": "rank-00000-complex128.safetensors", "name": "c[2:3, 0:4]", "offset": [2, 0], "shape": [1, 4]},
                    {"file": "rank-00003-complex128.safetensors", "name": "c[0:2, 0:4]", "offset": [0, 0], "shape": [2, 4]},
                ],
            },
        },
    }  # fmt: skip
    assert text.count("\n") > 5  # a tensor a line


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[ArraySpec, torch.Tensor], tuple[int, ...]]:
    ranks = tuple(draw(st.lists(st.integers(0, 99_999), min_size=1, max_size=5, unique=True)))
    arrays = {}
    for number in range(draw(st.integers(1, 6))):
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        grid = [draw(st.integers(1, max(side, 1))) for side in shape]
        dtype = draw(st.sampled_from(ALL_DTYPES))
        folder = draw(st.sampled_from(["model", "rng/rank-00001", "a/b"]))
        spec, value = array(f"{folder}/{number}", random_bits(shape, dtype, number), *grid)
        arrays[spec] = value
    return arrays, tuple(sorted(ranks))


@pytest.mark.usefixtures("turns")
@given(cases())
@settings(max_examples=20, deadline=None)
def test_whatever_lies_on_whichever_ranks_plain_safetensors_opens_all_of_it_by_name(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[dict[ArraySpec, torch.Tensor], tuple[int, ...]]
) -> None:
    arrays, ranks = case
    root = tmp_path_factory.mktemp("root")
    saved = save(KimiEngineBackend(pool=False), root, arrays, ranks=ranks)
    assert saved.files_found() == {*saved.rank_files, *saved.lead_files}
    for folder in {spec.path.rpartition("/")[0] for spec in arrays}:
        here = {
            spec.path.rpartition("/")[2]: value for spec, value in arrays.items() if spec.path.startswith(f"{folder}/")
        }
        assert plain_safetensors.keys_in(root / folder) == set(here)
        plain_safetensors.names_in(root / folder)
        for key, value in here.items():
            assert same_bits(plain_safetensors.read(root / folder, key), value)


def test_names_that_fill_more_than_a_header_are_dealt_out_to_several_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kimi_engine, "_FULL_HEADER_BYTES", 1000)
    monkeypatch.setattr(kimi_engine, "MOST_HEADER_BYTES", 2000)
    arrays = dict(array(f"model/{'k' * 40}{number}", torch.arange(4) + number, 2) for number in range(30))
    arrays |= dict(array(f"model/empty{number}", torch.zeros(0, dtype=torch.int64)) for number in range(3))
    saved = save(KimiEngineBackend(pool=False), tmp_path, arrays)
    shards = sorted((tmp_path / "model").glob("*.safetensors"))
    assert len(shards) > 6 and len(shards) == len(saved.rank_files)
    assert all(read_shard(file).data_start <= 1000 for file in shards)
    plain_safetensors.names_in(tmp_path / "model")
    for spec, value in arrays.items():
        assert same_bits(plain_safetensors.read(tmp_path / "model", spec.path.removeprefix("model/")), value)
    spec = ArraySpec("model/packed-int64-00000", "int64", (40,), (40,))
    pack = Expected(spec, 0, [Content("k" * 200 + str(number), (1,), whole((1,))) for number in range(40)])
    with pytest.raises(StorageError, match="40 tensors, of which 'k+0' is one, would lie in one .* readers take 2000"):
        KimiEngineBackend(pool=False).writer(tmp_path, 7, lambda _: None).expect([pack])


def test_a_file_of_each_of_many_types_and_folders_grows_at_once(tmp_path: Path) -> None:
    """More of them than there are buffers, each past a buffer's end, and none at the end of a block."""
    specs = [
        array(f"{folder}/{zarr_name(dtype)}", random_bits((3, 100_001), dtype, 1), 1, 100_001)
        for folder in ("model", "optimizer")
        for dtype in (torch.float32, torch.int64, torch.uint8, torch.bfloat16, torch.complex128)
    ]
    arrays = dict(specs)
    backend = buffered(KimiEngineBackend(pool=False), num_bytes=1 << 20)
    writer = backend.writer(tmp_path, 0, lambda _: None)
    chunks = [(spec, number) for number in range(3) for spec in arrays]
    writer.expect(
        Expected(spec, n, [Content(spec.path.rpartition("/")[2], spec.shape, chunk_box(spec.shape, spec.grid, n))])
        for spec, n in chunks
    )
    for spec, number in chunks:
        assert math.prod(num_chunks(spec.shape, spec.grid)) == 3
        writer.write(spec, number, arrays[spec][number : number + 1].contiguous())
    written = writer.finish()
    writer.make_durable()
    backend.join(tmp_path, [0], lambda _: None)
    assert {file: record.size for file, record in written.files.items()} == {
        file: (tmp_path / file).stat().st_size for file in written.files
    }
    for spec, value in arrays.items():
        folder, _, key = spec.path.partition("/")
        assert same_bits(plain_safetensors.read(tmp_path / folder, key), value)


def test_a_save_that_is_given_up_while_many_files_grow_ends_without_a_word(tmp_path: Path) -> None:
    """What is to be told is why it was given up."""
    arrays = dict(
        array(f"model/{number}", random_bits((300_001,), dtype, 1))
        for number, dtype in enumerate((torch.float32, torch.int64, torch.uint8, torch.bfloat16, torch.complex128))
    )
    writer = buffered(KimiEngineBackend(pool=False), num_bytes=1 << 20).writer(tmp_path, 0, lambda _: None)
    writer.expect(expected(spec, 0) for spec in arrays)
    for spec, value in arrays.items():
        writer.write(spec, 0, value)
    writer.abort()
    before = {file: file.stat().st_size for file in tmp_path.rglob("*.safetensors")}
    time.sleep(0.05)
    assert {file: file.stat().st_size for file in tmp_path.rglob("*.safetensors")} == before
    assert len(before) == 5


def test_room_on_the_disk_is_asked_for_once_for_a_large_file_and_not_at_all_for_a_small_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(direct_io, "reserve", lambda fd, offset, num_bytes: asked.append(num_bytes) is None)
    small = [array(f"rng/rank-00000/{dtype}", random_bits((9,), dtype, 1)) for dtype in ALL_DTYPES]
    large = array("model/w", random_bits((600_000,), torch.float32, 1), 200_000)
    saved = save(KimiEngineBackend(pool=False), tmp_path, dict([*small, large]), ranks=(0,))
    assert asked == [saved.rank_files["model/rank-00000-float32.safetensors"].size]
