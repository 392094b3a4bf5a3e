"""Change a committed checkpoint and sign it again, as somebody would who wants it to be loaded.

Nothing here goes by the package's own parsers or writers: a record is a tree of JSON, and may become any other one.

    edit_manifest(folder, lambda tree: tree.update(world_size=-1))
    edit_index(folder, 0, lambda tree: tree["packed"].clear())
    edit_file(folder, "model/plain.json", lambda data: b"[]")
    resign(folder)      # after files below it were changed by hand: every digest and size anew
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import xxhash
from hypothesis import strategies as st

MANIFEST = "checkpoint_manifest.json"
_INDEX = re.compile(r"index-(?P<rank>\d{5,})(?:\.\d+)?\.json")

Tree = dict[str, Any]


def edit_manifest(folder: Path, change: Callable[[Tree], object]) -> None:
    """Change the tree of the manifest in place, and sign it. A checkpoint that this one lies inside of is signed, too."""
    tree = manifest_tree(folder)
    change(tree)
    write_manifest(folder, tree)


def edit_index(folder: Path, rank: int, change: Callable[[Tree], object]) -> None:
    """Change the tree of a rank's index in place; its size and digest stand in the manifest anew."""
    path = index_path(folder, rank)
    tree = json.loads((folder / path).read_bytes())
    change(tree)
    write_listed(folder, path, json.dumps(tree).encode())


def edit_file(folder: Path, path: str, change: Callable[[bytes], bytes]) -> None:
    """Change any file of a checkpoint, and sign it wherever it is listed."""
    put(folder / path, change((folder / path).read_bytes()))
    resign(folder)


def edit_json(folder: Path, path: str, change: Callable[[Any], Any]) -> None:
    """The same for a file of JSON; `change` returns the new value."""
    edit_file(folder, path, lambda data: json.dumps(change(json.loads(data))).encode())


def put(file: Path, data: bytes) -> None:
    """Write a file anew: if it has other names, in other checkpoints, those stay as they are."""
    file.unlink(missing_ok=True)
    file.write_bytes(data)


def manifest_tree(folder: Path) -> Tree:
    """The manifest as JSON, without its digest."""
    tree: Tree = json.loads((folder / MANIFEST).read_bytes())
    del tree["manifest_digest"]
    return tree


def index_tree(folder: Path, rank: int) -> Tree:
    tree: Tree = json.loads((folder / index_path(folder, rank)).read_bytes())
    return tree


def index_path(folder: Path, rank: int) -> str:
    """The file of a rank's index, by what the manifest lists."""
    return next(path for path in manifest_tree(folder)["files"] if _rank_of(path) == rank)


def write_manifest(folder: Path, tree: Tree | bytes) -> None:
    """Write a manifest and its digest. Bytes are the text of an object up to its closing brace, whatever it is."""
    body = tree if isinstance(tree, bytes) else json.dumps(tree, indent=1).encode().removesuffix(b"\n}") + b",\n"
    put(folder / MANIFEST, signed(body))
    above = folder.parent
    if (above / MANIFEST).is_file() and f"{folder.name}/{MANIFEST}" in manifest_tree(above)["files"]:
        write_listed(above, f"{folder.name}/{MANIFEST}", (folder / MANIFEST).read_bytes())


def signed(body: bytes) -> bytes:
    """What a manifest's last two lines make of the lines before."""
    return body + f'  "manifest_digest": "{xxhash.xxh3_128_hexdigest(body)}"\n}}\n'.encode()


def write_listed(folder: Path, path: str, data: bytes) -> None:
    """Write a file whose size and digest stand in the manifest, whatever its bytes are."""
    put(folder / path, data)
    edit_manifest(folder, lambda tree: tree["files"].update({path: _record(data)}))


def resign(folder: Path) -> None:
    """Put size and digests of every file that is listed on record as they are now; what cannot be read stays as it is."""
    tree = manifest_tree(folder)
    for path in [path for path in tree["files"] if _rank_of(path) is not None]:
        index = json.loads((folder / path).read_bytes())
        _resign_data(folder, index)
        put(folder / path, json.dumps(index).encode())
    for path in tree["files"]:
        if (folder / path).is_file():
            tree["files"][path] = _record((folder / path).read_bytes())
    write_manifest(folder, tree)


def _resign_data(folder: Path, index: Tree) -> None:
    files = list(index["files"])
    covered: dict[str, list[tuple[int, int]]] = {path: [] for path in files}
    for file, row, at in _extents(index, files):
        offset, length, block = row[at], row[at + 1], row[at + 2]
        data = _bytes_of(folder / file, offset, length)
        row[at + 3] = "".join(xxhash.xxh3_64_hexdigest(data[n : n + block]) for n in range(0, len(data), block))
        covered[file].append((offset, offset + length))
    for path, extents in covered.items():
        if (folder / path).is_file():
            data = (folder / path).read_bytes()
            index["files"][path] = [len(data), xxhash.xxh3_128_hexdigest(_without(data, extents))]


def _extents(index: Tree, files: list[str]) -> Iterator[tuple[str, list[Any], int]]:
    """File, row, and where in the row the offset stands, of every chunk and of what is dead."""
    for rows in index["chunks"].values():
        yield from ((files[row[1]], row, 2) for row in rows)
    for file, rows in index.get("dead", {}).items():
        yield from ((file, row, 0) for row in rows)


def _bytes_of(file: Path, offset: int, length: int) -> bytes:
    with file.open("rb") as stream:
        stream.seek(offset)
        return stream.read(length)


def _without(data: bytes, extents: list[tuple[int, int]]) -> bytes:
    rest, at = b"", 0
    for begin, end in sorted(extents):
        rest += data[at:begin]
        at = max(at, end)
    return rest + data[at:]


def _record(data: bytes) -> list[Any]:
    return [len(data), xxhash.xxh3_128_hexdigest(data)]


def _rank_of(path: str) -> int | None:
    match = _INDEX.fullmatch(os.fspath(path))
    return int(match["rank"]) if match else None


def spoil(tree: Any, anything: st.SearchStrategy[Any], data: st.DataObject) -> None:
    """Replace or remove one or two things somewhere in nested dictionaries and lists."""
    for _ in range(data.draw(st.integers(1, 2))):
        *above, last = data.draw(st.sampled_from(_ways(tree)))
        here = tree
        for step in above:
            here = here[step]
        if data.draw(st.booleans()):
            here[last] = data.draw(anything)
        else:
            del here[last]


def _ways(tree: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [found for key, child in items for found in ((*way, key), *_ways(child, (*way, key)))]
