"""The format of an OCDBT database with one version, its nodes in one file, and its values in that or other files. No TensorStore.

A database can refer to bytes that other code has written: values are written as they come, and only the B+tree, a few bytes for
each key, is built at the end. Nothing is compressed, and no value lies in a node.

Source: the storage format of TensorStore's driver `ocdbt`, version 0 of manifest and nodes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import google_crc32c

NODE_BYTES = 1 << 20
"""Approximate maximum of a node. The format's own limit is in the manifest."""

_MAX_NODE_BYTES = 8 << 20
_MANIFEST_MAGIC = 0x0CDB3A2A
_NODE_MAGIC = 0x0CDB20DE
_ARITY_LOG2 = 4

_T = TypeVar("_T", "Value", "Node")


@dataclass(frozen=True, slots=True)
class Value:
    """One value: its key, and its place in a data file. `file` is relative to the database."""

    key: bytes
    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Node:
    """An encoded node of the B+tree: its place, and totals of its subtree.

    Attributes:
        key: smallest key in the subtree.
        prefix: length of the common prefix of all keys in the subtree, which its bytes leave out.
        num_bytes: of all nodes in the subtree.
        value_bytes: of all values in the subtree.
    """

    key: bytes
    prefix: int
    height: int
    offset: int
    length: int
    num_keys: int
    num_bytes: int
    value_bytes: int


def tree_of(values: Sequence[Value], file: str, at: int, *, node_bytes: int = NODE_BYTES) -> tuple[list[bytes], Node]:
    """Return the encoded nodes of a tree over `values`, in file order, and the root.

    Args:
        values: at least one, with distinct keys.
        file: data file of the nodes, relative to the database.
        at: offset of the first node in it.
    """
    encoded: list[bytes] = []
    level: list[Node] = []
    groups = list(_cut(sorted(values, key=lambda value: value.key), node_bytes, least=1))
    for group in groups:
        node, data = _leaf(group, at, is_root=len(groups) == 1)
        level.append(node)
        encoded.append(data)
        at += len(data)
    while len(level) > 1:
        parents = list(_cut(level, node_bytes, least=2))
        level = []
        for children in parents:
            node, data = _interior(children, file, at, is_root=len(parents) == 1)
            level.append(node)
            encoded.append(data)
            at += len(data)
    return encoded, level[0]


def manifest_of(root: Node, file: str, uuid: bytes, commit_time_ns: int) -> bytes:
    """Return the bytes of `manifest.ocdbt` for one version, whose root lies in the data file `file`."""
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
    return _framed(_MANIFEST_MAGIC, config + _files([file]) + version + _varint(0))


def _leaf(values: Sequence[Value], at: int, *, is_root: bool) -> tuple[Node, bytes]:
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
            b"\1" * len(values),  # all values lie outside of the node
            *(number_of[value.file] for value in values),
            *(_varint(value.offset) for value in values),
        ]
    )
    data = _framed(_NODE_MAGIC, body)
    value_bytes = sum(value.length for value in values)
    return Node(keys[0], prefix, 0, at, len(data), len(values), len(data), value_bytes), data


def _interior(children: Sequence[Node], file: str, at: int, *, is_root: bool) -> tuple[Node, bytes]:
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
    data = _framed(_NODE_MAGIC, body)
    num_bytes = len(data) + sum(child.num_bytes for child in children)
    num_keys, value_bytes = sum(child.num_keys for child in children), sum(child.value_bytes for child in children)
    return Node(keys[0], prefix, height, at, len(data), num_keys, num_bytes, value_bytes), data


def _keys(keys: Sequence[bytes], prefix: int, between: bytes) -> Iterator[bytes]:
    """Yield the columns of keys: length shared with the previous key, length of the rest, `between`, the rests."""
    common = [prefix, *(_common(key, other) for key, other in pairwise(keys))]
    yield from (_varint(length - prefix) for length in common[1:])
    yield from (_varint(len(key) - length) for key, length in zip(keys, common, strict=True))
    yield between
    yield from (key[length:] for key, length in zip(keys, common, strict=True))


def _common(one: bytes, other: bytes) -> int:
    """Return the length of the common prefix of two keys."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _files(files: Sequence[str]) -> bytes:
    """Encode a table of data files: for each path the length shared with the previous one, and the rest. No path is inherited by
    child nodes."""
    paths = [file.encode() for file in files]
    common = [0, *(_common(path, other) for path, other in pairwise(paths))]
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
    """Split the items of nodes into runs of at least `least` items and about `most` bytes."""
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


def _framed(magic: int, body: bytes) -> bytes:
    """Add the header and the checksum to an uncompressed body."""
    length = 4 + 8 + 2 + len(body) + 4
    data = struct.pack(">I", magic) + struct.pack("<Q", length) + b"\0\0" + body
    return data + struct.pack("<I", google_crc32c.value(data))


def _varint(number: int) -> bytes:
    """Encode a number with seven bits for each byte, lowest first; all bytes but the last have the highest bit set."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
