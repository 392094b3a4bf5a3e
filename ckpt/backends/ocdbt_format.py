"""What an OCDBT database of one version looks like, whose nodes lie in one file and whose values lie in that or in others. No library
needed.

The format lets a database refer to bytes that something else has written, which is what makes it worthwhile: values go to the disk as they
come, and only the B+tree, a few bytes a key, is put together at the end. Nothing is compressed, and no value lies in a node.

Source: the storage format of TensorStore's driver `ocdbt`, version 0 of manifest and nodes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

NODE_BYTES = 1 << 20
"""A node is cut before it is larger than about this; the format's own limit is in the manifest."""

_MAX_NODE_BYTES = 8 << 20
_MANIFEST_MAGIC = 0x0CDB3A2A
_NODE_MAGIC = 0x0CDB20DE
_ARITY_LOG2 = 4

Checksum = Callable[[bytes], bytes]
"""The CRC-32C of some bytes, as four bytes, the lowest first."""


_T = TypeVar("_T", "Value", "Node")


@dataclass(frozen=True, slots=True)
class Value:
    """One value: its key, and where it lies in a data file; `file` is relative to the database."""

    key: bytes
    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the B+tree, written: where, and what is below it.

    Attributes:
        key: the smallest below it.
        prefix: number of bytes that all keys below it begin with, and that its own bytes leave out.
        num_bytes: of all nodes from here on.
        value_bytes: of all values below.
    """

    key: bytes
    prefix: int
    height: int
    offset: int
    length: int
    num_keys: int
    num_bytes: int
    value_bytes: int


def tree_of(
    values: Sequence[Value], file: str, at: int, checksum: Checksum, *, node_bytes: int = NODE_BYTES
) -> tuple[list[bytes], Node]:
    """Return the nodes of a tree over `values`, in the order in which they are to be written, and the root.

    Args:
        values: at least one, with keys that differ.
        file: the data file, relative to the database, in which the nodes will lie.
        at: where in it the first node will begin.
    """
    encoded: list[bytes] = []
    level: list[Node] = []
    groups = list(_cut(sorted(values, key=lambda value: value.key), node_bytes, least=1))
    for group in groups:
        node, data = _leaf(group, at, checksum, is_root=len(groups) == 1)
        level.append(node)
        encoded.append(data)
        at += len(data)
    while len(level) > 1:
        parents = list(_cut(level, node_bytes, least=2))
        level = []
        for children in parents:
            node, data = _interior(children, file, at, checksum, is_root=len(parents) == 1)
            level.append(node)
            encoded.append(data)
            at += len(data)
    return encoded, level[0]


def manifest_of(root: Node, file: str, uuid: bytes, commit_time_ns: int, checksum: Checksum) -> bytes:
    """Return `manifest.ocdbt` of a database with one version, whose root lies in the data file `file`."""
    config = uuid + _varint(0) + _varint(0) + _varint(_MAX_NODE_BYTES) + bytes([_ARITY_LOG2]) + _varint(0)
    version = b"".join(
        [
            _varint(1),  # one version,
            _varint(1),  # the first
            bytes([root.height]),
            _varint(0),
            *map(_varint, (root.offset, root.length, root.num_keys, root.num_bytes, root.value_bytes)),
            struct.pack("<Q", commit_time_ns),
        ]
    )
    return _framed(_MANIFEST_MAGIC, config + _files([file]) + version + _varint(0), checksum)


def _leaf(values: Sequence[Value], at: int, checksum: Checksum, *, is_root: bool) -> tuple[Node, bytes]:
    keys = [value.key for value in values]
    files = sorted({value.file for value in values})
    number_of = {file: _varint(number) for number, file in enumerate(files)}
    prefix = 0 if is_root else _common(keys[0], keys[-1])
    body = b"".join(
        [
            b"\0",
            _files(files),
            _varint(len(values)),
            *_keys(keys, prefix, b""),
            *(_varint(value.length) for value in values),
            b"\1" * len(values),  # none of them in the node
            *(number_of[value.file] for value in values),
            *(_varint(value.offset) for value in values),
        ]
    )
    data = _framed(_NODE_MAGIC, body, checksum)
    value_bytes = sum(value.length for value in values)
    return Node(keys[0], prefix, 0, at, len(data), len(values), len(data), value_bytes), data


def _interior(children: Sequence[Node], file: str, at: int, checksum: Checksum, *, is_root: bool) -> tuple[Node, bytes]:
    keys = [child.key for child in children]
    shared = [_common(keys[0], keys[-1]), *(child.prefix for child in children)]
    prefix = 0 if is_root else min(shared)
    height = children[0].height + 1
    body = b"".join(
        [
            bytes([height]),
            _files([file]),
            _varint(len(children)),
            *_keys(keys, prefix, b"".join(_varint(child.prefix - prefix) for child in children)),
            b"\0" * len(children),
            *(_varint(child.offset) for child in children),
            *(_varint(child.length) for child in children),
            *(_varint(child.num_keys) for child in children),
            *(_varint(child.num_bytes) for child in children),
            *(_varint(child.value_bytes) for child in children),
        ]
    )
    data = _framed(_NODE_MAGIC, body, checksum)
    num_bytes = len(data) + sum(child.num_bytes for child in children)
    num_keys, value_bytes = sum(child.num_keys for child in children), sum(child.value_bytes for child in children)
    return Node(keys[0], prefix, height, at, len(data), num_keys, num_bytes, value_bytes), data


def _keys(keys: Sequence[bytes], prefix: int, between: bytes) -> Iterator[bytes]:
    """Yield the columns of keys: what each has in common with the one before, how long the rest is, `between`, the rests."""
    common = [prefix, *(_common(one, other) for one, other in pairwise(keys))]
    yield from (_varint(length - prefix) for length in common[1:])
    yield from (_varint(len(key) - length) for key, length in zip(keys, common, strict=True))
    yield between
    yield from (key[length:] for key, length in zip(keys, common, strict=True))


def _common(one: bytes, other: bytes) -> int:
    """How many bytes two keys begin with alike."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _files(files: Sequence[str]) -> bytes:
    """A table of data files, in order: each path is what it has in common with the one before, and a rest. None of the paths is
    handed down to the nodes below."""
    paths = [file.encode() for file in files]
    common = [0, *(_common(one, other) for one, other in pairwise(paths))]
    rests = [path[length:] for path, length in zip(paths, common, strict=True)]
    return b"".join(
        [
            _varint(len(paths)),
            *(_varint(length) for length in common[1:]),
            *(_varint(len(rest)) for rest in rests),
            _varint(0) * len(paths),
            *rests,
        ]
    )


def _cut(items: Sequence[_T], most: int, *, least: int) -> Iterator[list[_T]]:
    """Cut what goes into nodes into runs of at least `least`, each of about `most` bytes."""
    runs: list[list[_T]] = [[]]
    size = 0
    for item in items:
        size += len(item.key) + 32
        if size > most and len(runs[-1]) >= least:
            runs.append([])
            size = len(item.key) + 32
        runs[-1].append(item)
    if len(runs) > 1 and len(runs[-1]) < least:
        last = runs.pop()
        runs[-1] += last
    yield from runs


def _framed(magic: int, body: bytes, checksum: Checksum) -> bytes:
    """Put header and checksum around what is not compressed."""
    length = 4 + 8 + 2 + len(body) + 4
    data = struct.pack(">I", magic) + struct.pack("<Q", length) + b"\0\0" + body
    return data + checksum(data)


def _varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first; all bytes but the last have the highest bit set."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
