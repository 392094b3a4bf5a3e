"""The batches of one rank, of whatever `data=` makes, with a position that a checkpoint keeps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from ckpt.errors import ConfigurationError
from ckpt.format.digests import block_digest_of
from ckpt.state.abilities import refusing_state
from recipes.support.config import OFFERED, made_with, named, require_data

_COPIED = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor",
    "persistent_workers",
)  # fmt: skip
"""What a plain `DataLoader` keeps beside the order of its samples."""


class Batches(Protocol):
    """What a rank trains on."""

    def next_batch(self) -> Any:
        """Return this rank's rows of the next batch, on its device."""


@dataclass(eq=False)
class SampleLoader:
    """The batches of one rank of a map-style dataset: step s trains on samples [s * B, (s + 1) * B).

    Samples are endless: the dataset over and over, in a new order in every epoch. Sample number n, counted over all epochs, depends only
    on n, the seed and the dataset. A checkpoint keeps the position in samples alone, so a run can go on with any number of ranks.

    Args:
        dataset: has `__len__` and `__getitem__`; may have `identity()`: plain values that tell it from others in a checkpoint.
        batch_size: B, over all ranks.
        share: (number, count) of this rank's part of each batch: rows [number * B / count, (number + 1) * B / count).
        shuffle: False: every epoch in the order of the dataset.
        make: makes a `DataLoader` of the dataset and an order of its samples.
    """

    dataset: Any
    batch_size: int
    share: tuple[int, int]
    seed: int
    device: torch.device
    shuffle: bool = True
    make: Callable[..., DataLoader[Any]] = DataLoader
    position: int = 0
    sharing_pattern: str = field(default="per_rank", init=False)

    def __post_init__(self) -> None:
        self._rows: Iterator[Any] | None = None
        self.num = len(self.dataset)
        if self.num < 1:
            raise ConfigurationError(f"data: {self._what()} has no samples: expected at least one")
        own = getattr(self.dataset, "identity", None)
        self._identity: dict[str, Any] = {"samples": self.num} if own is None else own()

    def state_dict(self) -> dict[str, Any]:
        """Return the position, in samples since the first epoch began, and the properties of the dataset that it belongs to."""
        return {"position": self.position, "epoch": self.position // self.num, "seed": self.seed, **self._identity}

    @refusing_state("data=")
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of a checkpoint.

        Raises:
            CorruptCheckpointError: it is no position.
            ConfigurationError: the dataset differs, so the position does not apply.
        """
        for name, own in self._identity.items():
            if state.get(name) != own:
                raise ConfigurationError(
                    f"{self._what()} differs from the checkpoint's ({name} {state.get(name)}, now {own}): give that one with data=, or "
                    "start this one at its beginning with ~components.dataset"
                )
        self.position = int(state["position"])
        self.seed = int(state["seed"])
        self._rows = None

    def fits(self, saved: Mapping[str, Any]) -> bool:
        """Return True: the position is the whole run's, whichever rank saved it."""
        return True

    @refusing_state("data=")
    def load_changed(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Continue from the copies of other ranks, so that no sample is repeated or left out.

        Raises:
            ConfigurationError: the copies have different positions; or see `load_state_dict`.
        """
        places = {(copy["position"], copy["seed"]) for copy in saved}
        if len(places) > 1:
            raise ConfigurationError(
                f"the saved positions of the ranks differ, (position, seed) is one of {sorted(places)}: they did not share one order of "
                "samples, so it cannot be repartitioned"
            )
        self.load_state_dict(saved[0])

    def next_batch(self) -> Any:
        """Return this rank's rows of the next global batch, collated, and advance to the batch after it."""
        if self._rows is None:
            own = torch.Generator().manual_seed(self.seed)  # a DataLoader draws a number: not from the generators of the run
            self._rows = iter(self.make(self.dataset, batch_sampler=self._numbers(), generator=own))
        rows = next(self._rows)
        self.position += self.batch_size
        return on_device(rows, self.device)

    def sample(self, number: int) -> int:
        """Return the place in the dataset of a sample, counted over all epochs."""
        epoch, at = divmod(number, self.num)
        return shuffled(at, self.num, f"{self.seed}/{epoch}") if self.shuffle else at

    def _numbers(self) -> Iterator[list[int]]:
        """The places in the dataset of this rank's rows, batch by batch. A DataLoader with workers asks ahead of `position`."""
        (number, count), at = self.share, self.position
        num = self.batch_size // count
        while True:
            yield [self.sample(at + row) for row in range(number * num, (number + 1) * num)]
            at += self.batch_size

    def _what(self) -> str:
        return f"the {type(self.dataset).__name__} of data="


class StatefulBatches:
    """The batches of an iterable that keeps its own position, by `state_dict` and `load_state_dict`, such as a `StatefulDataLoader`.

    It begins anew when it ends. Other ranks can go on from it where it has `fits` and `load_changed` (`ckpt.state.abilities.Elastic`).
    """

    def __init__(self, loader: Any, device: torch.device) -> None:
        self.loader = loader
        self.device = device
        self.sharing_pattern = getattr(loader, "sharing_pattern", None) or "per_rank"
        self._rows: Iterator[Any] | None = None

    def state_dict(self) -> Any:
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loader.load_state_dict(state)
        self._rows = iter(self.loader)  # here, where the random numbers that this draws do not count: the generators are restored last

    def fits(self, saved: Mapping[str, Any]) -> bool:
        own = getattr(self.loader, "fits", None)
        return True if own is None else bool(own(saved))

    def load_changed(self, saved: Sequence[Mapping[str, Any]]) -> None:
        own = getattr(self.loader, "load_changed", None)
        if own is None:
            raise ConfigurationError(
                f"data: {type(self.loader).__name__} has kept a position for each of {len(saved)} ranks, and no method load_changed by "
                "which others go on: run on as many ranks, give it that method, or start at the beginning with ~components.dataset"
            )
        own(saved)
        self._rows = iter(self.loader)

    def next_batch(self) -> Any:
        if self._rows is None:
            self._rows = iter(self.loader)
        try:
            rows = next(self._rows)
        except StopIteration:
            self._rows = iter(self.loader)
            try:
                rows = next(self._rows)
            except StopIteration:
                raise ConfigurationError(f"data: {type(self.loader).__name__} yields no batches: expected at least one") from None
        return on_device(rows, self.device)


def batches_of(node: Mapping[str, Any], offered: Mapping[str, Any], *, is_kept: bool) -> Batches:
    """Return the batches of this rank, of what `data=` makes.

    Args:
        offered: arguments that exist only at run time, by name. The target gets those of `OFFERED` that it names; the `loader` method of
            what it makes, if it has one, also `batch_size`, over all ranks.
        is_kept: a checkpoint keeps the position.

    Raises:
        ConfigurationError: it makes nothing that yields batches, or, if `is_kept`, nothing whose position can be kept.
    """
    found = made_with(node, {name: offered[name] for name in OFFERED["data"] if name in offered})
    if callable(loader := getattr(found, "loader", None)):
        found = _loaded(loader, offered)
    device, target = offered["device"], node["_target_"]
    if callable(getattr(found, "next_batch", None)):
        return found  # type: ignore[no-any-return]
    if all(callable(getattr(found, name, None)) for name in ("state_dict", "load_state_dict", "__iter__")):
        return StatefulBatches(found, device)
    load = partial(SampleLoader, batch_size=offered["batch_size"], share=offered["share"], seed=offered["seed"], device=device)
    if isinstance(found, DataLoader) and not isinstance(found.dataset, IterableDataset):
        _require_plain(found, offered["rank_batch_size"])
        settings = {name: getattr(found, name) for name in _COPIED}
        return load(found.dataset, shuffle=isinstance(found.sampler, RandomSampler), make=partial(DataLoader, **settings))
    require_data(type(found), node)
    if hasattr(found, "__getitem__") and hasattr(found, "__len__"):
        return load(found)
    if is_kept:
        raise ConfigurationError(
            f"data: {target} makes a {type(found).__name__} without state_dict and load_state_dict, whose position no checkpoint can keep: "
            "give a StatefulDataLoader of torchdata or a dataset with __len__ and __getitem__, or leave the position out with "
            "~components.dataset"
        )
    return StatefulBatches(found, device)


def _loaded(loader: Callable[..., Any], offered: Mapping[str, Any]) -> Any:
    if "context" not in offered and "context" in inspect.signature(loader).parameters:
        raise ConfigurationError(
            f"model: a {type(offered['model']).__name__} has no attribute context, the number of tokens of a sample, which the loader needs"
        )
    return loader(**named(loader, offered))


def _require_plain(loader: DataLoader[Any], rows: int) -> None:
    """Refuse a DataLoader whose order of samples, or whose batches, are not those of `SampleLoader`."""
    if type(loader.sampler) not in (RandomSampler, SequentialSampler) or loader.batch_size not in (1, rows):
        found = f"sampler={type(loader.sampler).__name__}, batch_size={loader.batch_size}"
        raise ConfigurationError(
            f"data: a DataLoader has {found}: the run makes the order of samples, with shuffle=True or not, and batches of "
            f"train.batch_size over all ranks, {rows} rows of each: leave both out, or give a StatefulDataLoader of torchdata"
        )


def on_device(value: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on a device: in mappings, lists and tuples, too."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: on_device(part, device) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(on_device(part, device) for part in value))
    return type(value)(on_device(part, device) for part in value) if isinstance(value, (tuple, list)) else value


def shuffled(at: int, num: int, key: str) -> int:
    """Return the image of `at` under the permutation of range(num) named `key`, without listing the permutation.

    Source: a Feistel network permutes the next larger power of four; an image outside of range(num) is permuted again
    (cycle walking).
    """
    half = max(1, (num - 1).bit_length() + 1 >> 1)
    mask = (1 << half) - 1
    while True:
        left, right = at >> half, at & mask
        for turn in range(4):
            left, right = right, left ^ (block_digest_of(f"{key}/{turn}/{right}".encode()) & mask)
        at = left << half | right
        if at < num:
            return at
