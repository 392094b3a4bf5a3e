"""One rank's share of a save: its chunks, packed leaves, plain values and index, made durable; the rest is the lead's."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash

from ckpt.address import local_tensor
from ckpt.backends.base import ArraySpec, Backend, FileRecord, Writer
from ckpt.box import Box
from ckpt.collect import Contribution
from ckpt.device import Device
from ckpt.dtypes import raw_bytes, torch_dtype
from ckpt.durable import write_durably
from ckpt.flatten import TensorLeaf
from ckpt.manifest import PLAIN_NAME, Index, Piece, digest_of, encode_key, index_name
from ckpt.plan import ChunkTask, PackTask, RankPlan, SavePlan
from ckpt.sharing import OWN_COPIES, StateComponent, holders_of, prefix_of
from ckpt.topology import Topology


@dataclass(slots=True)
class Vote:
    """What a rank tells the lead once its bytes are durable. Small: the rest is in the rank's index.

    Attributes:
        index: size and digest of the index; None if the rank wrote nothing.
        packed: path of each packed array -> data type and number of elements.
        total_bytes: of all files.
        sizes: component -> bytes of its tensors and plain values.
        checksums: component -> one digest over all digests of what was written of it.
        plain_files: path -> size and digest.
    """

    index: list[Any] | None = None
    packed: dict[str, list[Any]] = field(default_factory=dict)
    wrote_chunks: bool = False
    total_bytes: int = 0
    sizes: dict[str, int] = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)
    plain_files: dict[str, list[Any]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Share:
    """What one rank writes in one save."""

    def __init__(
        self, plan: SavePlan, tasks: RankPlan, contribution: Contribution, topology: Topology, device: Device
    ) -> None:
        self._plan = plan
        self._tasks = tasks
        self._contribution = contribution
        self._topology = topology
        self._device = device
        self._index = Index(topology.rank)
        self._vote = Vote()
        self._by_box: dict[str, dict[Box, TensorLeaf]] = {}

    def exchange_slivers(self) -> dict[int, memoryview]:
        """Send the parts of chunks that other ranks write; return the bytes of the parts that come here, by sender."""
        if not self._plan.sends_slivers:
            return {}
        outgoing: dict[int, list[bytes]] = defaultdict(list)
        for send in self._tasks.sends:
            outgoing[send.to].append(raw_bytes(self._on_host(send.name, send.box)).numpy().tobytes())
        sources = {rank for task in self._tasks.chunks for rank, _ in task.slivers}
        incoming = self._topology.exchange("slivers", {to: b"".join(parts) for to, parts in outgoing.items()}, sources)
        return {rank: memoryview(data) for rank, data in incoming.items()}

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
            for task in self._tasks.chunks:
                self._write_chunk(writer, task, slivers)
            for (path, dtype), tasks in self._packs().items():
                self._write_packed(writer, path, dtype, tasks)
            written = writer.finish()
        except BaseException:
            writer.abort()
            raise
        self._index.files.update(written.files)
        for (path, number), extent in written.chunks.items():
            self._index.chunks.setdefault(path, {})[number] = extent
        self._vote.wrote_chunks = bool(written.chunks)
        self._write_plain(folder, plain)
        self._add_checksums()
        self._write_index(folder)
        return self._vote

    def _write_chunk(self, writer: Writer, task: ChunkTask, slivers: dict[int, memoryview]) -> None:
        array = self._plan.arrays[task.name]
        assert array.grid is not None
        path = path_of(task.name, self._contribution.components)
        host = self._assemble(task, slivers)
        writer.write(ArraySpec(path, array.dtype, array.shape, array.grid), task.number, host)
        self._count(task.name, host)

    def _assemble(self, task: ChunkTask, slivers: dict[int, memoryview]) -> torch.Tensor:
        """The chunk as one contiguous host tensor: a view of our own memory where that is possible."""
        if task.own == (task.box,):
            return self._on_host(task.name, task.box)
        host = torch.empty(task.box.shape, dtype=torch_dtype(self._plan.arrays[task.name].dtype))
        for box in task.own:
            host[box.relative_to(task.box).slices] = self._on_host(task.name, box)
        for rank, box in task.slivers:
            num_bytes = box.num_elements * host.element_size()
            data, slivers[rank] = slivers[rank][:num_bytes], slivers[rank][num_bytes:]
            received = torch.frombuffer(bytearray(data), dtype=host.dtype)
            host[box.relative_to(task.box).slices] = received.view(box.shape)
        return host

    def _packs(self) -> dict[tuple[str, str], list[PackTask]]:
        """Our small leaves by the packed array that takes them: (its path, its data type)."""
        packs: dict[tuple[str, str], list[PackTask]] = defaultdict(list)
        for task in self._tasks.packs:
            dtype = self._plan.arrays[task.name].dtype
            folder = folder_of(task.name, self._contribution.components)
            packs[f"{folder}packed-{dtype}-{self._topology.rank:05d}", dtype].append(task)
        return packs

    def _write_packed(self, writer: Writer, path: str, dtype: str, tasks: Sequence[PackTask]) -> None:
        """Lay small boxes end to end, noting where each begins. Where all of them are empty there is no array."""
        regions = self._device.stage([self._region(task.name, task.box) for task in tasks])
        host = torch.empty(sum(region.numel() for region in regions), dtype=torch_dtype(dtype))
        first = 0
        for task, region in zip(tasks, regions, strict=True):
            host[first : first + region.numel()] = region.reshape(-1)
            piece = Piece(path, self._plan.arrays[task.name].shape, task.box, first)
            self._index.pieces.setdefault(task.name, []).append(piece)
            first += region.numel()
        self._index.packed[path] = first
        if first:
            writer.write(ArraySpec(path, dtype, (first,), (first,)), 0, host)
            self._vote.packed[path] = [dtype, first]
            self._count(tasks[0].name, host)

    def _on_host(self, name: str, box: Box) -> torch.Tensor:
        """A box of a tensor of ours on the host, contiguous."""
        return self._device.stage([self._region(name, box)])[0]

    def _region(self, name: str, box: Box) -> torch.Tensor:
        if not box.num_elements:
            return torch.empty(box.shape, dtype=torch_dtype(self._plan.arrays[name].dtype))
        held, leaf = self._held(name, box)
        local = local_tensor(leaf)
        return local if box == held else local[box.relative_to(held).slices]

    def _held(self, name: str, box: Box) -> tuple[Box, TensorLeaf]:
        """What of ours holds a box; whole pieces, which most are, are found at once, however many there are."""
        if name not in self._by_box:
            self._by_box[name] = dict(self._contribution.held[name])
        if box in self._by_box[name]:
            return box, self._by_box[name][box]
        return next(one for one in self._contribution.held[name] if one[0].contains(box))

    def _write_plain(self, folder: Path, plain: Mapping[str, Mapping[str, Any]]) -> None:
        """The lowest rank of those that hold one state of a component writes its plain values."""
        rank = self._topology.rank
        for key, rows in plain.items():
            component = self._contribution.components[key]
            if not rows or rank != next(r for r in holders_of(component, self._topology) if rank in r)[0]:
                continue
            path = f"{key}/{prefix_of(component, self._topology)}{PLAIN_NAME}"
            data = _plain_to_bytes(rows)
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            write_durably(folder / path, data)
            self._vote.plain_files[path] = [len(data), digest_of(data)]
            self._vote.sizes[key] = self._vote.sizes.get(key, 0) + len(data)
            if not self._topology.is_lead:  # the lead's own stand in the manifest
                self._index.files[path] = FileRecord(len(data), digest_of(data))

    def _write_index(self, folder: Path) -> None:
        self._vote.total_bytes = sum(record.size for record in self._index.files.values())
        if self._index.files or self._index.pieces:
            data = self._index.to_bytes()
            write_durably(folder / index_name(self._index.rank), data)
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


def folder_of(name: str, components: Mapping[str, StateComponent]) -> str:
    """`<component>/<prefix>` of an array name of this save, other ranks' prefixes included."""
    component, _, rest = name.partition("/")
    if components[component].pattern in OWN_COPIES:
        return f"{component}/{rest.partition('/')[0]}/"
    return f"{component}/"


def path_of(name: str, components: Mapping[str, StateComponent]) -> str:
    """The path of an array that is not packed."""
    folder = folder_of(name, components)
    return folder + encode_key(name.removeprefix(folder))


def _component_of(name: str) -> str:
    return name.partition("/")[0]


def _plain_to_bytes(rows: Mapping[str, Any]) -> bytes:
    """One line per value: `[path, value]`, or `[path]` where a tensor belongs."""
    lines = ",\n".join(json.dumps(row) for row in rows.values())
    return f"[\n{lines}\n]\n".encode()
