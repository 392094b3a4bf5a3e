"""One rank's share of a save: its chunks, packed leaves, plain values and index, made durable; the rest is the lead's."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from json.encoder import encode_basestring_ascii as quoted
from pathlib import Path
from typing import Any

import torch
import xxhash

from ckpt.address import local_tensor
from ckpt.backends.base import ArraySpec, Backend, FileRecord, Writer, Written
from ckpt.box import Box
from ckpt.collect import Contribution
from ckpt.collector import collector_paused
from ckpt.copies import Staging
from ckpt.device import Device
from ckpt.dtypes import contiguous, raw_bytes, torch_dtype
from ckpt.flatten import TensorLeaf
from ckpt.manifest import PLAIN_NAME, Index, Piece, digest_of, encode_key, index_name
from ckpt.plan import ChunkTask, PackTask, RankPlan, SavePlan
from ckpt.sharing import OWN_COPIES, StateComponent, holders_of, prefix_of
from ckpt.topology import Topology

PACKED_BYTES = 32 << 20
"""The longest array that small tensors are packed in."""

_Pack = tuple[tuple[str, str], list[PackTask]]
"""The path and the data type of a packed array, and the leaves in it."""


@dataclass(slots=True)
class Vote:
    """What a rank tells the lead once its bytes are durable. Small: the rest is in the rank's index.

    Attributes:
        index: size and digest of the index; None if the rank wrote nothing.
        wrote_arrays: chunks or descriptions of arrays, which the lead is to join with those of the others.
        total_bytes: of all files.
        sizes: component -> bytes of its tensors and plain values.
        checksums: component -> one digest over all digests of what was written of it.
        plain_files: path -> size and digest.
    """

    index: list[Any] | None = None
    wrote_arrays: bool = False
    total_bytes: int = 0
    sizes: dict[str, int] = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)
    plain_files: dict[str, list[Any]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Share:
    """What one rank writes in one save.

    Args:
        packed_bytes: the longest packed array, and so the memory that packing takes. A tensor that is longer has one of its own.
    """

    def __init__(
        self,
        plan: SavePlan,
        tasks: RankPlan,
        contribution: Contribution,
        topology: Topology,
        device: Device,
        *,
        packed_bytes: int = PACKED_BYTES,
    ) -> None:
        self._packed_bytes = packed_bytes
        self._plan = plan
        self._tasks = tasks
        self._contribution = contribution
        self._topology = topology
        self._staging = Staging(device.pinned_bytes)
        self._index = Index(topology.rank)
        self._vote = Vote()
        self._by_box: dict[str, dict[Box, TensorLeaf]] = {}
        self._described: list[ArraySpec] = []

    def exchange_slivers(self) -> dict[int, memoryview]:
        """Send the parts of chunks that other ranks write; return the bytes of the parts that come here, by sender."""
        if not self._plan.sends_slivers:
            return {}
        outgoing: dict[int, list[bytes]] = defaultdict(list)
        sends = self._staging.ahead(self._tasks.sends, lambda send: [self._region(send.name, send.box)])
        for send, (host,) in sends:
            outgoing[send.to].append(raw_bytes(contiguous(host)).numpy().tobytes())
        sources = {rank for task in self._tasks.chunks for rank, _ in task.slivers}
        incoming = self._topology.exchange("slivers", {to: b"".join(parts) for to, parts in outgoing.items()}, sources)
        return {rank: memoryview(data) for rank, data in incoming.items()}

    @collector_paused()
    def write(
        self,
        folder: Path,
        backend: Backend,
        plain: Mapping[str, Mapping[str, Any]],
        slivers: dict[int, memoryview],
    ) -> Vote:
        """Stage and write everything below the unpublished `folder`, then the index of it.

        Args:
            plain: component -> {joined key: row}, of the components that this rank may speak for.
            slivers: from `exchange_slivers`; consumed.

        Raises:
            OSError, StorageError: the file system refused; what was written stays for the lead to discard.
        """
        writer = backend.writer(folder, self._topology.rank, self._topology.progress)
        try:
            for task, hosts in self._staging.ahead(self._tasks.chunks, self._regions):
                self._write_chunk(writer, task, hosts, slivers)
            for ((path, dtype), tasks), hosts in self._staging.ahead(self._packs(), self._regions_of_pack):
                self._write_packed(writer, path, dtype, tasks, hosts)
            self._describe(writer)
            self._add_written(writer.finish())
            self._write_plain(writer, plain)
            self._add_checksums()
            self._write_index(writer)
            writer.make_durable()
        except BaseException:
            writer.abort()
            raise
        return self._vote

    def _add_written(self, written: Written) -> None:
        self._index.files.update(written.files)
        for (path, number), extent in written.chunks.items():
            self._index.chunks.setdefault(path, {})[number] = extent
        self._vote.wrote_arrays = bool(written.files)

    def _describe(self, writer: Writer) -> None:
        """Describe our packed arrays, and those whose first chunk is ours. One without chunks, and the groups, are the lead's."""
        rank, components = self._topology.rank, self._contribution.components
        for name, array in self._plan.arrays.items():
            if array.grid is not None and (array.writers[0] if array.writers else 0) == rank:
                self._described.append(ArraySpec(path_of(name, components), array.dtype, array.shape, array.grid))
        groups = None
        if self._topology.is_lead:
            groups = {folder.removesuffix("/") for folder in folders_of(self._plan.arrays, components)}
        writer.describe(self._described, groups)

    def _regions(self, task: ChunkTask) -> list[torch.Tensor]:
        return [self._region(task.name, box) for box in task.own]

    def _regions_of_pack(self, pack: _Pack) -> list[torch.Tensor]:
        return [self._region(name, box) for name, box in pack[1]]

    def _write_chunk(
        self, writer: Writer, task: ChunkTask, hosts: Sequence[torch.Tensor], slivers: dict[int, memoryview]
    ) -> None:
        array = self._plan.arrays[task.name]
        assert array.grid is not None
        path = path_of(task.name, self._contribution.components)
        host = self._assemble(task, hosts, slivers)
        writer.write(ArraySpec(path, array.dtype, array.shape, array.grid), task.number, host)
        self._count(task.name, host)

    def _assemble(self, task: ChunkTask, hosts: Sequence[torch.Tensor], slivers: dict[int, memoryview]) -> torch.Tensor:
        """The chunk as one contiguous host tensor: what is ours, where that is all of it."""
        if task.own == (task.box,):
            return contiguous(hosts[0])
        whole = torch.empty(task.box.shape, dtype=torch_dtype(self._plan.arrays[task.name].dtype))
        for box, host in zip(task.own, hosts, strict=True):
            whole[box.relative_to(task.box).slices] = host
        for rank, box in task.slivers:
            num_bytes = box.num_elements * whole.element_size()
            data, slivers[rank] = slivers[rank][:num_bytes], slivers[rank][num_bytes:]
            received = torch.frombuffer(bytearray(data), dtype=whole.dtype)
            whole[box.relative_to(task.box).slices] = received.view(box.shape)
        return whole

    def _packs(self) -> Iterator[_Pack]:
        """Yield our small leaves by the packed array that takes them: (its path, its data type)."""
        by_kind: dict[tuple[str, str], list[PackTask]] = defaultdict(list)
        folders = folders_of((task.name for task in self._tasks.packs), self._contribution.components)
        for task, folder in zip(self._tasks.packs, folders, strict=True):
            by_kind[folder, self._plan.arrays[task.name].dtype].append(task)
        for (folder, dtype), tasks in by_kind.items():
            for number, few in enumerate(_cut(tasks, self._packed_bytes // torch_dtype(dtype).itemsize)):
                ending = f"-{number:05d}" if number else ""
                yield (f"{folder}packed-{dtype}-{self._topology.rank:05d}{ending}", dtype), few

    def _write_packed(
        self, writer: Writer, path: str, dtype: str, tasks: Sequence[PackTask], hosts: Sequence[torch.Tensor]
    ) -> None:
        """Lay small boxes end to end, noting where each begins. Where all of them are empty there is no array."""
        first = 0
        for name, box in tasks:
            self._index.pieces.setdefault(name, []).append(Piece(path, self._plan.arrays[name].shape, box, first))
            first += box.num_elements
        self._index.packed[path] = first
        if first:
            host = torch.empty(first, dtype=torch_dtype(dtype))
            torch.cat([one if one.dim() == 1 else one.reshape(-1) for one in hosts], out=host)
            self._described.append(ArraySpec(path, dtype, (first,), (first,)))
            writer.write(self._described[-1], 0, host)
            self._count(tasks[0].name, host)

    def _region(self, name: str, box: Box) -> torch.Tensor:
        if 0 in box.shape:
            return torch.empty(box.shape, dtype=torch_dtype(self._plan.arrays[name].dtype))
        held, leaf = self._held(name, box)
        local = local_tensor(leaf)
        return local if box == held else local[box.relative_to(held).slices]

    def _held(self, name: str, box: Box) -> tuple[Box, TensorLeaf]:
        """What of ours holds a box; whole pieces, which most are, are found at once, however many there are."""
        pieces = self._contribution.held[name]
        if len(pieces) == 1:
            return pieces[0]
        if name not in self._by_box:
            self._by_box[name] = dict(self._contribution.held[name])
        if box in self._by_box[name]:
            return box, self._by_box[name][box]
        return next(one for one in self._contribution.held[name] if one[0].contains(box))

    def _write_plain(self, writer: Writer, plain: Mapping[str, Mapping[str, Any]]) -> None:
        """The lowest rank of those that hold one state of a component writes its plain values."""
        rank = self._topology.rank
        for key, rows in plain.items():
            component = self._contribution.components[key]
            if not rows or rank != next(r for r in holders_of(component, self._topology) if rank in r)[0]:
                continue
            path = f"{key}/{prefix_of(component, self._topology)}{PLAIN_NAME}"
            data = _plain_to_bytes(rows)
            writer.add(path, data)
            self._vote.plain_files[path] = [len(data), digest_of(data)]
            self._vote.sizes[key] = self._vote.sizes.get(key, 0) + len(data)
            if not self._topology.is_lead:  # the lead's own stand in the manifest
                self._index.files[path] = FileRecord(len(data), digest_of(data))

    def _write_index(self, writer: Writer) -> None:
        self._vote.total_bytes = sum(record.size for record in self._index.files.values())
        if self._index.files or self._index.pieces:
            data = self._index.to_bytes()
            writer.add(index_name(self._index.rank), data)
            self._vote.index = [len(data), digest_of(data)]
            self._vote.total_bytes += len(data)

    def _add_checksums(self) -> None:
        plain = {path: digest for path, (_, digest) in self._vote.plain_files.items()}
        self._vote.checksums = checksums_of(self._index, plain, self._vote.sizes)

    def _count(self, name: str, host: torch.Tensor) -> None:
        key = _component_of(name)
        self._vote.sizes[key] = self._vote.sizes.get(key, 0) + host.numel() * host.element_size()


def checksums_of(index: Index, plain: Mapping[str, str], components: Iterable[str]) -> dict[str, str]:
    """Component -> one digest over the digests of all that one rank wrote of it.

    Args:
        plain: path -> digest of this rank's files of plain values.
    """
    states = {key: xxhash.xxh3_128() for key in components}
    for path in sorted(index.chunks):
        for number, extent in sorted(index.chunks[path].items()):
            states[_component_of(path)].update(f"{path} {number} {extent.digests}\n".encode())
    for path, digest in sorted(plain.items()):
        states[_component_of(path)].update(f"{path} {digest}\n".encode())
    return {key: state.hexdigest() for key, state in states.items()}


def joined_checksum(of_writers: Iterable[str]) -> str:
    """One digest over those of all writers, in rank order."""
    return xxhash.xxh3_128_hexdigest("".join(of_writers).encode())


def _cut(tasks: Iterable[PackTask], most: int) -> Iterator[list[PackTask]]:
    """Cut small leaves into runs of at most so many elements, each of at least one leaf."""
    few: list[PackTask] = []
    count = 0
    for task in tasks:
        num_elements = task.box.num_elements
        if few and count + num_elements > most:
            yield few
            few, count = [], 0
        few.append(task)
        count += num_elements
    yield few


def folder_of(name: str, components: Mapping[str, StateComponent]) -> str:
    """`<component>/<prefix>` of an array name of this save, other ranks' prefixes included."""
    component, _, rest = name.partition("/")
    return _folder(component, rest, components[component].pattern in OWN_COPIES)


def folders_of(names: Iterable[str], components: Mapping[str, StateComponent]) -> Iterator[str]:
    """The same of many names, one after the other."""
    has_own = {key: component.pattern in OWN_COPIES for key, component in components.items()}
    for name in names:
        component, _, rest = name.partition("/")
        yield _folder(component, rest, has_own[component])


def _folder(component: str, rest: str, has_own: bool) -> str:
    return f"{component}/{rest.partition('/')[0]}/" if has_own else f"{component}/"


def path_of(name: str, components: Mapping[str, StateComponent]) -> str:
    """The path of an array that is not packed."""
    folder = folder_of(name, components)
    return folder + encode_key(name.removeprefix(folder))


def _component_of(name: str) -> str:
    return name.partition("/")[0]


def _plain_to_bytes(rows: Mapping[str, Any]) -> bytes:
    """One line per value: `[path, value]`, or `[path]` where a tensor belongs."""
    lines = ",\n".join(map(_row_to_text, rows.values()))
    return f"[\n{lines}\n]\n".encode()


def _row_to_text(row: Sequence[Any]) -> str:
    """The JSON of one row; the short way for the place of a tensor, for there may be very many."""
    if len(row) == 1 and all(type(part) is str for part in row[0]):
        return f"[[{', '.join(map(quoted, row[0]))}]]"
    return json.dumps(row)
