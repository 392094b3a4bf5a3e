"""Write one rank's part of a save durably: its chunks, packed leaves, plain values and index."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, NamedTuple

import torch

from ckpt.backends.base import Backend, Previous, Writer, Written, staged_digests
from ckpt.errors import needing
from ckpt.format.box import whole
from ckpt.format.digests import StreamDigest, digest_of
from ckpt.format.dtypes import contiguous, item_bytes, torch_dtype
from ckpt.format.gc_pause import gc_paused
from ckpt.format.manifest import Index, PackedPiece, index_name
from ckpt.format.places import PLAIN_NAME, Place, encode_key
from ckpt.format.records import ArraySpec, Content, Expected, FileRecord, changed_in_memory, stored_shape
from ckpt.planning.plan import ChunkTask, PackTask, RankPlan, SavePlan, SendTask
from ckpt.ranks.topology import Topology
from ckpt.state.sharing import OWN_COPIES, StateComponent, holders_of
from ckpt.storage.objects.store import CountedRequests, Counts

PACKED_BYTES = 32 << 20
"""The longest array that small tensors are packed in. It is joined in memory, as a chunk may be, which is no shorter."""

PlainFiles = Mapping[str, tuple[str, bytes]]
"""Path -> (component, content) of the plain values that one rank writes."""


@dataclass(slots=True)
class WriteResult:
    """A rank's message to the lead once its bytes are durable. Small: the rest is in the rank's index.

    Attributes:
        index: size and digest of the index; None: the rank wrote nothing.
        wrote_arrays: the rank wrote chunks or descriptions of arrays, for the lead to join.
        total_bytes: of all files.
        linked_bytes: those of `total_bytes` that are linked to an earlier checkpoint.
        sizes: component -> bytes of its tensors and plain values.
        checksums: component -> one digest over the digests of its tensors and plain values.
        tensor_checksums: component -> the same of its tensors alone, where it has any.
        plain_files: path -> size and digest.
        write_s: seconds from the call of the save on this rank until its bytes were durable.
        requests: to the object store, by kind: their number, and the bytes that they carried.
    """

    index: list[Any] | None = None
    wrote_arrays: bool = False
    total_bytes: int = 0
    linked_bytes: int = 0
    sizes: dict[str, int] = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)
    tensor_checksums: dict[str, str] = field(default_factory=dict)
    plain_files: dict[str, list[Any]] = field(default_factory=dict)
    write_s: float = 0.0
    requests: Counts = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Pack:
    """Small boxes that are stored end to end in one packed array.

    Attributes:
        path: of the array.
        dtype: of all boxes.
        num_elements: of all boxes.
    """

    path: str
    dtype: str
    tasks: Sequence[PackTask]
    num_elements: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_elements", sum(task.box.num_elements for task in self.tasks))


Item = ChunkTask | Pack


def laid_end_to_end(hosts: Iterable[torch.Tensor], flat: torch.Tensor) -> torch.Tensor:
    """Fill `flat` with host tensors, one behind the other, and return it."""
    if flat.numel():
        torch.cat([host if host.dim() == 1 else host.reshape(-1) for host in hosts], out=flat)
    return flat


class Staged(NamedTuple):
    """The bytes of one item of a plan, on the host.

    Attributes:
        number: of the item.
        hosts: a tensor for each box of this rank in a chunk, or for each box of a pack; a pack may also be one flat tensor.
        digests: block digests of each host at the time of its copy; the writer compares them. None: the hosts are the state itself.
    """

    number: int
    hosts: Sequence[torch.Tensor]
    digests: Sequence[tuple[int, ...]] | None = None

    @property
    def whole_digests(self) -> tuple[int, ...] | None:
        """Those of the only host."""
        return None if self.digests is None else self.digests[0]


@dataclass(frozen=True, slots=True)
class WriteJob:
    """The arguments of one write by a plan, without the tensors.

    Attributes:
        folder: the unpublished folder.
        received_parts: sender -> the partial chunks that it sent to this rank, end to end.
        previous: the checkpoint that unchanged chunks are linked to.
    """

    folder: Place
    backend: Backend
    plain: PlainFiles
    received_parts: Mapping[int, bytes] = field(default_factory=dict)
    previous: Previous | None = None


class RankWritePlan:
    """One rank's share of every save with one plan. Holds no tensors.

    Args:
        store: the manifest's name for the format.

    Attributes:
        items: chunks, then packs.
        sends: partial chunks that this rank sends to their writers.
        sources: the ranks that send partial chunks to this one.
        sends_parts: whether any rank sends any.
        arrays: name -> its specification for the storage, of every array with chunks in `items`.
        described: the arrays, without packed ones, whose description this rank writes.
        groups: all groups, on the lead; None on other ranks.
        packed_shapes: name -> global shape, of every tensor in the packs.
        part_starts: (item, sender, part) -> first byte of the part in the sender's message.
    """

    def __init__(
        self,
        plan: SavePlan,
        tasks: RankPlan,
        components: Mapping[str, StateComponent],
        topology: Topology,
        *,
        store: str = "zarr",
    ) -> None:
        self.rank = topology.rank
        self._store = store
        self.sends: Sequence[SendTask] = tasks.sends
        self.sends_parts = plan.sends_parts
        self.sources = {rank for task in tasks.chunks for rank, _ in task.received_parts}
        self.items: Sequence[Item] = [
            *tasks.chunks,
            *_packs(plan, tasks.packs, components, topology.rank),
        ]
        self.arrays = {
            name: ArraySpec(path_of(name, components), plan.arrays[name].dtype, plan.arrays[name].shape, grid)
            for name in dict.fromkeys(task.name for task in tasks.chunks)
            if (grid := plan.arrays[name].grid) is not None
        }
        self.packed_shapes = {task.name: plan.arrays[task.name].shape for task in tasks.packs}
        # The writer of an array's first chunk describes it. The lead describes arrays without chunks, and the groups.
        described = {
            name: ArraySpec(path_of(name, components), array.dtype, array.shape, array.grid)
            for name, array in plan.arrays.items()
            if array.grid is not None and (array.writers[0] if array.writers else 0) == self.rank
        }
        self.described = list(described.values())
        self._empty = {name: array for name, array in described.items() if 0 in array.shape}
        self.groups: set[str] | None = None
        if topology.is_lead:
            self.groups = {folder.removesuffix("/") for folder in folders_of(plan.arrays, components)}
        self.part_starts = _part_starts(tasks.chunks, plan)

    @property
    def num_bytes(self) -> int:
        """Stored bytes of all items."""
        return sum(map(self.item_bytes, self.items))

    def item_bytes(self, item: Item) -> int:
        """Stored bytes of one item."""
        if isinstance(item, Pack):
            return item.num_elements * item_bytes(item.dtype)
        return math.prod(self.stored_shape(item)) * item_bytes(self.arrays[item.name].dtype)

    def stored_shape(self, task: ChunkTask) -> tuple[int, ...]:
        """The shape of a chunk in storage."""
        return stored_shape(self._store, self.arrays[task.name].grid, task.box.shape)

    def array_of(self, pack: Pack) -> ArraySpec:
        """The specification of a packed array for the storage."""
        return ArraySpec(pack.path, pack.dtype, (pack.num_elements,), (pack.num_elements,))

    def expected(self) -> Iterator[Expected]:
        """Yield everything that `write` will hand to a writer."""
        for item in self.items:
            if isinstance(item, Pack):
                folder = item.path.rpartition("/")[0] + "/"
                contents = [
                    Content(name.removeprefix(folder), self.packed_shapes[name], box) for name, box in item.tasks
                ]
                yield Expected(self.array_of(item), 0 if item.num_elements else None, contents)
            else:
                array = self.arrays[item.name]
                yield Expected(array, item.number, [Content(_key_of(item.name, array), array.shape, item.box)])
        for name, array in self._empty.items():
            yield Expected(array, None, [Content(_key_of(name, array), array.shape, whole(array.shape))])

    def write(self, job: WriteJob, staged: Iterable[Staged], progress: Callable[[int], None]) -> WriteResult:
        """Write everything below the job's folder, then the index of it.

        Args:
            staged: every item once, in any order. An item's memory may be reused as soon as the next one is requested.
            progress: called with the number of bytes that have moved, from any thread.

        Raises:
            OSError, StorageError: the file system refused; the lead discards the files.
        """
        what = f"the part of rank {self.rank}" + (", of which unchanged files take none" if job.previous else "")
        with needing(what, lambda: self.num_bytes + sum(len(data) for _, data in job.plain.values())):
            requests = CountedRequests(job.folder)
            writer = job.backend.writer(job.folder, self.rank, progress, job.previous)
            try:
                result = _Writing(self, writer, job.received_parts).write(job.plain, staged)
                result.requests = requests.made()
                return result
            except BaseException:
                writer.abort()
                raise


Write = Callable[[RankWritePlan, WriteJob, Iterable[Staged], Callable[[int], None]], WriteResult]
"""Writes what a plan says: `RankWritePlan.write`, or a function around it."""


class _Writing:
    """The state of one write by a plan."""

    def __init__(self, write_plan: RankWritePlan, writer: Writer, received_parts: Mapping[int, bytes]) -> None:
        self._write_plan = write_plan
        self._writer = writer
        self._received_parts = received_parts
        self._index = Index(write_plan.rank)
        self._result = WriteResult()
        self._described: list[ArraySpec] = list(write_plan.described)

    def write(self, plain: PlainFiles, staged: Iterable[Staged]) -> WriteResult:
        self._expect()
        for copied in staged:
            item = self._write_plan.items[copied.number]
            if isinstance(item, Pack):
                self._write_packed(item, copied)
            else:
                self._write_chunk(item, copied)
        self._writer.describe(self._described, self._write_plan.groups)
        self._add_written(self._writer.finish())
        self._write_plain(plain)
        self._add_checksums()
        self._write_index()
        self._writer.make_durable()
        return self._result

    @gc_paused()
    def _expect(self) -> None:
        self._writer.expect(self._write_plan.expected())

    @gc_paused()
    def _add_written(self, written: Written) -> None:
        self._index.files.update(written.files)
        for (path, number), extent in written.chunks.items():
            self._index.chunks.setdefault(path, {})[number] = extent
        self._index.dead.update(written.dead)
        self._result.wrote_arrays = bool(written.files)
        self._result.linked_bytes = written.linked_bytes

    def _write_chunk(self, task: ChunkTask, staged: Staged) -> None:
        array = self._write_plan.arrays[task.name]
        if task.own == (task.box,):
            host, digests = contiguous(staged.hosts[0]), staged.whole_digests
        else:
            host, digests = self._assembled(task, array, staged), None
        self._writer.write(array, task.number, host, digests)
        self._count(task.name, host)

    def _assembled(self, task: ChunkTask, array: ArraySpec, staged: Staged) -> torch.Tensor:
        """Assemble a chunk of this rank's boxes and the partial chunks of other ranks, as a contiguous host tensor."""
        whole = torch.empty(task.box.shape, dtype=torch_dtype(array.dtype), device="cpu")
        for at, (box, host) in enumerate(zip(task.own, staged.hosts, strict=True)):
            if staged.digests is not None and staged_digests(host, tuple(host.shape)) != staged.digests[at]:
                raise changed_in_memory(array.path)
            whole[box.relative_to(task.box).slices] = host
        for part, (rank, box) in enumerate(task.received_parts):
            start = self._write_plan.part_starts[staged.number, rank, part]
            data = bytearray(self._received_parts[rank][start : start + box.num_elements * whole.element_size()])
            whole[box.relative_to(task.box).slices] = torch.frombuffer(data, dtype=whole.dtype).view(box.shape)
        return whole

    def _write_packed(self, pack: Pack, staged: Staged) -> None:
        """Write small boxes end to end, and index the start of each. If all are empty there is no array."""
        self._note_pieces(pack)
        if pack.num_elements:
            host = contiguous(staged.hosts[0].reshape(-1))
            if len(staged.hosts) > 1:
                host = laid_end_to_end(staged.hosts, torch.empty(pack.num_elements, dtype=torch_dtype(pack.dtype), device="cpu"))
            self._described.append(self._write_plan.array_of(pack))
            self._writer.write(self._described[-1], 0, host, staged.whole_digests)
            self._count(pack.tasks[0].name, host)

    @gc_paused()
    def _note_pieces(self, pack: Pack) -> None:
        first = 0
        for name, box in pack.tasks:
            self._index.pieces.setdefault(name, []).append(
                PackedPiece(pack.path, self._write_plan.packed_shapes[name], box, first)
            )
            first += box.num_elements
        self._index.packed[pack.path] = first

    def _write_plain(self, plain: PlainFiles) -> None:
        for path, (component, data) in plain.items():
            self._writer.add(path, data)
            self._result.plain_files[path] = [len(data), digest_of(data)]
            self._result.sizes[component] = self._result.sizes.get(component, 0) + len(data)
            if self._write_plan.rank != 0:  # the lead's own stand in the manifest
                self._index.files[path] = FileRecord(len(data), digest_of(data))

    def _write_index(self) -> None:
        self._result.total_bytes = sum(record.size for record in self._index.files.values())
        if self._index.files or self._index.pieces:
            data = self._index.to_bytes()
            self._writer.add(index_name(self._index.rank), data)
            self._result.index = [len(data), digest_of(data)]
            self._result.total_bytes += len(data)

    @gc_paused()
    def _add_checksums(self) -> None:
        plain = {path: digest for path, (_, digest) in self._result.plain_files.items()}
        self._result.checksums = checksums_of(self._index, plain, self._result.sizes)
        self._result.tensor_checksums = checksums_of(
            self._index, {}, {_component_of(path) for path in self._index.chunks}
        )

    def _count(self, name: str, host: torch.Tensor) -> None:
        key = _component_of(name)
        self._result.sizes[key] = self._result.sizes.get(key, 0) + host.numel() * host.element_size()


def plain_files(
    plain: Mapping[str, Mapping[str, Any]], components: Mapping[str, StateComponent], topology: Topology
) -> dict[str, tuple[str, bytes]]:
    """Serialize the plain values that this rank writes: the lowest rank of those that hold one state of a component writes it.

    Args:
        plain: component -> {joined key: row}, of the components whose plain values this rank gives.
    """
    files = {}
    for key, rows in plain.items():
        component = components[key]
        if rows and topology.rank == next(r for r in holders_of(component, topology) if topology.rank in r)[0]:
            files[f"{key}/{component.sharing.prefix(topology)}{PLAIN_NAME}"] = (key, plain_to_bytes(rows))
    return files


def _key_of(name: str, array: ArraySpec) -> str:
    """The key of a tensor with an array of its own: its name without the folder of the array."""
    return name.removeprefix(array.path.rpartition("/")[0] + "/")


def _packs(
    plan: SavePlan, tasks: Sequence[PackTask], components: Mapping[str, StateComponent], rank: int
) -> Iterator[Pack]:
    """Group small leaves into packed arrays, by folder and data type."""
    by_kind: dict[tuple[str, str], list[PackTask]] = defaultdict(list)
    folders = folders_of((task.name for task in tasks), components)
    for task, folder in zip(tasks, folders, strict=True):
        by_kind[folder, plan.arrays[task.name].dtype].append(task)
    for (folder, dtype), alike in by_kind.items():
        for number, few in enumerate(_cut(alike, PACKED_BYTES // torch_dtype(dtype).itemsize)):
            ending = f"-{number:05d}" if number else ""
            yield Pack(f"{folder}packed-{dtype}-{rank:05d}{ending}", dtype, few)


def _part_starts(chunks: Sequence[ChunkTask], plan: SavePlan) -> dict[tuple[int, int, int], int]:
    """(Item, sender, part) -> first byte of the part in the sender's message, which is in order of array and chunk."""
    starts: dict[tuple[int, int, int], int] = {}
    ends: dict[int, int] = defaultdict(int)
    for number, task in enumerate(chunks):
        for part, (rank, box) in enumerate(task.received_parts):
            starts[number, rank, part] = ends[rank]
            ends[rank] += box.num_elements * torch_dtype(plan.arrays[task.name].dtype).itemsize
    return starts


def checksums_of(index: Index, plain: Mapping[str, str], components: Iterable[str]) -> dict[str, str]:
    """Component -> one digest over the digests of everything that one rank wrote of it.

    Args:
        plain: path -> digest of this rank's files of plain values.
    """
    states = {key: StreamDigest() for key in components}
    for path in sorted(index.chunks):
        for number, extent in sorted(index.chunks[path].items()):
            states[_component_of(path)].update(f"{path} {number} {extent.digests}\n".encode())
    for path, digest in sorted(plain.items()):
        states[_component_of(path)].update(f"{path} {digest}\n".encode())
    return {key: state.hexdigest() for key, state in states.items()}


def joined_checksum(of_writers: Iterable[str]) -> str:
    """One digest over those of all writers, in rank order."""
    return digest_of("".join(of_writers).encode())


def _cut(tasks: Iterable[PackTask], most: int) -> Iterator[list[PackTask]]:
    """Cut small leaves into runs of at most `most` elements, and of at least one leaf."""
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


def folders_of(names: Iterable[str], components: Mapping[str, StateComponent]) -> Iterator[str]:
    """Yield `<component>/<prefix>` of array names of this save, other ranks' prefixes included."""
    has_own = {key: component.pattern in OWN_COPIES for key, component in components.items()}
    for name in names:
        component, _, rest = name.partition("/")
        yield f"{component}/{rest.partition('/')[0]}/" if has_own[component] else f"{component}/"


def path_of(name: str, components: Mapping[str, StateComponent]) -> str:
    """The path of an array that is not packed."""
    (folder,) = folders_of([name], components)
    return folder + encode_key(name.removeprefix(folder))


def _component_of(name: str) -> str:
    return name.partition("/")[0]


def plain_to_bytes(rows: Mapping[str, Any]) -> bytes:
    """One line for each value: `[path, value]`, or `[path]` for a tensor."""
    lines = ",\n".join(map(_row_to_text, rows.values()))
    return f"[\n{lines}\n]\n".encode()


def _row_to_text(row: Sequence[Any]) -> str:
    """The JSON of one row, with a fast path for tensors, of which there may be very many."""
    if len(row) == 1 and all(type(part) is str for part in row[0]):
        return f"[[{', '.join(map(quoted, row[0]))}]]"
    return json.dumps(row)
