"""A rollout's model, changed from one version to the next atomically."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ckpt.engine.base import CASTABLE, NamedTensor, WeightVersion
from ckpt.engine.wire.layout import WeightLayout, first_names
from ckpt.errors import Argument, CheckpointError, MissingStateError, ReplicationError, ShapeMismatchError
from ckpt.format.dtypes import as_integers, raw_bytes, torch_dtype, zarr_name
from ckpt.memory.device import wait_for_all
from ckpt.state.abilities import tied_names
from ckpt.state.address import local_tensor, place_of
from ckpt.state.flatten import TensorLeaf, flatten
from ckpt.state.sharing import Stateful, find_aliases


class LiveModel:
    """Parameters and persistent buffers that generation reads while updates arrive. A sink of `receive_into`.

    Readers use the block of `reading`, in which the model has one version. An update copies into the existing tensors, so views, tied
    names and captured graphs stay valid. Of a DTensor, a rank copies its own part.

    Args:
        stateful: such as `ckpt.state.statefuls.ModelState(module)`.

    Attributes:
        version: of the weights; None before the first update, and after one that failed during the copy.
    """

    def __init__(self, stateful: Stateful) -> None:
        self._stateful = stateful
        self.version: WeightVersion | None = None
        self._torn = False
        self._inside: Counter[int] = Counter()  # open blocks of `reading`, by thread
        self._waiting = False  # an update waits for these blocks
        self._changed = threading.Condition()

    @contextmanager
    def reading(self) -> Iterator[WeightVersion | None]:
        """Keep the weights unchanged inside the block; gives their version. Any number of threads; blocks may nest.

        An update waits for open blocks; a thread without one waits for the update. An event loop is one thread: all of its tasks
        wait with it.

        Raises:
            CheckpointError: the last update failed during the copy.
        """
        thread = threading.get_ident()
        with self._changed:
            # Otherwise overlapping readers would keep an update waiting forever.
            while self._waiting and not self._inside[thread]:
                self._changed.wait()
            if self._torn:
                raise CheckpointError(
                    "the live model holds parts of two versions, because its last update failed during the copy: send the weights again"
                )
            self._inside[thread] += 1
            version = self.version
        try:
            yield version
        finally:
            with self._changed:
                self._inside[thread] -= 1
                self._inside += Counter()  # drops threads without open blocks
                self._changed.notify_all()

    def check(self, layout: WeightLayout) -> None:
        """Check that the weights are exactly this model's. Called before a byte moves.

        Raises:
            MissingStateError: only one side has a name.
            ShapeMismatchError: a shape or a data type differs.
            ShardingError: a tensor of the model is a pending sum.
        """
        leaves, tied = self._leaves()
        sent = {weight.name: weight for weight in layout.weights}
        known = {**{name: name for name in sent}, **layout.aliases}
        firsts = {tied.get(name, name) for name in known}
        missing = [name for name in leaves if name not in known and tied.get(name, name) not in firsts]
        unexpected = [name for name in known if name not in leaves]
        if missing or unexpected:
            raise MissingStateError(
                f"the trainers send other weights than the rollout's model has: {_some(missing)} not sent, {_some(unexpected)} not "
                "in the model; build both from the same configuration"
            )
        for name, first in known.items():
            dtype, shape, _ = place_of(leaves[name], name)
            weight = sent[first]
            if (shape, dtype) != (weight.shape, zarr_name(weight.dtype)):
                hint: tuple[str, ...] = ("",)
                if shape == weight.shape and weight.dtype in CASTABLE and torch_dtype(dtype) in CASTABLE:
                    cast = Argument("engine.rollout_dtype", dtype)
                    hint = "; cast what is sent with ", cast, ", or make the rollout's model of that type"
                raise ShapeMismatchError(
                    f"{name}: the trainers send {zarr_name(weight.dtype)} {list(weight.shape)}, the rollout's model has "
                    f"{dtype} {list(shape)}",
                    *hint,
                )

    def load(self, weights: Iterable[NamedTensor], version: WeightVersion) -> None:
        """Change to another version, as soon as no block of `reading` is open.

        Args:
            weights: whole host tensors; each is requested when the copy of the one before is done, or queued.

        Raises:
            ReplicationError: names that share memory here arrive with different values; the model is unchanged.
        """
        with torch.no_grad():
            leaves, tied = self._leaves()
            one_memory = find_aliases(leaves, {})
            if one_memory:
                weights = _of_one_value([*weights], one_memory)
            with self._held():
                memories = [local_tensor(leaf) for leaf in leaves.values()]
                wait_for_all(memories)  # reads that are queued on the readers' streams
                self._torn, self.version = True, None
                _copy(leaves, weights, one_memory, tied)
                wait_for_all(memories)
                self._torn, self.version = False, version

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the stateful, for `state_digest`."""
        return self._stateful.state_dict()

    @property
    def tied_names(self) -> dict[str, str]:
        """Names that the stateful declares as tied, {alias: name}."""
        return dict(tied_names(self._stateful))

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Wait until no reader is left, and keep new ones out inside the block."""
        with self._changed:
            try:
                while self._inside:
                    self._waiting = True
                    self._changed.wait()
                yield
            finally:
                self._waiting = False
                self._changed.notify_all()

    def _leaves(self) -> tuple[dict[str, TensorLeaf], dict[str, str]]:
        """Return the tensors by name, and {alias: first name} of tied ones, which share memory or are declared as tied."""
        leaves = flatten(self._stateful.state_dict(), "model").tensors
        return leaves, first_names(find_aliases(leaves, self.tied_names))


def _copy(
    leaves: dict[str, TensorLeaf], weights: Iterable[NamedTensor], one_memory: dict[str, str], tied: dict[str, str]
) -> None:
    """Fill each memory of the model once: from the weight of its name, or from one that it is tied to."""
    filled: set[str] = set()
    sent: dict[str, torch.Tensor] = {}

    def fill(name: str, host: torch.Tensor) -> None:
        if (memory := one_memory.get(name, name)) not in filled:
            filled.add(memory)
            box = place_of(leaves[name], name)[2]
            own = host if host.shape == box.shape else host[box.slices]
            as_integers(local_tensor(leaves[name])).copy_(as_integers(own), non_blocking=True)

    for name, host in weights:
        fill(name, host)
        sent.setdefault(tied.get(name, name), host)
    for name in leaves:
        if one_memory.get(name, name) not in filled:
            fill(name, sent[tied.get(name, name)])


def _of_one_value(weights: list[NamedTensor], one_memory: dict[str, str]) -> list[NamedTensor]:
    """Return the weights; raise if weights that share memory here differ."""
    first: dict[str, NamedTensor] = {}
    for name, host in weights:
        other_name, other = first.setdefault(one_memory.get(name, name), (name, host))
        if host.data_ptr() != other.data_ptr() and not torch.equal(raw_bytes(host), raw_bytes(other)):
            raise ReplicationError(
                f"{other_name} and {name} are one tensor in the rollout's model, and the trainers send different values for them; tie "
                "them there, too, or nowhere"
            )
    return weights


def _some(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:3])
    return f"{len(names)} ({shown}{', ...' if len(names) > 3 else ''})" if names else "none"
