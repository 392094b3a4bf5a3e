"""The crafts: what somebody may write into a checkpoint and sign.

Paths that lead outside stand in every field that holds a path, and are right in all else: the file outside holds the very bytes, so
nothing but a look at the path refuses it. Records that contradict themselves are tables of (place in the tree, values).
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from tests.adversarial.foreign import Craft
from tests.support.bounded import ZSTD_SKIPPED, zstd_frame
from tests.support.crafts import edit_file, edit_index, edit_json, edit_manifest, resign, signed, write_listed
from tests.support.crafts import write_manifest as write_signed

Tree = dict[str, Any]
Way = tuple[str | int, ...]
MANIFEST = "checkpoint_manifest.json"
LARGE, LARGE_FILE = "model/large", "model/large/c/0/0"
OUTSIDE = "../../secret/checkpoint-2"
_HUGE = 10**18
_NAN = float("nan")


def crafts() -> Iterator[Craft]:
    """All of them, each under a name of its own."""
    yield from _paths()
    yield from _links()
    yield from _lies()
    yield from _texts()
    yield from _plain_values()
    yield from _sizes()
    yield from _formats()


# Paths


def _paths() -> Iterator[Craft]:
    ways_out: dict[str, Callable[[Path, str], str]] = {
        "../..": lambda folder, file: f"{OUTSIDE}/{file}",
        "inside ../..": lambda folder, file: f"model/../{OUTSIDE}/{file}",
        "absolute": lambda folder, file: str(folder / OUTSIDE / file),
        "through a link": lambda folder, file: f"link/{file}",
        "dots": lambda folder, file: f"./model/../{file}",
        "proc": lambda folder, file: f"/proc/self/cwd{folder.resolve()}/{OUTSIDE}/{file}",
        "a NUL": lambda folder, file: f"{file}\0",
        "nothing": lambda folder, file: "",
        "a lone surrogate": lambda folder, file: f"{file}\ud800",
        "very long": lambda folder, file: "x/" * 3000 + file,
    }
    fields: dict[str, Callable[[Path, Callable[[str], str]], None]] = {
        "a file of the index": _move_data_file,
        "the path of an array": _move_array,
        "a packed array": _move_packed,
        "a file of the manifest": _move_listed,
        "plain_in": _move_plain,
        "a component": _move_component,
    }
    for field, move in fields.items():
        for name, way_out in ways_out.items():
            yield Craft(f"{field} is {name}", partial(_moved, move, way_out))
    for name in ("../..", "absolute"):
        for backend, file in (("tensorstore", None), ("kimi-engine", "model/rank-00000-float32.safetensors")):
            change = partial(_moved, partial(_move_data_file, file=file), ways_out[name])
            yield Craft(f"a file of the index is {name}, {backend}", change, backend)
    yield Craft(
        "an index far away", lambda folder: _rename_listed(folder, "index-00000.json", f"{OUTSIDE}/index-00000.json")
    )
    yield Craft(
        "an index of rank 10^9", lambda folder: _rename_listed(folder, "index-00000.json", "index-1000000000.json")
    )
    yield Craft("a nested manifest outside", partial(_add_listed, f"{OUTSIDE}/{MANIFEST}"))
    yield Craft("a nested manifest that is itself", partial(_add_listed, f"./{MANIFEST}"))
    yield Craft(
        "checkpoint_path leads outside", lambda f: edit_manifest(f, lambda t: t.update(checkpoint_path=OUTSIDE))
    )
    yield Craft(
        "checkpoint_id leads outside",
        lambda f: edit_manifest(f, lambda t: t.update(checkpoint_id=OUTSIDE)),
        sound=True,
        forged=True,
    )
    yield Craft("a dead file outside", partial(_moved, _add_dead, ways_out["../.."]))


def _moved(
    move: Callable[[Path, Callable[[str], str]], None], way_out: Callable[[Path, str], str], folder: Path
) -> None:
    (folder / "link").symlink_to(folder / OUTSIDE)
    move(folder, partial(way_out, folder))


def _renamed(table: Tree, old: str, new: str) -> None:
    """Rename a key where it stands: rows of an index are numbered."""
    rows = list(table.items())
    table.clear()
    table.update((new if key == old else key, value) for key, value in rows)


def _move_data_file(folder: Path, way_out: Callable[[str], str], file: str | None = LARGE_FILE) -> None:
    def change(tree: Tree) -> None:
        old = file or next(name for name in tree["files"] if "/d/" in name)
        _renamed(tree["files"], old, way_out(old))

    edit_index(folder, 0, change)


def _move_array(folder: Path, way_out: Callable[[str], str]) -> None:
    edit_index(folder, 0, lambda tree: _renamed(tree["chunks"], LARGE, way_out(LARGE)))
    edit_manifest(folder, lambda tree: tree["arrays"][LARGE].update(path=way_out(LARGE)))


def _move_packed(folder: Path, way_out: Callable[[str], str]) -> None:
    old = "model/packed-bfloat16-00000"
    edit_index(folder, 0, lambda tree: [_renamed(tree[table], old, way_out(old)) for table in ("chunks", "packed")])


def _move_listed(folder: Path, way_out: Callable[[str], str]) -> None:
    _rename_listed(folder, "config.yaml", way_out("config.yaml"))


def _rename_listed(folder: Path, old: str, new: str) -> None:
    edit_manifest(folder, lambda tree: _renamed(tree["files"], old, new))


def _add_listed(path: str, folder: Path) -> None:
    edit_manifest(folder, lambda tree: tree["files"].update({path: [1, "0" * 32]}))


def _move_plain(folder: Path, way_out: Callable[[str], str]) -> None:
    prefix = f"../{way_out('model/plain.json').removesuffix('plain.json')}"

    def change(tree: Tree) -> None:
        tree["components"]["model"]["plain_in"] = {prefix: 0}
        _renamed(tree["files"], "model/plain.json", f"model/{prefix}plain.json")

    edit_manifest(folder, change)


def _move_component(folder: Path, way_out: Callable[[str], str]) -> None:
    new = way_out("model")

    def change(tree: Tree) -> None:
        tree["components"][new] = tree["components"]["model"] | {"key": new}

    edit_manifest(folder, change)


def _add_dead(folder: Path, way_out: Callable[[str], str]) -> None:
    edit_index(folder, 0, lambda tree: tree.update(dead={way_out(LARGE_FILE): [[0, 10, 4194304, "0" * 16]]}))


# Links, and what is no regular file


_KINDS_OF_FILE = {
    "the manifest": MANIFEST,
    "the index": "index-00000.json",
    "a chunk": LARGE_FILE,
    "plain values": "model/plain.json",
    "the config": "config.yaml",
    "zarr.json": "model/large/zarr.json",
}


def _links() -> Iterator[Craft]:
    makers: dict[str, Callable[[Path], object]] = {
        "a FIFO": os.mkfifo,
        "a socket": _make_socket,
        "a device": lambda path: path.symlink_to("/dev/zero"),
        "a folder": Path.mkdir,
    }
    for kind, file in _KINDS_OF_FILE.items():
        # Without its manifest a folder is no checkpoint.
        refused_as = "CheckpointNotFoundError" if file == MANIFEST else "CorruptCheckpointError"
        yield Craft(f"{kind} is a link outside", partial(_link, file, OUTSIDE), refused_as=refused_as)
        yield Craft(f"{kind} is a magic link", partial(_link, file, "/proc/self/root"), refused_as=refused_as)
        for name, make in makers.items():
            yield Craft(f"{kind} is {name}", partial(_replace, file, make), refused_as=refused_as)
    yield Craft("a folder of chunks is a link outside", partial(_link, "model/large/c", OUTSIDE))
    yield Craft("a component's folder is a link outside", partial(_link, "model", OUTSIDE))
    yield Craft(
        "a data file is a link outside", partial(_link, "model/rank-00000-float32.safetensors", OUTSIDE), "kimi-engine"
    )
    yield Craft("a database is a link outside", partial(_link, "arrays.ocdbt", OUTSIDE), "tensorstore")


def _link(file: str, to: str, folder: Path) -> None:
    outside = (folder / OUTSIDE / file).resolve()
    path = folder / file
    path.rename(folder.parent / "moved")  # and back below, for a link may not stand where something is
    path.symlink_to(f"{to}{outside}" if to.startswith("/proc") else outside)
    _discard(folder.parent / "moved")


def _discard(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _replace(file: str, make: Callable[[Path], object], folder: Path) -> None:
    (folder / file).unlink()
    make(folder / file)


def _make_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket is short
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(path.name)
    os.chdir(here)


# Records that contradict themselves


_OF_MANIFEST: list[tuple[Way, list[Any]]] = [
    (("world_size",), [-1, 0, "2", None, 1.5, _NAN, True]),
    (("timestamp",), ["", "yesterday", 5, None, "9999-99-99"]),
    (("topology",), [[], None, {"nodes": 5, "groups": {}}, {"nodes": [["0"]], "groups": {}}, {}]),
    (("components",), [[], None, {"model": None}, {"model": {}}]),
    (("components", "model", "sharing_pattern"), ["nope", None, 5]),
    (("components", "model", "ranks"), ["0", [99], [-1], [None]]),
    (("components", "model", "size_bytes"), [-1, "1", _NAN]),
    (("components", "model", "plain_in"), [{"": 99}, {"": "0"}, {"": -1}, {"": None}, [], None]),
    (("components", "model", "checksum"), [5]),
    (("components", "model", "key"), ["optimizer", 5]),
    (("arrays",), [[], None, {LARGE: None}, {LARGE: []}, {LARGE: {}}]),
    (("arrays", LARGE, "dtype"), ["nope", "load", 5, None, "float64", "object"]),
    (
        ("arrays", LARGE, "shape"),
        [[-150, -120], [1.5, 2], ["150", "120"], [_HUGE, _HUGE], [_NAN, 1], "ab", 5, None, [1] * 100_000, [18000], [2**63, 0]],
    ),
    (("arrays", LARGE, "grid"), [[0, 0], [-1, -1], [150], [_HUGE, 1], [1, 1], [_NAN, _NAN], "ab", None, [10**12, 120]]),
    (
        ("arrays", LARGE, "writers"),
        [
            [], [[0, 0, 0]], [[0, 0, -1]], [[0, 5, 1]], [[0, -1, 1]], [[99, 0, 1]], [[-1, 0, 1]], [[0, 0, 10**12]], [[0, 0]],
            [[0, 0, 1], [0, 0, 1]], 5, [None], [[0.0, 0, 1]], [["0", 0, 1]], [[0, 0, _NAN]],
        ],
    ),
    (("arrays", LARGE, "store"), ["nope", 5, None, "ocdbt", "safetensors"]),
    (("arrays", LARGE, "path"), [5, None, "model/other", "model", "optimizer/moment"]),
    (("arrays", LARGE, "alias_of"), [LARGE, "nowhere", 5, "model/small", "optimizer/moment"]),
    (("arrays", LARGE, "packed_in"), [[0]]),
    (("arrays", "model/small", "packed_in"), [[], [99], [-1], ["0"], [0, 0], 5, [_NAN]]),
    (("arrays", "model/small", "shape"), [[8], [-7], [_HUGE], [], [7, 1]]),
    (("arrays", "model/small", "dtype"), ["float64", "uint8"]),
    (("files",), [[], None, {}]),
    (("files", "config.yaml"), [[-1, "0" * 32], ["6", "0" * 32], [_HUGE, "0" * 32], [6, "zz"], [6, 5], [6], None, [6, "0" * 32, 1]]),
    (("files", "index-00000.json"), [[_HUGE, "0" * 32], [-1, "0" * 32]]),
    (("training_args_hash",), [5, "0" * 32]),
]  # fmt: skip
_ROW = ("chunks", LARGE, 0)
_OF_INDEX: list[tuple[Way, list[Any]]] = [
    (("rank",), [7, -1, "0", None]),
    (("files",), [[], None, {}]),
    (
        ("files", LARGE_FILE),
        [[-1, "0" * 32], [_HUGE, "0" * 32], ["72000", "0" * 32], [72000, "zz"], [72000, 5], [72000], None],
    ),
    (("chunks",), [[], None, {}]),
    (("chunks", LARGE), [[], None, [None], [[0]], "x"]),
    ((*_ROW, 0), [-1, 1, 10**12, "0", None, 0.5]),
    ((*_ROW, 1), [-1, 99, "0", None, 1]),
    ((*_ROW, 2), [-1, 72000, _HUGE, "0", None, 8, 0.5, _NAN]),
    ((*_ROW, 3), [-1, 0, _HUGE, 71999, 72001, "0", None]),
    ((*_ROW, 4), [0, -1, 1, "0", None, _HUGE, _NAN]),
    ((*_ROW, 5), ["", "zz" * 8, "0" * 15, "0" * 17, "-" + "0" * 15, 5, None, "0" * 16_000_000]),
    ((*_ROW, 6), ["x", None, 2]),
    (("packed",), [[], None, {}]),
    (("packed", "model/packed-bfloat16-00000"), [-1, 0, 6, _HUGE, "7", None]),
    (("pieces",), [[], None, {}]),
    (("pieces", "model/small"), [[], None, [None], [[0]], "x"]),
    (("pieces", "model/small", 0, 0), [-1, 99, "0", 1, None]),
    (("pieces", "model/small", 0, 1), [[-7], [_HUGE], [8], [7, 1], ["7"], 5]),
    (("pieces", "model/small", 0, 2), [[-1], [1], [_HUGE], [], ["0"], None]),
    (("pieces", "model/small", 0, 3), [[-1], [8], [0], [_HUGE], [], None]),
    (("pieces", "model/small", 0, 4), [-1, 1, 7, _HUGE, "0", None, 0.5]),
    (("pieces", "nowhere"), [[[0, [7], [0], [7], 0]]]),
    (("dead",), [[], {LARGE_FILE: [[0, 10, 4194304, "0" * 16]]}, {"nowhere": [[0, 1, 1, "0" * 16]]}, {LARGE_FILE: 5}]),
]
_SOUND = {
    "('dead',) of the index is []",
    "('arrays', 'model/large', 'store') of the manifest is 'nope'",
    "('arrays', 'model/large', 'store') of the manifest is 'ocdbt'",
    "('arrays', 'model/large', 'store') of the manifest is 'safetensors'",
    f"('chunks', 'model/large', 0, 4) of the index is {_HUGE}",
    "('topology',) of the manifest is {}",
    "the manifest has no training_args_hash",
}
"""Contradict nothing that is read: raw chunks are read whatever their store is called, and one digest fits any longer block."""


def _lies() -> Iterator[Craft]:
    for record, edit, table in (("manifest", edit_manifest, _OF_MANIFEST), ("index", _edit_first_index, _OF_INDEX)):
        for way, values in table:
            for value in values:
                name = f"{way} of the {record} is {_shown(value)}"
                yield Craft(name, partial(_put_into, edit, way, value), sound=name in _SOUND)
    for table, way in ((_OF_MANIFEST, "manifest"), (_OF_INDEX, "index")):
        for key in dict.fromkeys(place[0] for place, _ in table if len(place) == 1 and place != ("dead",)):
            edit = edit_manifest if way == "manifest" else _edit_first_index
            name = f"the {way} has no {key}"
            yield Craft(name, partial(_without, edit, key), sound=name in _SOUND)
    yield Craft("two aliases of each other", _alias_each_other)
    yield Craft(
        "a row twice in the index",
        lambda f: edit_index(f, 0, lambda t: t["chunks"][LARGE].append(t["chunks"][LARGE][0])),
    )
    yield Craft(
        "a piece twice in the index",
        lambda f: edit_index(f, 0, lambda t: t["pieces"]["model/small"].append(t["pieces"]["model/small"][0])),
    )
    yield Craft("two arrays in the same bytes", _share_bytes)
    yield Craft("pieces that overlap", _overlap_pieces)
    yield Craft(
        "a shard of one rank is missing",
        lambda f: edit_manifest(f, lambda t: t["arrays"]["optimizer/moment"]["writers"].pop()),
        "zarr, 2 ranks",
    )
    yield Craft("both ranks wrote one shard", _both_write, "zarr, 2 ranks")
    yield Craft("the index of rank 1 is that of rank 0", _swap_indexes, "zarr, 2 ranks")
    for backend in ("tensorstore", "kimi-engine"):
        for value in (-1, _HUGE, 0):
            # The bytes at the start of a data file are signed anew as the chunk's: other values, and no contradiction.
            forged = (backend, value) == ("tensorstore", 0)
            change = partial(_put_into, _edit_first_index, (*_ROW, 2), value)
            yield Craft(f"an offset is {value}, {backend}", change, backend, sound=forged, forged=forged)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}... ({len(text)})"


def _edit_first_index(folder: Path, change: Callable[[Tree], object]) -> None:
    edit_index(folder, 0, change)


def _put_into(edit: Callable[[Path, Callable[[Tree], object]], None], way: Way, value: Any, folder: Path) -> None:
    def change(tree: Any) -> None:
        for step in way[:-1]:
            tree = tree[step]
        tree[way[-1]] = value

    edit(folder, change)


def _without(edit: Callable[[Path, Callable[[Tree], object]], None], key: str, folder: Path) -> None:
    edit(folder, lambda tree: tree.pop(key))


def _alias_each_other(folder: Path) -> None:
    def change(tree: Tree) -> None:
        for one, other in ((LARGE, "model/small"), ("model/small", LARGE)):
            tree["arrays"][one] = {"dtype": "float32", "shape": [150, 120], "alias_of": other}

    edit_manifest(folder, change)


def _share_bytes(folder: Path) -> None:
    edit_index(
        folder, 0, lambda tree: tree["chunks"].update({"optimizer/moment": [[0, 0, 0, 76800, 4194304, "0" * 16, 1]]})
    )
    resign(folder)


def _overlap_pieces(folder: Path) -> None:
    halves = [[0, [7], [0], [5], 0], [0, [7], [3], [4], 3]]
    edit_index(folder, 0, lambda tree: tree["pieces"].update({"model/small": halves}))


def _both_write(folder: Path) -> None:
    edit_manifest(folder, lambda tree: tree["arrays"]["optimizer/moment"].update(writers=[[0, 0, 2], [1, 1, 1]]))


def _swap_indexes(folder: Path) -> None:
    write_listed(folder, "index-00001.json", (folder / "index-00000.json").read_bytes())


# Texts


def _texts() -> Iterator[Craft]:
    manifests = {
        "brackets 100,000 deep": lambda text: text + b'  "x": ' + b"[" * 100_000 + b"]" * 100_000 + b",\n",
        "a key twice": lambda text: text + b'  "world_size": 5,\n',
        "arrays twice": lambda text: text + b'  "arrays": {},\n',
        "no UTF-8": lambda text: text + b'  "x": "\xff\xfe",\n',
        "a number of a million digits": lambda text: text + b'  "x": ' + b"9" * 1_000_000 + b",\n",
        "an unfinished table": lambda text: text + b'  "x": {\n',
        "nothing but brackets": lambda text: b"[" * 200_000,
        "nothing": lambda text: b"{\n",
        "a list": lambda text: b"[\n",
    }
    for name, change in manifests.items():
        yield Craft(f"the manifest holds {name}", partial(_write_text, change))
    for name, data in {
        "brackets 100,000 deep": b"[" * 100_000 + b"]" * 100_000, "no UTF-8": b'{"rank": "\xff"}', "a list": b"[]", "a number": b"5",
        "nothing": b"", "NaN": b"NaN", "null": b"null",
    }.items():  # fmt: skip
        for file in ("index-00000.json", "model/plain.json"):
            yield Craft(f"{file} holds {name}", partial(_write_listed, file, data), sound=file != "index-00000.json")
    for version in (2, 0, -1, "1", None, 1.5, _HUGE):
        change = partial(_put_into, edit_manifest, ("format_version",), version)
        yield Craft(f"format_version is {version!r}", change, refused_as="ConfigurationError")
    yield Craft("format_version is 2 with other rows", _other_format, refused_as="ConfigurationError")
    yield Craft("no format_version", partial(_without, edit_manifest, "format_version"))
    yield Craft("the config holds aliases, 9^5 of them", partial(_write_listed, "config.yaml", _aliases(5)), sound=True)
    yield Craft("the config holds aliases, 9^9 of them", partial(_write_listed, "config.yaml", _aliases(9)), sound=True)
    for name, data in {
        "a Python object": b"a: !!python/object/apply:os.system ['touch pwned']\n", "brackets 100,000 deep": b"[" * 100_000,
        "no UTF-8": b"\xff\xfe\xfd", "a list": b"- 1\n", "an interpolation of itself": b"a: ${a}\n",
        "a bad interpolation": b"a: ${oc.env:X\n", "bad YAML": b"a: [\n", "a NUL": b"a: \0\n",
    }.items():  # fmt: skip
        yield Craft(f"the config holds {name}", partial(_write_listed, "config.yaml", data), sound=True)


def _write_text(change: Callable[[bytes], bytes], folder: Path) -> None:
    lines = (folder / MANIFEST).read_bytes().splitlines(keepends=True)
    (folder / MANIFEST).write_bytes(signed(change(b"".join(lines[:-2]))))


def _write_listed(file: str, data: bytes, folder: Path) -> None:
    write_listed(folder, file, data)
    if file == "config.yaml":
        edit_manifest(folder, lambda tree: tree.update(training_args_hash=xxhash.xxh3_128_hexdigest(data)))


def _other_format(folder: Path) -> None:
    write_signed(folder, {"format_version": 2, "tensors": []})


def _aliases(levels: int) -> bytes:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join(lines).encode() + b"\n"


# Plain values


def _plain_values() -> Iterator[Craft]:
    values: list[Any] = [
        {"~dtype": "load"}, {"~dtype": "_dynamo"}, {"~dtype": "__name__"}, {"~dtype": 5}, {"~dtype": "nn.Linear"}, {"~dtype": ["float32"]},
        {"~nope": 1}, {"~": 1}, {"~float": "x"}, {"~float": []}, {"~tuple": 5}, {"~tuple": None}, {"~dict": 5}, {"~dict": [[1]]},
        {"~dict": [[[], 1]]}, {"~bytes": "\u00e9"}, {"~bytes": 5}, {"~ndarray": 5}, {"~ndarray": ["|O", [1], "AAAAAAAAAAA="]},
        {"~ndarray": ["<f4", [_HUGE], ""]}, {"~ndarray": ["<f4", [-1], "AAAA"]}, {"~ndarray": ["nope", [1], "AAAA"]},
        {"~ndarray": ["<f4", [1] * 100, "AAAAAA=="]}, {"~scalar": ["<f4", ""]}, {"~scalar": ["|O", "AAAAAAAAAAA="]}, {"~set": [[1], [2]]},
        {"~set": 5}, {"~frozenset": [{}]}, {"~Size": ["x"]}, {"~Size": [_NAN]}, {"~Size": 5}, {"~Namespace": 5}, {"~Namespace": [1]},
 {"~enum": 5}, {"~enum": [1, 2, 3]},
        {"~enum": ["signal", "Signals", []]}, {"~BytesIO": 5}, {"~complex": ["x", "y"]}, {"~complex": []},
    ]  # fmt: skip
    for value in values:
        yield Craft(f"a plain value is {_shown(value)}", partial(_set_row, [["step"], value]), sound=True)
    for value in ({"~SimpleNamespace": {"__class__": 5}}, {"~enum": ["os", "system", "touch pwned"]}):
        yield Craft(f"a plain value is {_shown(value)}", partial(_set_row, [["step"], value]), sound=True, forged=True)
    paths: list[Any] = [
        [], [5.5], [[0, "nope"]], [[10**9, "list"]], [[-1, "list"]], [["x", "list"]], [None], 5, "step", [["{", "key"]], [[0]], [{}],
        [["[]", "key"]],
    ]  # fmt: skip
    for path in paths:
        yield Craft(f"the path of a plain value is {_shown(path)}", partial(_set_row, [path, 49]), sound=True)
    for row in ([], None, 5, [["step"], 1, 2], [["step"]], "xy"):
        yield Craft(f"a row of plain values is {row!r}", partial(_set_row, row), sound=True)
    yield Craft("a plain value is 100,000 deep", _nest_plain, sound=True)
    yield Craft(
        "a key of plain values twice", lambda f: _edit_plain(f, lambda rows: [*rows, [["large"], 5]]), sound=True
    )


def _edit_plain(folder: Path, change: Callable[[list[Any]], list[Any]]) -> None:
    edit_json(folder, "model/plain.json", change)


def _set_row(row: Any, folder: Path) -> None:
    _edit_plain(folder, lambda rows: [*rows[:-1], row])


def _nest_plain(folder: Path) -> None:
    deep = b'{"~tuple": [' * 100_000 + b"]}" * 100_000
    edit_file(folder, "model/plain.json", lambda data: re.sub(rb'(\[\["step"\], )\d+', rb"\1" + deep, data))


# Sizes


def _sizes() -> Iterator[Craft]:
    for file in ("index-00000.json", "model/plain.json", "config.yaml"):
        yield Craft(f"{file} is 200 GB of nothing", partial(_inflate, file))
    yield Craft("the manifest is 200 GB of nothing", lambda folder: os.truncate(folder / MANIFEST, 200 << 30))
    yield Craft(
        "the manifest lists 300,000 arrays",
        partial(_repeat, "arrays", {"dtype": "float32", "shape": [1], "alias_of": LARGE}),
    )
    yield Craft(
        "the manifest lists 300,000 groups",
        lambda f: edit_manifest(f, lambda t: t["topology"].update(groups={f"g{n}": [] for n in range(300_000)})),
    )
    yield Craft("the manifest lists 100,000 files", partial(_repeat, "files", [0, "0" * 32], times=100_000))
    yield Craft(
        "10^12 chunks of one element",
        lambda f: edit_manifest(
            f, lambda t: t["arrays"][LARGE].update(shape=[10**12], grid=[1], writers=[[0, 0, 10**12]])
        ),
    )
    yield Craft(
        "10^12 elements in one chunk",
        lambda f: edit_manifest(f, lambda t: t["arrays"][LARGE].update(shape=[10**12], grid=[10**12])),
    )
    yield Craft("a chunk is a gzip bomb", _bomb)
    yield Craft("a chunk is a bomb of zstd, behind a frame that is skipped", _zstd_bomb)
    yield Craft("a data file is sparse, 200 GB", _sparse_chunk)


def _inflate(file: str, folder: Path) -> None:
    os.truncate(folder / file, 200 << 30)
    edit_manifest(folder, lambda tree: tree["files"].update({file: [200 << 30, "0" * 32]}))


def _repeat(table: str, value: Any, folder: Path, times: int = 300_000) -> None:
    edit_manifest(folder, lambda tree: tree[table].update({f"model/x{n}": value for n in range(times)}))


def _bomb(folder: Path) -> None:
    """4 GiB of zeros in 4 MB."""
    data = gzip.compress(bytes(64 << 20), 1) * 64
    _set_encoded(folder, {"name": "gzip", "configuration": {"level": 1}}, data)


def _set_encoded(folder: Path, codec: Tree, data: bytes) -> None:
    _set_codecs(folder, [{"name": "bytes", "configuration": {"endian": "little"}}, codec])
    (folder / LARGE_FILE).write_bytes(data)
    edit_index(folder, 0, lambda tree: tree["chunks"].update({LARGE: [[0, 0, 0, len(data), 4194304, "", 0]]}))
    resign(folder)


def _zstd_bomb(folder: Path) -> None:
    """4 GiB of zeros in 130 KB."""
    _set_encoded(
        folder, {"name": "zstd", "configuration": {"level": 1, "checksum": False}}, ZSTD_SKIPPED + zstd_frame(4 << 30)
    )


def _sparse_chunk(folder: Path) -> None:
    size = 200 << 30
    os.truncate(folder / LARGE_FILE, size)

    def change(tree: Tree) -> None:
        tree["files"][LARGE_FILE] = [size, "0" * 32]
        tree["chunks"][LARGE] = [[0, 0, 0, size, 1 << 40, "0" * 16, 1]]

    edit_index(folder, 0, change)


# What the formats say of themselves


def _formats() -> Iterator[Craft]:
    lies: dict[str, Callable[[Tree], object]] = {
        "another shape": lambda meta: meta.update(shape=[120, 150]),
        "a huge shape": lambda meta: meta.update(shape=[_HUGE, _HUGE]),
        "another type": lambda meta: meta.update(data_type="float64"),
        "an unknown type": lambda meta: meta.update(data_type="nope"),
        "another grid": lambda meta: meta["chunk_grid"]["configuration"].update(chunk_shape=[1, 1]),
        "a grid of 0": lambda meta: meta["chunk_grid"]["configuration"].update(chunk_shape=[0, 0]),
        "an unknown codec": lambda meta: meta.update(codecs=[{"name": "nope"}]),
        "no codecs": lambda meta: meta.pop("codecs"),
        "another kind of node": lambda meta: meta.update(node_type="group"),
        "another version": lambda meta: meta.update(zarr_format=2),
        "a list for a shape": lambda meta: meta.update(shape="ab"),
    }
    for name, change in lies.items():
        yield Craft(f"zarr.json says {name}", partial(_lie_in_zarr_json, change, raw=1), sound=True)
        yield Craft(
            f"zarr.json says {name}, and zarr is to read it", partial(_lie_in_zarr_json, change, raw=0), sound=True
        )
    for name, data in {"no JSON": b"{", "nothing": b"", "brackets": b"[" * 100_000, "a number": b"5"}.items():
        yield Craft(f"zarr.json holds {name}, and zarr is to read it", partial(_spoil_zarr_json, data), sound=True)
    for how in ("random", "zeros", "cut"):
        for file in ("manifest.ocdbt", "rank-00000/manifest.ocdbt", "d/*", "rank-00000/d/*"):
            yield Craft(
                f"{file} of the database is {how}", partial(_spoil_database, file, how), "tensorstore", sound=True
            )
    headers: dict[str, Any] = {
        "no JSON": b"{" * 112, "a list": b"[]",
        "an offset outside": {"large": {"dtype": "F32", "shape": [150, 120], "data_offsets": [0, _HUGE]}},
        "an offset below 0": {"large": {"dtype": "F32", "shape": [150, 120], "data_offsets": [-8, 5]}},
        "another shape": {"large": {"dtype": "F32", "shape": [_HUGE], "data_offsets": [0, 72000]}}, "nothing": {}, "brackets": b"[" * 112,
    }  # fmt: skip
    for name, header in headers.items():
        yield Craft(f"a safetensors header says {name}", partial(_lie_in_header, header), "kimi-engine", sound=True)
    for size in (0, 2**63, 2**40, 9):
        yield Craft(
            f"a safetensors header is {size} long", partial(_lie_in_header_size, size), "kimi-engine", sound=True
        )
    for name, data in {
        "a path outside": json.dumps({"weight_map": {"large": "../../../secret/x"}}).encode(),
        "a list": b"[]",
        "brackets": b"[" * 100_000,
    }.items():
        file = "model/model.safetensors.index.json"
        yield Craft(
            f"the index of safetensors says {name}", partial(_write_listed, file, data), "kimi-engine", sound=True
        )


def _edit_meta(folder: Path, change: Callable[[Tree], object]) -> None:
    path = folder / LARGE / "zarr.json"
    meta = json.loads(path.read_bytes())
    change(meta)
    path.write_bytes(json.dumps(meta).encode())


def _set_codecs(folder: Path, codecs: list[Any]) -> None:
    _edit_meta(folder, lambda meta: meta.update(codecs=codecs))


def _lie_in_zarr_json(change: Callable[[Tree], object], folder: Path, raw: int) -> None:
    _edit_meta(folder, change)
    edit_index(folder, 0, lambda tree: tree["chunks"][LARGE][0].__setitem__(6, raw))
    resign(folder)


def _spoil_zarr_json(data: bytes, folder: Path) -> None:
    (folder / LARGE / "zarr.json").write_bytes(data)
    edit_index(folder, 0, lambda tree: tree["chunks"][LARGE][0].__setitem__(6, 0))
    resign(folder)


def _spoil_database(pattern: str, how: str, folder: Path) -> None:
    """What the database says of itself; where the chunks lie, by the index, is left as it is, but TensorStore is to read them."""
    file = next((folder / "arrays.ocdbt").glob(pattern))
    data = file.read_bytes()
    rest = data[150_000:] if len(data) > 150_000 else data
    spoiled = {"random": os.urandom(len(rest)), "zeros": bytes(len(rest)), "cut": rest[: len(rest) // 2]}[how]
    file.write_bytes(data[: len(data) - len(rest)] + spoiled)

    def change(tree: Tree) -> None:
        tree["chunks"][LARGE][0][6] = 0

    edit_index(folder, 0, change)
    resign(folder)


_TENSORS = "model/rank-00000-float32.safetensors"


def _lie_in_header(header: Any, folder: Path) -> None:
    path = folder / _TENSORS
    data = path.read_bytes()
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = int.from_bytes(data[:8], "little")
    path.write_bytes(data[:8] + text.ljust(size)[:size] + data[8 + size :])
    resign(folder)


def _lie_in_header_size(size: int, folder: Path) -> None:
    path = folder / _TENSORS
    path.write_bytes(size.to_bytes(8, "little") + path.read_bytes()[8:])
    resign(folder)
