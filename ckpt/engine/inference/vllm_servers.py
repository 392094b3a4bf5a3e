"""Trainers that update the weights of vLLM's servers, whose workers have the plug-in `ckpt.engine.inference.vllm`. Trainers need no vLLM.

    trainer = VllmTrainer(VllmServers(["http://localhost:8000"]), WholeWeights(model))
    trainer.send_weights(step)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, TypeVar

from ckpt.engine.base import CheckpointEngineRegistry, MasterMetadata, NamedTensor
from ckpt.engine.export import AdapterWeights
from ckpt.engine.inference.inference_requests import ServerRequest
from ckpt.engine.versioned import VersionedEngine
from ckpt.errors import CheckpointError, ConfigurationError
from ckpt.memory.device import current_device
from ckpt.ranks.default_topology import current_topology
from ckpt.ranks.waiting import in_thread, poll_until

_T = TypeVar("_T")
UPDATE_IS_OPEN = "an update is open, whose trainers have left it: finish_weight_update comes first"
UPDATE_IS_LOADED = "an update is being loaded"


@dataclass(frozen=True)
class _VllmServer(ServerRequest):
    pause_mode: str = "wait"

    def is_up(self) -> bool | None:
        try:
            self.ask("GET", "health")
        except CheckpointError:
            return None
        return True

    def num_workers(self) -> int:
        return int(self.ask("GET", "get_world_size").json()["world_size"])

    def join(self, init_info: Mapping[str, Any]) -> bool | None:
        try:
            self.post("init_weight_transfer_engine", {"init_info": init_info})
        except CheckpointError as error:
            if UPDATE_IS_OPEN in str(error):
                self.finish(None)
            elif UPDATE_IS_LOADED not in str(error):
                raise
            return None
        return True

    def finish(self, version: str | None) -> None:
        self.post("finish_weight_update", {} if version is None else {"weight_version": version})

    def pause(self) -> None:
        self.post("pause", {}, mode=self.pause_mode)

    def require_adapter(self, name: str, folder: str) -> bool:
        there = {served["id"]: served["root"] for served in self.ask("GET", "v1/models").json()["data"]}.get(name)
        if there not in (None, folder):
            raise ConfigurationError(f"the inference engine at {self.url} serves {name} from {there} already: choose another name")
        return there is not None

    def serve_adapter(self, name: str, folder: str) -> None:
        if not self.require_adapter(name, folder):
            self.post("v1/load_lora_adapter", {"lora_name": name, "lora_path": folder})

    def version(self) -> str:
        return str(self.ask("GET", "weight_info").json()["weight_version"])

    def serves(self, version: str) -> bool | None:
        served = self.version() == version
        return True if served and not self.ask("GET", "is_paused").json()["is_paused"] else None


@dataclass(frozen=True)
class VllmServers:
    """vLLM servers with `weight_transfer_config={"backend": "ckpt"}`: a client of vLLM's interface for trainers, for all of them at once.

    A request goes to all servers; if one refuses, the others have got it as well.

    Args:
        urls: such as ["http://localhost:8000"]; reached from trainers, and each from its own server's last worker.
        timeout_s: of a request, and how long a server may take to be up.
        pause_mode: what becomes of requests in flight when a version is loaded: "wait": they end on the version before; "keep": they go
            on with the new one; "abort".

    Raises:
        CheckpointError: of each method: a server refuses, or does not answer.
    """

    urls: Sequence[str]
    timeout_s: float = 300.0
    pause_mode: str = "wait"
    _servers: list[_VllmServer] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.urls or self.pause_mode not in ("wait", "keep", "abort"):
            raise ConfigurationError(
                f"urls={list(self.urls)}, pause_mode={self.pause_mode}: expected at least one URL, and wait, keep or abort"
            )
        made = [_VllmServer(url.rstrip("/"), None, self.timeout_s, self.pause_mode) for url in self.urls]
        object.__setattr__(self, "_servers", made)

    def num_workers(self) -> int:
        """Return the number of workers of all servers, when they are up."""
        return sum(self._sizes())

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Have all workers join, each server's after those of the servers before it. An update of trainers that are gone is closed."""
        sizes = self._sizes()

        def join(server: _VllmServer, first: int) -> bool | None:
            own = {"urls": [server.url], "timeout_s": self.timeout_s, "pause_mode": self.pause_mode}
            return server.join({**init_info, "first": first, "server": own})

        self._await(join, "is loading a version for more than", [sum(sizes[:number]) for number in range(len(sizes))])

    def start_weight_update(self) -> None:
        """Have all workers receive."""
        self._each(lambda server: server.post("start_weight_update", {}))

    def update_weights(self, update_info: Mapping[str, Any] | list[Any]) -> None:
        """Have all workers load what has arrived."""
        self._each(lambda server: server.post("update_weights", {"update_info": update_info}))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Close the update, and name its version in answers."""
        self._each(lambda server: server.finish(weight_version))

    def pause(self) -> None:
        """Hold new requests back, and deal with those in flight as `pause_mode` says."""
        self._each(_VllmServer.pause)

    def resume(self) -> None:
        """Serve on."""
        self._each(lambda server: server.post("resume", {}))

    def require_adapter(self, name: str, folder: str) -> None:
        """Raise if anything but the adapter in this folder of the servers' host has its name.

        Raises:
            ConfigurationError: says where the other one is from.
        """
        self._each(lambda server: server.require_adapter(name, folder))

    def serve_adapter(self, name: str, folder: str) -> None:
        """Serve the adapter in a folder of the servers' host, if it is not served yet."""
        self._each(lambda server: server.serve_adapter(name, folder))

    def await_up(self, look: Callable[[], None] = lambda: None) -> None:
        """Return when all servers are up.

        Args:
            look: called again and again; its errors end the wait.
        """

        def is_up(server: _VllmServer) -> bool | None:
            look()
            return server.is_up()

        self._await(is_up, "is not up after")

    def await_version(self, version: str) -> None:
        """Return when all servers serve this version."""
        self._await(lambda server: server.serves(version), f"does not serve version {version} within")

    def await_end(self, step: int) -> None:
        """Return when all servers have loaded a step, or have failed to."""
        versions = str(step), _not_loaded(step)
        self._await(lambda server: server.version() in versions or None, f"has not loaded step {step} within")

    def _sizes(self) -> list[int]:
        self.await_up()
        return self._each(_VllmServer.num_workers)

    def _await(self, ask: Callable[..., bool | None], does_not: str, *more: Sequence[Any]) -> None:
        """Ask each server, with its item of each of `more`, until its answer is not None."""

        def await_one(server: _VllmServer, *given: Any) -> None:
            failure = CheckpointError(f"the inference engine at {server.url} {does_not} {self.timeout_s:g} s")
            poll_until(lambda: ask(server, *given), timeout_s=self.timeout_s, failure=lambda: failure)

        self._each(await_one, *more)

    def _each(self, call: Callable[..., _T], *more: Sequence[Any]) -> list[_T]:
        """Call with each server, and its item of each of `more`, at once."""
        asked = [in_thread(partial(call, *given), "ckpt-vllm-request") for given in zip(self._servers, *more, strict=True)]
        errors = [answer.exception() for answer in asked]  # waits for all
        for error in errors:
            if error is not None:
                raise error
        return [answer.result() for answer in asked]


class OfflineVllm:
    """A client for a `vllm.LLM` of this process, whose workers run in others: it generates nothing while it is updated.

    Args:
        llm: made with `weight_transfer_config={"backend": "ckpt"}`.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def num_workers(self) -> int:
        """Return the number of its workers."""
        return int(self._llm.llm_engine.vllm_config.parallel_config.world_size_across_dp)

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """See vLLM's client."""
        self._llm.init_weight_transfer_engine({"init_info": dict(init_info)})

    def start_weight_update(self) -> None:
        """See vLLM's client."""
        self._llm.start_weight_update()

    def update_weights(self, update_info: Mapping[str, Any] | list[Any]) -> None:
        """See vLLM's client."""
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """See vLLM's client."""
        self._llm.finish_weight_update(weight_version)


def serve(client: Any, step: int, failure: Callable[[], BaseException | None], adapter: tuple[str, str] | None = None) -> None:
    """Have servers load what their workers have received, between two requests, and serve it.

    Args:
        client: `VllmServers`, or one of vLLM's; one that cannot pause leaves that to its user.
        failure: returns the error of a worker that could not load it; called when all have tried.
        adapter: name and folder of the adapter that was received; None: the model was.
    """
    getattr(client, "pause", lambda: None)()
    client.update_weights({"step": step})
    error = failure()
    client.finish_weight_update(str(step) if error is None else _not_loaded(step))
    if error is not None:
        raise error
    if adapter is not None:
        client.serve_adapter(*adapter)
    getattr(client, "resume", lambda: None)()


def _not_loaded(step: int) -> str:
    """In place of the version of a server that was to load this step and could not."""
    return f"{step}: not loaded"


class VllmTrainer:
    """A trainer whose rollouts are the workers of vLLM's servers. Each rank of torch's default process group makes one. Collective.

    Args:
        client: `VllmServers`, or one of vLLM's.
        source: all weights, under the names of the served checkpoint, on each rank: iterated anew in each update.
        num_workers: of all servers; None: the client knows.
        engine, settings: name in `CheckpointEngineRegistry`, and keywords of its class; equal on all ranks.
        adapter: name under which servers serve the adapter that `source`, an `AdapterWeights`, has; the model below it is not sent. Needs
            `VllmServers`, started with `--enable-lora` and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1. None: the source has the model's weights.

    Attributes:
        report: figures of the last update; see `SyncReport`.

    Raises:
        ConfigurationError: such an engine sends to no other process; a server does not take weights from this package, or the adapter.
        RankAbsentError: a rank did not come.
        CheckpointError: a server did not answer in time.
    """

    def __init__(
        self,
        client: Any,
        source: Iterable[NamedTensor],
        *,
        num_workers: int | None = None,
        engine: str = "broadcast",
        settings: Mapping[str, Any] | None = None,
        adapter: str | None = None,
    ) -> None:
        if adapter is not None and not (isinstance(client, VllmServers) and isinstance(source, AdapterWeights)):
            raise ConfigurationError(f"adapter={adapter}: expected a client VllmServers, and a source AdapterWeights")
        self._adapter = adapter
        self.client = client
        self.source = source
        self.report: Mapping[str, Any] = {}
        self._num_workers = num_workers
        self._made_as = engine, dict(settings or {})
        self._engine: VersionedEngine | None = None
        self._unfinished: int | None = None
        self.rejoin()

    def rejoin(self) -> None:
        """Join the workers anew, such as those of a server that was started again; the next version is sent whole. Collective.

        Raises: see the class.
        """
        self.shutdown()
        self._unfinished = None
        topology, (name, settings) = current_topology(), self._made_as
        engine = engine_of_processes(name, settings | {"is_master": topology.is_lead})
        asked: dict[str, Any] = {"engine": name, "settings": settings}
        if isinstance(self.source, AdapterWeights) and self._adapter is not None:
            asked["adapter"] = {"name": self._adapter, "config": self.source.config}
        with topology.operation("the join of vLLM's workers"), topology.phase("servers") as phase:
            if topology.is_lead:
                num_workers = self._num_workers or self.client.num_workers()
                self.client.init_weight_transfer_engine(asked)
                phase.from_lead = [engine.prepare(), num_workers]
        (address, port), num_workers = phase.from_lead
        joining = None
        if topology.is_lead:
            theirs = {"address": address, "port": port, "num_trainers": topology.world_size, "num_workers": num_workers}
            joining = in_thread(partial(self.client.init_weight_transfer_engine, theirs | asked), "ckpt-vllm-join")
        engine.init_process_group(topology.rank, topology.world_size, num_workers, MasterMetadata(address, port))
        if joining is not None:
            joining.result()
        self._engine = engine

    def send_weights(self, step: int | None = None) -> None:
        """Send the weights of the source; returns when all servers serve them. Collective; within an event loop await `update`.

        Args:
            step: their training step, which is the version in the servers' answers; None: one more than the last.

        Raises:
            CheckpointError: on all ranks; the servers serve the version before, or are paused.
        """
        asyncio.run(self.update(step))

    async def update(self, step: int | None = None) -> None:
        """See `send_weights`."""
        engine = self._engine
        if engine is None:
            raise ConfigurationError("this trainer has left the servers: call rejoin() first")
        step = step if step is not None else 1 + (engine.version.step if engine.version else 0)
        serves_itself, serving = hasattr(self.client, "await_version"), list[Future[None]]()
        is_committed, ended = False, Future[None]()

        def committed() -> None:
            nonlocal is_committed
            is_committed = True
            if asked is not None and not serves_itself:
                serving.append(in_thread(partial(serve, self.client, step, ended.exception), "ckpt-vllm-serve"))

        asked = in_thread(self._start, "ckpt-vllm-start") if engine.rank == 0 else None
        try:
            self.report = await engine.send_weights(_Started(self.source, asked), step, committed=committed)
            ended.set_result(None)
        except BaseException as error:
            ended.set_exception(error)
            if asked is not None and is_committed and serves_itself:
                self._unfinished = step  # the servers end it without the trainers
            elif asked is not None:
                await self._closed(asked, serving)
            raise
        if asked is not None and serves_itself:
            serving.append(in_thread(partial(self.client.await_version, str(step)), "ckpt-vllm-serve"))
        for waiting in serving:
            await asyncio.wrap_future(waiting)

    def _start(self) -> None:
        if self._unfinished is not None:
            self.client.await_end(self._unfinished)
            self._unfinished = None
        self.client.start_weight_update()

    async def _closed(self, asked: Future[None], serving: Sequence[Future[None]]) -> None:
        """Have a failed update end on the servers, for vLLM begins no other before."""
        await asyncio.gather(*map(asyncio.wrap_future, (asked, *serving)), return_exceptions=True)
        if not serving:
            with suppress(Exception):
                self.client.finish_weight_update()

    def shutdown(self) -> None:
        """Leave the servers, which serve on."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


class _Started:
    """Weights to send, if the servers have begun to receive."""

    def __init__(self, source: Iterable[NamedTensor], asked: Future[None] | None) -> None:
        self._source = source
        self._asked = asked

    def __iter__(self) -> Iterator[NamedTensor]:
        yield from self._source
        if self._asked is not None:
            self._asked.result()


def engine_of_processes(name: str, settings: Mapping[str, Any]) -> VersionedEngine:
    """Return an engine whose trainers and rollouts are different processes, on this process's device.

    Raises:
        ConfigurationError: there is none of this name, or it is another one.
    """
    made = CheckpointEngineRegistry.new(name, device=current_device(), **settings)
    if not isinstance(made, VersionedEngine) or made.colocated:
        raise ConfigurationError(f"engine={name}: expected one that sends to other processes, such as broadcast or kimi_ckpt_engine")
    return made
