"""A rollout's model, which changes from one version to the next as a whole."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ckpt.address import address_of, local_tensor
from ckpt.device import wait_for_all
from ckpt.dtypes import as_integers, zarr_name
from ckpt.engine.base import NamedTensor, WeightVersion
from ckpt.engine.layout import WeightLayout
from ckpt.errors import CheckpointError, MissingStateError, ShapeMismatchError
from ckpt.flatten import flatten
from ckpt.sharing import Stateful, find_aliases


class LiveModel:
    """Parameters and persistent buffers that generation reads while updates come.

    Who reads them does so inside `reading`, and sees one version from the beginning to the end of the block. An update copies into
    the tensors that are there: views of them, tied names and captured graphs go on to hold. Of a DTensor a rank takes its own part.

    Args:
        stateful: such as `ckpt.statefuls.ModelState(module)`.

    Attributes:
        version: of the weights that are there; None before the first update, and after one that failed within the copy.
    """

    def __init__(self, stateful: Stateful) -> None:
        self._stateful = stateful
        self.version: WeightVersion | None = None
        self._torn = False
        self._readers = 0
        self._changed = threading.Condition()

    @contextmanager
    def reading(self) -> Iterator[WeightVersion | None]:
        """Hold the weights as they are, and say which they are. Any number of threads at once; an update waits for all of them.

        Raises:
            CheckpointError: the last update ended in the middle of the copy.
        """
        with self._changed:
            if self._torn:
                raise CheckpointError(
                    "the live model holds parts of two versions, for its last update failed in the copy: send the weights again"
                )
            self._readers += 1
        try:
            yield self.version
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()

    def check(self, layout: WeightLayout) -> None:
        """Refuse weights that are not exactly this model's. Called before a byte moves.

        Raises:
            MissingStateError: names that one side alone has.
            ShapeMismatchError: a shape or a data type differs.
        """
        leaves, aliases = self._leaves()
        sent = {weight.name: weight for weight in layout.weights}
        known = {**{name: name for name in sent}, **layout.aliases}
        missing = [name for name in leaves if name not in known and aliases.get(name, name) not in known]
        unexpected = [name for name in known if name not in leaves]
        if missing or unexpected:
            raise MissingStateError(
                f"the trainers send other weights than the rollout's model has: {_some(missing)} not sent, {_some(unexpected)} not "
                "in the model; build both from the same configuration"
            )
        for name, first in known.items():
            address = address_of(leaves[name], name)
            weight = sent[first]
            if (address.global_shape, address.dtype) != (weight.shape, zarr_name(weight.dtype)):
                hint = (
                    f"; cast what is sent with engine.rollout_dtype={address.dtype}, or make the rollout's model of that type"
                    if address.global_shape == weight.shape
                    else ""
                )
                raise ShapeMismatchError(
                    f"{name}: the trainers send {zarr_name(weight.dtype)} {list(weight.shape)}, the rollout's model has "
                    f"{address.dtype} {list(address.global_shape)}{hint}"
                )

    def load(self, weights: Iterable[NamedTensor], version: WeightVersion) -> None:
        """Become another version, as soon as nobody reads. What `check` has passed does not fail here.

        Args:
            weights: whole tensors on the host.
        """
        leaves, _ = self._leaves()
        with self._changed:
            while self._readers:
                self._changed.wait()
            self._torn, self.version = True, None
            touched = []
            with torch.no_grad():
                for name, host in weights:
                    target = local_tensor(leaves[name])
                    box = address_of(leaves[name], name).box
                    own = host[box.slices] if host.dim() else host
                    as_integers(target.detach()).copy_(as_integers(own), non_blocking=True)
                    touched.append(target)
            wait_for_all(touched)
            self._torn, self.version = False, version

    def state_dict(self) -> dict[str, Any]:
        """That of the stateful, for `state_digest`."""
        return self._stateful.state_dict()

    @property
    def tied_names(self) -> dict[str, str]:
        """That of the stateful."""
        return dict(getattr(self._stateful, "tied_names", None) or {})

    def _leaves(self) -> tuple[dict[str, Any], dict[str, str]]:
        leaves = flatten(self._stateful.state_dict(), "model").tensors
        return leaves, find_aliases(leaves, self.tied_names)


def _some(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:3])
    return f"{len(names)} ({shown}{', ...' if len(names) > 3 else ''})" if names else "none"
