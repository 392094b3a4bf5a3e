"""The manifest and the indexes as bytes: round trips, digests, refusals, names of folders."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckpt.errors import CheckpointNotFoundError, ConfigurationError, CorruptCheckpointError
from ckpt.format.box import Box
from ckpt.format.digests import digest_of
from ckpt.format.manifest import MANIFEST_NAME, ArrayEntry, CheckpointManifest, ComponentManifest, Index, PackedPiece
from ckpt.format.manifest_parsing import parse_index, parse_manifest
from ckpt.format.places import encode_key
from ckpt.format.records import ChunkExtent, FileRecord
from ckpt.storage.checkpoint_files import CheckpointFolder
from ckpt.storage.stored import check_file, read_index, read_manifest


def manifest() -> CheckpointManifest:
    return CheckpointManifest(
        checkpoint_id="00000040",
        timestamp=datetime(2026, 3, 4, 5, 6, 7, 890, tzinfo=UTC),
        world_size=2,
        topology={"nodes": [[0, 1]], "groups": {"dp": [[0], [1]]}},
        components={"model": ComponentManifest("model", "replicated", [0, 1], [0, 1], None, 123, "ab" * 16, {"": 0})},
        arrays={
            "model/w": ArrayEntry("bfloat16", (7, 3), "zarr", "model/w", (4, 3), ((1, 0, 1), (0, 1, 1))),
            "model/ä/b": ArrayEntry("float32", (), "zarr", packed_in=(1,)),
            "model/tied": ArrayEntry("bfloat16", (7, 3), alias_of="model/w"),
        },
        files={
            "index-00000.json": (5, digest_of(b"hello")),
            "index-00001.json": (5, digest_of(b"hello")),
            "model/w/zarr.json": (3, "00" * 16),
        },
    )


def test_a_manifest_comes_back_from_its_bytes() -> None:
    assert parse_manifest(manifest().to_bytes(), "m") == manifest()


def test_the_digest_stands_on_the_last_line_but_one_and_covers_all_before() -> None:
    data = manifest().to_bytes()
    lines = data.decode().splitlines(keepends=True)
    assert lines[-1] == "}\n"
    assert lines[-2] == f'  "manifest_digest": "{digest_of("".join(lines[:-2]).encode())}"\n'
    assert json.loads(data)["checkpoint_path"] == "."


def test_no_byte_of_a_manifest_can_change_unnoticed() -> None:
    data = manifest().to_bytes()
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 4
        with pytest.raises(CorruptCheckpointError, match="its own digest"):
            parse_manifest(bytes(damaged), "m")
    for cut in range(len(data)):
        with pytest.raises(CorruptCheckpointError):
            parse_manifest(data[:cut], "m")


def test_a_newer_format_is_refused_by_version_not_as_damage() -> None:
    newer = manifest()
    newer.format_version = 2
    with pytest.raises(ConfigurationError, match="format version 2"):
        parse_manifest(newer.to_bytes(), "m")


def test_a_folder_without_a_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="is not a checkpoint"):
        read_manifest(tmp_path)
    with pytest.raises(
        CheckpointNotFoundError, match="nowhere is not a checkpoint: it does not exist. Give the folder"
    ):
        read_manifest(tmp_path / "nowhere")


def test_a_checkpoint_that_does_not_exist_is_answered_with_those_beside_it(tmp_path: Path) -> None:
    for name in ("checkpoint-1", "run/checkpoints/checkpoint-2"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / MANIFEST_NAME).touch()
    with pytest.raises(CheckpointNotFoundError) as caught:
        read_manifest(tmp_path / "checkpoint-7")
    assert str(caught.value).startswith(
        f"{tmp_path}/checkpoint-7 is not a checkpoint: it does not exist; {tmp_path} holds checkpoint-1. Give"
    )


@pytest.mark.parametrize("between", ["", "checkpoints/", "dev/checkpoints/"])
def test_a_folder_above_checkpoints_is_answered_with_their_names_the_newest_first(tmp_path: Path, between: str) -> None:
    for number, name in enumerate(("checkpoint-4", "checkpoint-1", "checkpoint-2", ".abandoned-1-x", "checkpoint-3")):
        made = tmp_path / between / name / MANIFEST_NAME
        made.parent.mkdir(parents=True)
        made.touch()
        os.utime(made, ns=(number, number))
    with pytest.raises(CheckpointNotFoundError) as caught:
        read_manifest(tmp_path)
    named = ", ".join(f"{between}checkpoint-{number}" for number in (3, 2, 1))
    assert (
        f"{tmp_path} is not a checkpoint: it has no checkpoint_manifest.json; it holds {named} and 1 more. Give"
        in str(caught.value)
    )


def test_an_index_comes_back_from_its_bytes_and_is_checked_against_the_manifest(tmp_path: Path) -> None:
    packed = "model/packed-float32-00001"
    index = Index(
        rank=1,
        files={"model/w/c/0/0": FileRecord(24, "aa" * 16), "x y": FileRecord(50, "bb" * 16)},
        chunks={"model/w": {0: ChunkExtent("model/w/c/0/0", 0, 24, (1, 2**64 - 1), 16, True)},
                packed: {0: ChunkExtent("x y", 7, 3, (9,), 4, False)}},
        packed={packed: 10},
        pieces={"model/ä/b": [PackedPiece(packed, (), Box((), ()), 4)]},
    )  # fmt: skip
    data = index.to_bytes()
    assert parse_index(data) == index
    record = manifest()
    record.files["index-00001.json"] = len(data), digest_of(data)
    (tmp_path / "index-00001.json").write_bytes(data)
    (tmp_path / MANIFEST_NAME).write_bytes(record.to_bytes())
    assert read_index(tmp_path, read_manifest(tmp_path), 1) == index
    (tmp_path / "index-00001.json").write_bytes(data.replace(b"24", b"25", 1))
    with pytest.raises(CorruptCheckpointError, match=r"index-00001\.json does not match"):
        read_index(tmp_path, record, 1)
    with pytest.raises(CorruptCheckpointError, match="does not list it"):
        read_index(tmp_path, record, 2)


def test_bytes_between_the_chunks_of_a_file_are_checked_by_the_files_own_digest(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"headAAAAmidBBtail")
    chunks = [ChunkExtent("f", 11, 2, (0,)), ChunkExtent("f", 4, 4, (0,))]
    record = FileRecord(17, digest_of(b"headmidtail"))
    check_file(CheckpointFolder(tmp_path), "f", record, chunks)
    (tmp_path / "f").write_bytes(b"headXXXXmidXXtail")
    check_file(CheckpointFolder(tmp_path), "f", record, chunks)
    (tmp_path / "f").write_bytes(b"headAAAAmiXBBtail")
    with pytest.raises(CorruptCheckpointError, match="outside of any array"):
        check_file(CheckpointFolder(tmp_path), "f", record, chunks)
    (tmp_path / "f").write_bytes(b"headAAAAmidBBtai")
    with pytest.raises(CorruptCheckpointError, match="16 bytes, its index says 17"):
        check_file(CheckpointFolder(tmp_path), "f", record, chunks)


def test_the_writer_of_a_chunk_is_found_among_runs() -> None:
    entry = ArrayEntry("float32", (90,), "zarr", "x", (10,), ((4, 0, 3), (1, 3, 1), (4, 4, 5)))
    assert [entry.writer_of(chunk) for chunk in range(9)] == [4, 4, 4, 1, 4, 4, 4, 4, 4]


@given(st.text())
@example("../../etc/passwd")
@example("packed-float32-00000")
@example("x" * 300)
@example(".")
def test_any_key_becomes_one_safe_folder_name(key: str) -> None:
    name = encode_key(key)
    assert 1 <= len(name.encode()) <= 255
    assert "/" not in name
    assert not name.startswith((".", "packed-"))
    assert name.isascii()


@given(st.text(max_size=8), st.text(max_size=8))
def test_two_keys_never_share_a_folder_name(a: str, b: str) -> None:
    assert (encode_key(a) == encode_key(b)) == (a == b)


def test_long_keys_that_differ_at_their_end_have_different_names() -> None:
    assert encode_key("x" * 200 + "a") != encode_key("x" * 200 + "b")


@given(names=st.lists(st.text(), unique=True, max_size=6), data=st.data())
def test_arrays_of_any_name_come_back_and_those_stored_alike_share_one_entry(
    names: list[str], data: st.DataObject
) -> None:
    kinds = [
        ArrayEntry("float32", (3,), "zarr", packed_in=(0, 1)),
        ArrayEntry("float32", (), "zarr", packed_in=(1,)),
        ArrayEntry("int8", (9, 9), alias_of='model/x": {"dtype": 5},\n'),
        ArrayEntry("int8", (9, 9), alias_of="model/\ud800"),
    ]
    record = manifest()
    record.arrays = {f"model/{name}": data.draw(st.sampled_from(kinds)) for name in names}
    record.arrays['model/x": {"dtype": 5},\n'] = ArrayEntry("int8", (9, 9), "zarr", 'model/"}, {', (9, 9), ((0, 0, 1),))
    record.arrays["model/\ud800"] = ArrayEntry("int8", (9, 9), "zarr", "model/w", (9, 9), ((0, 0, 1),))
    back = parse_manifest(record.to_bytes(), "m").arrays
    assert back == record.arrays and list(back) == list(record.arrays)
    assert len({id(entry) for entry in back.values()}) == len({id(entry) for entry in record.arrays.values()})


@pytest.mark.parametrize("indent", [None, 4])
def test_a_manifest_that_another_hand_has_laid_out_is_read_like_any(indent: int | None) -> None:
    tree = json.loads(manifest().to_bytes())
    del tree["manifest_digest"]
    body = json.dumps(tree, indent=indent).rstrip("}\n").encode() + b"},\n"
    closing = f'  "manifest_digest": "{digest_of(body)}"\n}}\n'.encode()
    assert parse_manifest(body + closing, "m") == manifest()


def test_an_index_keeps_every_piece_of_every_tensor() -> None:
    index = Index(
        rank=3,
        packed={"m/packed-int8-00003": 40, "m/packed-int8-00003-00001": 9},
        pieces={
            "m/\u2028'\"\n": [
                PackedPiece("m/packed-int8-00003", (6, 4), Box((0, 0), (3, 4)), 0),
                PackedPiece("m/packed-int8-00003-00001", (6, 4), Box((5, 1), (1, 3)), 6),
            ],
            "m/same": [PackedPiece("m/packed-int8-00003", (6, 4), Box((0, 0), (3, 4)), 12)],
            "m/one": [PackedPiece("m/packed-int8-00003", (3,), Box((0,), (3,)), 24)],
            "m/scalar": [PackedPiece("m/packed-int8-00003", (), Box((), ()), 27)],
        },
    )
    back = parse_index(index.to_bytes())
    assert back == index and list(back.pieces) == list(index.pieces)
    assert json.loads(index.to_bytes())["pieces"]["m/same"] == [[0, [6, 4], [0, 0], [3, 4], 12]]


def test_metrics_and_metadata_come_back_and_are_absent_where_none_were_given() -> None:
    assert '"metrics"' not in manifest().to_bytes().decode()
    noted = manifest()
    noted.metrics, noted.metadata = (
        {"loss": 0.5, "bad": None},
        {"tokens": 10**15, "names": ["ä", {"deep": [1.5, True]}]},
    )
    assert parse_manifest(noted.to_bytes(), "m") == noted


@pytest.mark.parametrize(
    "change", [{"metrics": {"loss": "low"}}, {"metrics": [1]}, {"metadata": [1]}, {"metadata": "text"}]
)
def test_metrics_and_metadata_of_other_types_are_damage(change: dict[str, object]) -> None:
    tree = json.loads(manifest().to_bytes()) | change
    del tree["manifest_digest"]
    body = json.dumps(tree).encode()[:-1] + b",\n"
    with pytest.raises(CorruptCheckpointError, match=next(iter(change))):
        parse_manifest(body + b'  "manifest_digest": "' + digest_of(body).encode() + b'"\n}\n', "m")
