"""Weight sync in tests: models of random bits, an engine joined on every rank of `run_ranks`, and updates through it.

def _rank(topology: Topology, num_trainers: int, num_rollouts: int, name: str, device: str) -> list[WeightVersion]:
    with joined(topology, num_trainers, num_rollouts, name, device) as engine:
        live = live_model(device)
        for step in (1, 2, 3):
            update(engine, step, live, MixedModel(step, device))
            require_holds(live, engine, step)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ckpt.engine import CheckpointEngineRegistry, LiveModel, MasterMetadata
from ckpt.engine.base import NamedTensor
from ckpt.engine.versioned import VersionedEngine
from ckpt.ranks.topology import Topology
from ckpt.state.sharing import find_aliases
from ckpt.state.statefuls import ModelState
from tests.device import devices
from tests.support.states import random_bits, same_bits

BUCKET_BYTES = 1 << 16
"""Smaller than the largest tensor of `KINDS`, so that it lies in several, and some buckets hold many."""
DISAGGREGATED = ("broadcast", "kimi_ckpt_engine")
"""Names of engines, for `joined`."""
NEVER = 1_000_000
"""A step that no test publishes: what a rollout holds at first."""


class Kind(NamedTuple):
    """One tensor of a model, and how it lies in memory that is larger, or is seen otherwise."""

    dtype: torch.dtype
    num_elements: int
    lay: Callable[[torch.Tensor], torch.Tensor]
    is_buffer: bool = False


KINDS: dict[str, Kind] = {
    "embed.weight": Kind(
        torch.float32, 301 * 211, lambda flat: flat.view(301, 211)
    ),  # 248 KiB: more than three buckets
    "layers.0.weight": Kind(torch.bfloat16, 77 * 130, lambda flat: flat.view(130, 77).t()),
    "layers.0.bias": Kind(torch.bfloat16, 77, lambda flat: flat),
    "layers.0.scale": Kind(torch.float32, 1, lambda flat: flat[0]),
    "layers.0.experts": Kind(torch.float8_e4m3fn, 3 * 40 * 31, lambda flat: flat.view(3, 40, 31)),
    "layers.0.experts_t": Kind(torch.float8_e8m0fnu, 40 * 31, lambda flat: flat.view(40, 31).t()),
    "layers.1.weight": Kind(torch.float16, 2 * 64 * 33, lambda flat: flat.view(64, 66)[:, ::2]),
    "layers.1.inside": Kind(torch.float32, 90 * 120, lambda flat: flat.view(90, 120)[7:-5, 3:-9]),
    "layers.1.rotation": Kind(torch.complex64, 65 * 7, lambda flat: flat.view(65, 7)),
    "layers.1.nothing": Kind(torch.float32, 0, lambda flat: flat.view(0, 4)),
    "layers.1.odd": Kind(torch.float64, 5, lambda flat: flat),
    "num_batches": Kind(torch.int64, 1, lambda flat: flat[0], is_buffer=True),
    "table": Kind(torch.int64, 700, lambda flat: flat.view(70, 10), is_buffer=True),
    "mask": Kind(torch.bool, 3001, lambda flat: flat[::3], is_buffer=True),
    "bytes": Kind(torch.float4_e2m1fn_x2, 4099, lambda flat: flat, is_buffer=True),
    "norm": Kind(torch.float32, 301, lambda flat: flat),
}
TIED = {"head.weight": "embed.weight"}
"""{alias: first name} of a `MixedModel`."""


class MixedModel(torch.nn.Module):
    """Parameters and buffers of many data types with any bits at all in them, NaN payloads included; `head.weight` is tied.

    Args:
        step: what the bits depend on.
        device: where they lie, by the name that `run_ranks` knows it by.
    """

    def __init__(self, step: int, device: str = "cpu", kinds: Mapping[str, Kind] = KINDS) -> None:
        super().__init__()
        where = devices.made(device).torch_device
        for number, (name, kind) in enumerate(kinds.items()):
            flat = random_bits((kind.num_elements,), kind.dtype, seed=1000 * step + number).to(where)
            put(self, name, kind.lay(flat), is_buffer=kind.is_buffer)
        for alias, first in TIED.items():
            if first in kinds:
                put(self, alias, self.get_parameter(first))


def put(module: torch.nn.Module, name: str, tensor: torch.Tensor, *, is_buffer: bool = False) -> None:
    """Give a module a parameter, or a buffer, under a name with dots in it."""
    *path, last = name.split(".")
    for part in path:
        if part not in dict(module.named_children()):
            module.add_module(part, torch.nn.Module())
        module = module.get_submodule(part)
    if is_buffer:
        module.register_buffer(last, tensor)
    else:
        parameter = (
            tensor if isinstance(tensor, torch.nn.Parameter) else torch.nn.Parameter(tensor, requires_grad=False)
        )
        module.register_parameter(last, parameter)


class Published:
    """What a trainer gives to `send_weights`: the tensors of a module, a tied one once, and its other names in `tied_names`."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._state = ModelState(module).state_dict()
        self.tied_names = find_aliases(self._state, ModelState(module).tied_names)

    def __iter__(self) -> Iterator[NamedTensor]:
        return ((name, tensor) for name, tensor in self._state.items() if name not in self.tied_names)


@contextmanager
def joined(
    topology: Topology, num_trainers: int, num_rollouts: int, name: str, device: str = "cpu", **settings: Any
) -> Iterator[VersionedEngine]:
    """This rank's engine, joined with those of the others, as a manager would do it; closed at the end. All ranks call it.

    Args:
        name: of the engine. `naive` is colocated; others are with `colocated=True`, on as many ranks as there are trainers.
        settings: of the engine, beside those of the test: buckets of `BUCKET_BYTES`, `timeout_s` of 20.
    """
    made_on = devices.made(device)
    made_on.use(topology.local_rank)
    given = {"device": made_on, "timeout_s": 20.0, "is_master": topology.rank == 0}
    engine = CheckpointEngineRegistry.new(name, settings.pop("bucket_size", BUCKET_BYTES), **(given | settings))
    assert isinstance(engine, VersionedEngine)
    with engine:
        join(topology, engine, num_trainers, num_rollouts)
        yield engine


def join(topology: Topology, engine: VersionedEngine, num_trainers: int, num_rollouts: int) -> None:
    """Bring the engines of all ranks together, through the test's own topology, on its hosts. Collective."""
    with topology.phase("meet for the engine") as phase:
        phase.payload = engine.prepare()
    masters = [MasterMetadata(*said) if said is not None else None for said in phase.payloads]
    of_trainers, of_rollouts = type(engine).build_topology(num_trainers, num_rollouts, masters)
    own = {name: (values + of_rollouts[name])[topology.rank] for name, values in of_trainers.items()}
    engine.init_process_group(**own, host=f"host-{topology.node_rank}")


def num_ranks(name: str, num_trainers: int, num_rollouts: int, *, colocated: bool = False) -> int:
    """How many processes `joined` needs."""
    return num_trainers if colocated or name == "naive" else num_trainers + num_rollouts


def live_model(device: str = "cpu", module: torch.nn.Module | None = None) -> LiveModel:
    """A rollout's model, which holds other bits than any step's."""
    return LiveModel(ModelState(module if module is not None else MixedModel(NEVER, device)))


def publish(
    engine: VersionedEngine, step: int | None, weights: torch.nn.Module | Iterable[NamedTensor]
) -> dict[str, Any]:
    """`send_weights`, to its end."""
    given = Published(weights) if isinstance(weights, torch.nn.Module) else weights
    return asyncio.run(engine.send_weights(given, step))


def receive(engine: VersionedEngine, live: LiveModel, step: int | None = None) -> dict[str, Any]:
    """`receive_into`, to its end."""
    return asyncio.run(engine.receive_into(live, step))


def update(
    engine: VersionedEngine,
    step: int,
    live: LiveModel | None = None,
    weights: torch.nn.Module | Iterable[NamedTensor] | None = None,
) -> dict[str, Any]:
    """One update on this rank, whichever it is; returns the figures. All ranks call it.

    Args:
        live: on rollouts.
        weights: on trainers; None: `MixedModel(step)` on the engine's device.
    """
    report: dict[str, Any] = {}
    if engine.rank in engine.trainers:
        report = publish(engine, step, MixedModel(step, engine.device.type) if weights is None else weights)
    if engine.rank in engine.rollouts:
        assert live is not None, "a rollout has a model"
        report = receive(engine, live, step)
    return report


async def collected(weights: AsyncIterator[NamedTensor]) -> dict[str, torch.Tensor]:
    """What `receive_weights` or `get_weights` yields, each tensor copied to the host before the next one is asked for."""
    return {name: tensor.cpu().clone() async for name, tensor in weights}


def require_holds(live: LiveModel, engine: VersionedEngine, step: int) -> None:
    """Fail unless a rollout's live model is that of a step, to the last bit, and says so."""
    require_same(live.state_dict(), MixedModel(step).state_dict())
    assert live.version is not None and live.version.step == step, live.version
    assert live.version == engine.version, (live.version, engine.version)


def require_same(held: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Fail unless two states have the same names, shapes, data types and bits, wherever they lie; naming what differs."""
    assert sorted(held) == sorted(expected), set(held) ^ set(expected)
    differing = [name for name, tensor in held.items() if not same_bits(tensor.cpu(), expected[name].cpu())]
    assert not differing, f"other bits, shape or type in {differing}"
