"""A checkpoint of any format, opened by one rank to be compared, or written in another format: its values, and tensors box by box."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import accumulate, chain
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from ckpt.errors import Argument, ConfigurationError
from ckpt.format.box import Box
from ckpt.format.digests import digest_of
from ckpt.format.dtypes import item_bytes, raw_bytes, torch_dtype
from ckpt.format.manifest import STATE, ArrayEntry
from ckpt.format.places import COMPONENT_KEY
from ckpt.interop.unpickling import unknown_in
from ckpt.loading.parts_of_state import by_component_of
from ckpt.loading.sources import CheckpointSource
from ckpt.loading.strategy import Reading, ReadRequest
from ckpt.memory.host import Scratch
from ckpt.ranks.topology import Topology
from ckpt.state.flatten import Path, leaves_apart, plain_and_paths, unflatten
from ckpt.state.optimizer_state import optimizer_in_groups
from ckpt.state.sharing import Sharing, SharingPattern, StateComponent
from ckpt.state.statefuls import Given
from ckpt.state.tensor_classes import kind_in

Result = TypeVar("Result")

PIECE_BYTES = 8 << 20
"""The largest piece of a tensor that is read at once. Memory for a few of them is needed."""

_ALIGNED = 64


class Opened:
    """A checkpoint. A *prefix* names one of the copies of a component, as in `CheckpointSource`.

    Args:
        by_component: take one state dict as the components that a run finds in it, if their names can be those of components.

    Attributes:
        keys: its components; what is not of a `Checkpointer` or a coordinator of ours is one state dict.
    """

    def __init__(self, source: CheckpointSource, *, by_component: bool = False) -> None:
        self.source = by_component_of(source) if by_component else source
        keys = list(self.source.component_keys())
        is_one = source.holds(STATE) and (STATE not in keys or len(keys) == 1)
        has_names = all(COMPONENT_KEY.fullmatch(key) for key in keys)
        self._once: dict[tuple[str, tuple[str, str] | None], OpenedTensor] = {}
        self.keys = [STATE] if is_one and not (by_component and has_names) else keys

    def copies(self, key: str) -> list[str]:
        """The prefixes of a component."""
        return self.source.prefixes(self._component(key))

    def plain(self, key: str, prefix: str) -> dict[str, Any]:
        """Joined key -> plain value as JSON, of one copy."""
        rows = self.source.rows(self._component(key), prefix)
        return {name: row[1] for name, row in rows.items() if len(row) == 2}

    def tensors(self, key: str, prefix: str) -> dict[str, OpenedTensor]:
        """Joined key -> tensor, of one copy. One of a type that torch lacks is its bytes.

        Raises:
            ConfigurationError: it holds what cannot be read.
        """
        found = self.source.entries(self._component(key), prefix)
        for name, why in self.source.unread(self._component(key), prefix).items():
            if name not in found:
                raise ConfigurationError(
                    f"{key}: {name} cannot be read ({why}): leave it out where it is written; ckpt.load, and convert with ",
                    Argument("leave_out_unknown", True),
                    ", leave objects out that are no tensors",
                )
        start = f"{key}/{prefix}"
        firsts = {name: entry.alias_of or f"{start}{name}" for name, entry in found.items()}
        return {
            name: OpenedTensor(self.source, first, found[first.removeprefix(start)]) for name, first in firsts.items()
        }

    def bytes_alone(self) -> dict[str, str]:
        """Name -> data type and shape of each tensor that is carried as bytes, since torch lacks its type."""
        return {
            f"{key}: {name}": why
            for key in self.keys
            for prefix in self.copies(key)
            for name, why in self.source.unread(self._component(key), prefix).items()
            if name in self.source.entries(self._component(key), prefix)
        }

    def every_tensor(self) -> list[OpenedTensor]:
        """Each tensor of all components and copies once."""
        found = (tensor for key in self.keys for prefix in self.copies(key) for tensor in self.tensors(key, prefix).values())
        return list({tensor.name: tensor for tensor in found}.values())

    def state(self, *, optimizers_in_groups: bool = False) -> Any:
        """All of it as a nested state dict, with an `OpenedTensor` in the place of each tensor; tied tensors are one object.

        A component has its key there, the copies of a component that ranks, nodes or groups have of their own their prefixes below it. A
        state dict that was saved alone is it itself.

        Args:
            optimizers_in_groups: the component of an optimizer of ours gets the form of DCP's `get_optimizer_state_dict`.

        Raises:
            CorruptCheckpointError: a plain value is none that was saved.
        """
        found: dict[str, Any] = {}
        for key in self.keys:
            copies = {prefix.removesuffix("/"): self._nested(key, prefix) for prefix in self.copies(key)}
            found[key] = copies.get("", copies)
        if self.keys == [STATE]:
            return found[STATE]
        return {key: _in_groups(state) for key, state in found.items()} if optimizers_in_groups else found

    def paths(self, key: str, prefix: str) -> dict[str, Path]:
        """Joined key -> path of all leaves of one copy, in its order."""
        return self._leaves(key, prefix)[1]

    def in_order(self, key: str, prefix: str) -> dict[str, Any]:
        """The leaves of one copy whose order is known, in it: an object that makes its own tensors has none among them."""
        rows = self.source.rows(self._component(key), prefix)
        return dict(rows) if rows else dict(self.tensors(key, prefix))

    def _leaves(self, key: str, prefix: str) -> tuple[dict[str, Any], dict[str, Path]]:
        tensors = self.tensors(key, prefix)
        plain, paths = plain_and_paths(self.source.rows(self._component(key), prefix), key, tensors)
        leaves: dict[str, Any] = dict(plain)
        for name, tensor in tensors.items():
            kind = kind_in(paths.setdefault(name, (name,)))
            leaves[name] = self._once.setdefault((tensor.name, kind), tensor._replace(kind=kind))
        return leaves, paths

    def _nested(self, key: str, prefix: str) -> Any:
        return unflatten(*self._leaves(key, prefix))

    def _component(self, key: str) -> StateComponent:
        component = StateComponent(key, Given(), SharingPattern.REPLICATED)
        return component.with_sharing(self.source.saved_sharing(component) or Sharing(SharingPattern.REPLICATED))


class Readable(Protocol):
    """What tensors are read from; see `CheckpointSource.prepare`."""

    def prepare(self, requests: Sequence[ReadRequest]) -> Reading: ...


class OpenedTensor(NamedTuple):
    """A tensor of a checkpoint. A second name of a tensor has name and entry of the first.

    Attributes:
        name: to read it by.
        kind: what it is beside its values, as the last step of a path (`ckpt.state.tensor_classes`).
    """

    source: Readable
    name: str
    entry: ArrayEntry
    kind: tuple[str, str] | None = None

    def read(self, box: Box) -> torch.Tensor:
        """Read a box into new memory, and check its digests, if there are any.

        Raises:
            CorruptCheckpointError: bytes are missing or changed.
        """
        out = torch.empty(box.shape, dtype=torch_dtype(self.entry.dtype), device="cpu")
        read_into(self.source, [(self.name, box, out)])
        return out


def read_into(source: Readable, wanted: Iterable[tuple[str, Box, torch.Tensor]]) -> None:
    """Read boxes of tensors together: (name to read it by, box, memory on the host of shape `box.shape`).

    Raises:
        CorruptCheckpointError: bytes are missing or changed.
    """
    reading = source.prepare([ReadRequest(name, name.replace("/", ": ", 1), box, out) for name, box, out in wanted])
    try:
        reading.run()
    finally:
        reading.close()


def read_pieces(
    source: Readable, pieces: Iterable[Piece], tensors: Mapping[str, OpenedTensor]
) -> Iterator[tuple[Piece, torch.Tensor]]:
    """Yield pieces, in order. Small ones are read together, and ahead of the caller; each is valid until the next.

    Args:
        tensors: by the names of the pieces.

    Raises: as `read_into`.
    """

    def read(batch: Sequence[Piece], memory: Scratch) -> list[tuple[Piece, torch.Tensor]]:
        found = list(zip(batch, _empty(batch, memory), strict=True))
        read_into(source, ((tensors[piece.name].name, piece.box, out) for piece, out in found))
        return found

    memories = Scratch(), Scratch()
    jobs = (partial(read, batch, memories[number % 2]) for number, batch in enumerate(batches(pieces)))
    return chain.from_iterable(ahead(jobs))


def _empty(pieces: Sequence[Piece], memory: Scratch) -> Iterator[torch.Tensor]:
    """Yield a tensor for each piece. Each has a storage of its own size: DCP and `torch.save` write whole storages."""
    starts = list(accumulate((-(-piece.num_bytes // _ALIGNED) * _ALIGNED for piece in pieces), initial=0))
    bits: Any = memory.empty((starts[-1],), torch.uint8).numpy()
    for piece, start in zip(pieces, starts, strict=False):
        if piece.num_bytes == 0:
            yield piece.empty()
            continue
        own = memoryview(bits)[start : start + piece.num_bytes]
        yield torch.frombuffer(own, dtype=torch.uint8).view(torch_dtype(piece.dtype)).view(piece.box.shape)


def leaves_of(state: Any, kind: type[Any] | None = None) -> list[tuple[Path, Any]]:
    """Return the tensors of a nested state, which are of this type (None: `OpenedTensor`), and the values beside them, in its order."""
    return leaves_apart(state, lambda leaf: isinstance(leaf, kind or OpenedTensor))


def with_tensors(state: Any, made: Callable[[Any], Any], kind: type[Any] | None = None) -> Any:
    """Copy a nested state, with what `made` returns in the place of each tensor of type `kind`; tied tensors stay one object."""
    once: dict[int, Any] = {}
    leaves, paths = {}, {}
    for at, (path, leaf) in enumerate(leaves_of(state, kind)):
        if isinstance(leaf, kind or OpenedTensor) and id(leaf) not in once:
            once[id(leaf)] = made(leaf)
        leaves[str(at)], paths[str(at)] = once.get(id(leaf), leaf), path
    return leaves["0"] if paths["0"] == () else unflatten(leaves, paths)


def require_known(state: Any) -> None:
    """Refuse a state with objects of classes that this process does not have, before it is written.

    Raises:
        ConfigurationError
    """
    for path, name in unknown_in(state).items():
        raise ConfigurationError(f"{path} is a {name}, which is not known here; import its module, or leave it out")


def ahead(jobs: Iterable[Callable[[], Result]]) -> Iterator[Result]:
    """Yield the results of jobs, in order. While the caller uses one, another thread does the next."""
    with ThreadPoolExecutor(1, "read ahead") as thread:
        coming: Future[Result] | None = None
        for job in jobs:
            last, coming = coming, thread.submit(job)
            if last is not None:
                yield last.result()
        if coming is not None:
            yield coming.result()


def _in_groups(state: Any) -> Any:
    is_optimizer = isinstance(state, dict) and isinstance(state.get("param_groups"), dict)
    return optimizer_in_groups(state) if is_optimizer else state


class Piece(NamedTuple):
    """A box of a tensor.

    Attributes:
        name: of the tensor.
        dtype: a Zarr v3 data type name.
    """

    name: str
    box: Box
    dtype: str

    @property
    def num_bytes(self) -> int:
        return self.box.num_elements * item_bytes(self.dtype)

    def empty(self) -> torch.Tensor:
        """Return new memory for it."""
        return torch.empty(self.box.shape, dtype=torch_dtype(self.dtype), device="cpu")


class _Sized(Protocol):
    @property
    def num_bytes(self) -> int: ...


Sized = TypeVar("Sized", bound=_Sized)


def batches(pieces: Iterable[Sized], most: int = PIECE_BYTES) -> Iterator[list[Sized]]:
    """Group pieces, in order, into batches of at least one, and of at most so many bytes; small ones that are read together cost little."""
    batch: list[Sized] = []
    num_bytes = 0
    for piece in pieces:
        if batch and num_bytes + piece.num_bytes > most:
            yield batch
            batch, num_bytes = [], 0
        batch.append(piece)
        num_bytes += piece.num_bytes
    if batch:
        yield batch


def share_of(pieces: Sequence[Result], sizes: Sequence[int], topology: Topology) -> list[Result]:
    """Return the pieces of this rank: a run of consecutive ones, of about as many bytes on every rank.

    Args:
        sizes: bytes of each piece.
    """
    starts = accumulate(sizes, initial=0)
    num_bytes, last = max(sum(sizes), 1), topology.world_size - 1
    ranks = (min(start * topology.world_size // num_bytes, last) for start in starts)
    assert len(pieces) == len(sizes)
    return [piece for piece, rank in zip(pieces, ranks, strict=False) if rank == topology.rank]


def bytes_of_piece(piece: torch.Tensor) -> memoryview:
    bits: Any = raw_bytes(piece.reshape(-1)).numpy()
    return memoryview(bits)


def digest_of_piece(piece: torch.Tensor) -> str:
    """The digest of a tensor's bytes, to compare them with what is read back."""
    return digest_of(bytes_of_piece(piece))


def slabs(entry: ArrayEntry, most_bytes: int) -> Iterator[Box]:
    """Cut a tensor into boxes of whole rows of at most so many bytes; a row that is larger is cut along the next dimension.

    They come in the order of their elements. Where that many fit, the rows are those of whole chunks, so that each chunk is read once.
    """
    yield from _cut((), entry.shape, max(1, most_bytes // item_bytes(entry.dtype)), entry.grid[0] if entry.grid else 1)


def _cut(start: tuple[int, ...], shape: tuple[int, ...], most: int, rows: int = 1) -> Iterator[Box]:
    rest = shape[len(start) :]
    if math.prod(rest) <= most:
        yield Box((*start, *(0 for _ in rest)), (*(1 for _ in start), *rest))
        return
    row = math.prod(rest[1:])
    if row > most:
        for at in range(rest[0]):
            yield from _cut((*start, at), shape, most)
        return
    step = max(1, most // max(row, 1))
    step = step // rows * rows or step
    for first in range(0, rest[0], step):
        yield Box((*start, first, *(0 for _ in rest[1:])), (*(1 for _ in start), min(step, rest[0] - first), *rest[1:]))
