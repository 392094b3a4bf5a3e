"""The interface of a weight sync engine, and the registry of engines by name. Pure: independent of any transport.

Source of the method names and their order: verl's checkpoint engine abstraction, for which these engines are plug-ins.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch

from ckpt.errors import ConfigurationError

NamedTensor = tuple[str, torch.Tensor]
Weights = Iterable[NamedTensor] | AsyncIterable[NamedTensor]
CASTABLE = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
"""Types that weights may be cast from and to when they are sent. Not float8, whose values are scaled."""
Engine = TypeVar("Engine", bound="type[CheckpointEngine]")


class WeightVersion(NamedTuple):
    """Identity of one version of the weights.

    Attributes:
        step: the training step after which they were published.
        digest: 32 hex digits that depend on each name, shape, data type and bit.
    """

    step: int
    digest: str


class MasterMetadata(NamedTuple):
    """Address of the store through which the ranks of an engine meet; the first trainer holds it.

    Attributes:
        address: host name or IP address, IPv6 without brackets.
    """

    address: str
    port: int


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """Figures of one update; equal on all ranks. Seconds are the slowest rank's.

    Attributes:
        num_bytes: size of the weights, counted once whatever the number of ranks.
        sent_bytes: bytes that travelled to the rollouts, counted once: all, padding included, or those that had changed.
        offload_s: trainers, copying weights to the host.
        gather_s: all ranks, agreeing on the layout, and whether the rollouts can take it.
        transfer_s: all ranks, trainers' hosts to rollouts' hosts, each bucket verified.
        reload_s: rollouts, host to live model, or the time of the consumer of `receive_weights`.
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
        """Return the fields by name, and `bandwidth_gb_s`: 10^9 bytes a second, of the transfer alone."""
        return asdict(self) | {"bandwidth_gb_s": self.num_bytes / 1e9 / self.transfer_s if self.transfer_s else None}


class CheckpointEngine(ABC):
    """Sends the weights of trainers to rollouts. Each rank has one; all ranks make the calls of one update.

    prepare -> build_topology (once, by the manager) -> init_process_group -> send_weights | receive_weights -> finalize
    """

    @abstractmethod
    def prepare(self) -> MasterMetadata | None:
        """Prepare to be joined. The master returns the address to meet at; other ranks None. May be called again."""

    @classmethod
    @abstractmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: Sequence[MasterMetadata | None]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the arguments of `init_process_group`, for trainers and for rollouts; each a list with one value per rank.

        Args:
            metadata: the results of `prepare`, trainers first.
        """

    @abstractmethod
    def init_process_group(self, **kwargs: Any) -> None:
        """Join the other ranks. Collective; does nothing if the same ranks are joined already."""

    @abstractmethod
    def finalize(self) -> None:
        """End an update; leaves the other ranks only if the engine was made with `rebuild_group`."""

    @abstractmethod
    async def send_weights(self, weights: Iterable[NamedTensor], global_steps: int | None = None) -> dict[str, Any]:
        """Publish weights. All trainers call it, and each yields all weights in the same order.

        Returns when each rollout has them, with the figures of the update.
        """

    @abstractmethod
    def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[NamedTensor]:
        """Yield the weights that trainers send. All rollouts call it.

        A tensor is a view of memory that is reused: copy it before requesting the next one.
        """


class CheckpointEngineWithCache(CheckpointEngine):
    """An engine that keeps the received weights, for a rollout that loads them when its requests are done."""

    @abstractmethod
    def get_weights(self) -> AsyncIterator[NamedTensor]:
        """Yield the newest complete weights received. Local: no other rank takes part."""


class CheckpointEngineRegistry:
    """Registry of engines by name, and of those whose package is missing.

    Attributes:
        engines: those that can be made.
        missing: the import errors of the others.
    """

    engines: ClassVar[dict[str, type[CheckpointEngine]]] = {}
    missing: ClassVar[dict[str, ImportError]] = {}

    @classmethod
    def register(cls, backend: str) -> Callable[[Engine], Engine]:
        """Return a decorator that registers an engine class; a later one of that name replaces it."""

        def keep(engine: Engine) -> Engine:
            cls.engines[backend] = engine
            cls.missing.pop(backend, None)
            return engine

        return keep

    @classmethod
    def record_import_error(cls, backend: str, error: ImportError) -> None:
        """Register an engine that cannot be imported."""
        cls.missing[backend] = error

    @classmethod
    def get(cls, backend: str) -> type[CheckpointEngine]:
        """Return an engine's class.

        Raises:
            ConfigurationError: no engine has this name, or its package is missing.
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
