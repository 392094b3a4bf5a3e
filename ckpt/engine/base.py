"""The contract of a weight sync engine, and the registry of engines by name. Pure: knows no transport.

Source of the method names and their order: verl's checkpoint engine abstraction, whose plug-ins these engines can be.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch

from ckpt.errors import ConfigurationError

NamedTensor = tuple[str, torch.Tensor]
CASTABLE = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
"""Types that weights may be cast from and to on their way. Not float8: what is in it has been scaled."""
Engine = TypeVar("Engine", bound="type[CheckpointEngine]")


class WeightVersion(NamedTuple):
    """Which weights somebody holds.

    Attributes:
        step: the trainer's, after which they were published.
        digest: 32 hex digits that depend on every name, shape, data type and bit of them.
    """

    step: int
    digest: str


class MasterMetadata(NamedTuple):
    """Where the ranks of an engine meet: the store of the first trainer.

    Attributes:
        address: a name or an IP address, an IPv6 one without brackets.
    """

    address: str
    port: int


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """Figures of one update; equal on all ranks. Seconds are the slowest rank's.

    Attributes:
        num_bytes: of the weights once, whatever the number of ranks.
        sent_bytes: what of them was brought to rollouts, once: all, padding included, or what had changed.
        offload_s: trainers, weights to the host.
        gather_s: all ranks, agreeing on what travels and whether the rollouts can take it.
        transfer_s: all ranks, trainers' hosts to rollouts' hosts, every bucket verified.
        reload_s: rollouts, host to the live model, or the time that the consumer of `receive_weights` took.
        blocked_s: trainers, the whole call.
    """

    step: int
    num_tensors: int
    num_bytes: int
    sent_bytes: int
    num_buckets: int
    offload_s: float
    gather_s: float
    transfer_s: float
    reload_s: float
    blocked_s: float

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, with `bandwidth_gb_s`: 10^9 bytes a second, of the transfer alone."""
        return asdict(self) | {"bandwidth_gb_s": self.num_bytes / 1e9 / self.transfer_s if self.transfer_s else None}


class CheckpointEngine(ABC):
    """Sends the weights of trainers to rollouts. Every rank has one; the calls of one update are made by all ranks.

    prepare -> build_topology (once, by whoever manages) -> init_process_group -> send_weights | receive_weights -> finalize
    """

    @abstractmethod
    def prepare(self) -> MasterMetadata | None:
        """Get ready to be joined. The master returns where; any other rank None. May be called again."""

    @classmethod
    @abstractmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: Sequence[MasterMetadata | None]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the arguments of `init_process_group`: for trainers, for rollouts; each a list with one value per rank.

        Args:
            metadata: what `prepare` returned, trainers first.
        """

    @abstractmethod
    def init_process_group(self, **kwargs: Any) -> None:
        """Join the other ranks. Collective; does nothing where the same ranks are joined already."""

    @abstractmethod
    def finalize(self) -> None:
        """End an update; leaves the other ranks only if the engine was made with `rebuild_group`."""

    @abstractmethod
    async def send_weights(self, weights: Iterable[NamedTensor], global_steps: int | None = None) -> dict[str, Any]:
        """Publish weights. All trainers call it, and the generator of each yields all of them in the same order.

        Returns when every rollout has them, with the figures of the update.
        """

    @abstractmethod
    def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[NamedTensor]:
        """Yield the weights that trainers send. All rollouts call it.

        A tensor is a view of memory that is used again: copy it before the next one is asked for.
        """


class CheckpointEngineWithCache(CheckpointEngine):
    """An engine that keeps what came, for a rollout that takes it when its requests are done."""

    @abstractmethod
    def get_weights(self) -> AsyncIterator[NamedTensor]:
        """Yield the newest complete weights that have come. Local: no other rank takes part."""


class CheckpointEngineRegistry:
    """Engines by name. One whose package is missing is remembered with the reason.

    Attributes:
        engines: those that can be had.
        missing: why the others cannot.
    """

    engines: ClassVar[dict[str, type[CheckpointEngine]]] = {}
    missing: ClassVar[dict[str, ImportError]] = {}

    @classmethod
    def register(cls, backend: str) -> Callable[[Engine], Engine]:
        """Decorate an engine class with its name; a later one of that name takes its place."""

        def keep(engine: Engine) -> Engine:
            cls.engines[backend] = engine
            cls.missing.pop(backend, None)
            return engine

        return keep

    @classmethod
    def record_import_error(cls, backend: str, error: ImportError) -> None:
        """Remember why an engine is not there."""
        cls.missing[backend] = error

    @classmethod
    def get(cls, backend: str) -> type[CheckpointEngine]:
        """Return an engine's class.

        Raises:
            ConfigurationError: there is no such engine, or its package is missing.
        """
        if backend in cls.engines:
            return cls.engines[backend]
        has = ", ".join(sorted(cls.engines)) or "none"
        if backend in cls.missing:
            error = cls.missing[backend]
            raise ConfigurationError(
                f"the weight sync engine {backend} could not be imported: {error}; engines that can be had: {has}"
            ) from error
        others = "".join(f"; {name} could not be imported: {error}" for name, error in sorted(cls.missing.items()))
        raise ConfigurationError(f"there is no weight sync engine {backend}; there are {has}{others}")

    @classmethod
    def new(cls, backend: str, *args: Any, **kwargs: Any) -> CheckpointEngine:
        """Make an engine by name."""
        return cls.get(backend)(*args, **kwargs)
