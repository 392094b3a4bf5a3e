"""Plug-in for vLLM: the workers of its servers are rollouts, and all serve a version of the weights, or none does.

    VLLM_SERVER_DEV_MODE=1 vllm serve <model> --weight-transfer-config '{"backend": "ckpt"}'

    trainers   send_weights ---> host memory ----- buckets -----.
    servers    start_weight_update; serve on                    |---> commit
    workers    a thread receives into host memory <-------------'        |
    servers    pause --- update_weights: load, all agree --- finish_weight_update: the version in each answer --- resume

vLLM finds it by the entry point `vllm.general_plugins`. It takes both ends of vLLM's interface, so vLLM's clients and sources work, too;
trainers without vLLM have `vllm_servers.VllmTrainer`. A server serves on while a version arrives; only to load it, requests wait. What can
fail until the commit leaves all servers on the version before. From the commit on each server of `VllmServers` goes on by itself, also if
the trainers are gone. If a worker cannot load the version, its server stays paused, and all others do if the trainers live: these get the
error, and send again.

vLLM reads the answers of a server's workers in order, up to the first error; those behind it are taken for answers to the next call, from
then on always. So workers tell each other their errors, and only the last one raises, when it is to join. A load that fails is told to
trainers by their agreement, and to the server's last worker, which then names no version.

Source: vLLM's `vllm.distributed.weight_transfer`, version 0.32.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer import factory
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from ckpt.engine.base import MasterMetadata, NamedTensor, WeightVersion
from ckpt.engine.inference.vllm_servers import (
    UPDATE_IS_LOADED,
    UPDATE_IS_OPEN,
    VllmServers,
    VllmTrainer,
    engine_of_processes,
    serve,
)
from ckpt.engine.versioned import VersionedEngine
from ckpt.engine.wire.layout import WeightLayout
from ckpt.errors import CheckpointError, ConfigurationError, MissingStateError, RankAbsentError, logger_of
from ckpt.ranks.default_topology import current_topology
from ckpt.ranks.waiting import in_thread

if TYPE_CHECKING:
    from ckpt.engine.inference.vllm_adapter import ServedAdapter

BACKEND = "ckpt"
_GIVEN_UP = "the update was given up"
_LONGEST_TEXT = 2000
"""Bytes of an error that one worker tells the others."""
_log = logger_of(__name__)


def register() -> None:
    """Register the backend with vLLM. vLLM calls it in each of its processes; a trainer without vLLM's plug-ins calls it itself."""
    for registry, name in (
        (factory.WeightTransferEngineFactory, "CkptWeightTransferEngine"),
        (factory.WeightTransferTrainerFactory, "CkptTrainerWeightTransferEngine"),
    ):
        with suppress(ValueError):  # it is registered
            registry.register_engine(BACKEND, __name__, name)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """What a worker needs to join the trainers, which send it; without an address it leaves others, and says whether it can join.

    Attributes:
        address, port: of the first trainer's store.
        num_trainers, num_workers: of the job; workers of all servers.
        first: number of this server's first worker.
        engine, settings: name in `CheckpointEngineRegistry`, and keywords of its class.
        server: keywords of `VllmServers` for this server, by which its last worker has it load what has arrived; None: the trainers do.
        adapter: {"name", "config"} of the adapter that is sent without the model, its config as PEFT writes it; None: the model is sent.
    """

    address: str | None = None
    port: int = 0
    num_trainers: int = 1
    num_workers: int = 1
    first: int = 0
    engine: str = "broadcast"
    settings: dict[str, Any] = field(default_factory=dict)
    server: dict[str, Any] | None = None
    adapter: dict[str, Any] | None = None


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The version to load."""

    step: int


class CkptWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """A worker of vLLM as a rollout. vLLM makes it, and calls it in the thread that runs the model."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._engine: VersionedEngine | None = None
        self._server: VllmServers | None = None
        self._handover: _Handover | None = None  # while vLLM has an update open
        self._adapter: ServedAdapter | None = None
        self._adapters: dict[str, ServedAdapter] = {}

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join the trainers and the other workers; leave those of an earlier call.

        Raises:
            CheckpointError: `UPDATE_IS_OPEN`: it is given up, and `finish_weight_update` has to come first; or `UPDATE_IS_LOADED`.
            ConfigurationError: the worker cannot take what would be sent.
        """
        failure = None
        try:
            if self._handover is not None:
                raise CheckpointError(UPDATE_IS_LOADED if self._handover.is_served() else UPDATE_IS_OPEN)
            self.shutdown()
            self._join(init_info)
        except Exception as error:
            failure = error
        failure = self._failure_of_all(failure)
        if failure is not None and self.parallel_config.rank == self.parallel_config.world_size - 1:
            raise failure

    def _join(self, init_info: InitInfo) -> None:
        engine = engine_of_processes(init_info.engine, init_info.settings)
        parallel = self.parallel_config
        number = parallel.data_parallel_index * parallel.world_size + parallel.rank
        server = VllmServers(**init_info.server) if init_info.server and number == parallel.world_size - 1 else None
        adapter = self._served_adapter(init_info.adapter, server) if init_info.adapter else None
        if adapter is None and self._is_quantized_on_cpu:
            self._require_int8()
        if init_info.address is None:
            return
        self._server, self._adapter = server, adapter
        self._engine = engine
        engine.init_process_group(
            init_info.num_trainers + init_info.first + number,
            init_info.num_trainers,
            init_info.num_workers,
            MasterMetadata(init_info.address, init_info.port),
        )

    def _failure_of_all(self, failure: Exception | None) -> Exception | None:
        """Return this worker's failure, or the first of the others of the server. Each calls it, in the same call of vLLM."""
        if self.parallel_config.world_size_across_dp == 1:
            return failure
        group = get_world_group().cpu_group
        mine = b"" if failure is None else f"{type(failure).__name__}: {failure}".encode()[:_LONGEST_TEXT]
        text = torch.frombuffer(bytearray(mine.ljust(_LONGEST_TEXT, b"\0")), dtype=torch.uint8)
        gathered = [torch.empty_like(text) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(gathered, text, group=group)
        texts = (bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in gathered)
        others = (CheckpointError(f"worker {number}: {text}") for number, text in enumerate(texts) if text)
        return failure or next(others, None)

    def start_weight_update(self) -> None:
        """Begin to receive the next version; the worker serves meanwhile. One that has joined no trainers says so when it is to load."""
        engine = self._engine
        handover = self._handover = _Handover(engine.timeout_s if engine is not None else 0.0, self._server, self._adapter)
        if engine is not None:
            handover.receive(engine)
        else:
            handover.fail(ConfigurationError("this worker has not joined any trainers: init_weight_transfer_engine comes first"))

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class has it, but for its wait for an accelerator: there may be none."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load the version that has arrived, all of it; returns when all workers have or one cannot, or the others are gone."""
        handover, failure = self._handover, None
        assert handover is not None, "vLLM has seen to it that start_weight_update came first"
        try:
            with handover.weights(update_info.step) as weights:
                (self._load if self._adapter is None else self._adapter.load)(weights)
        except Exception as error:
            _log.warning("step %d is not loaded: %s", update_info.step, error)
            failure = error
        handover.failure = self._failure_of_all(failure)
        if self._adapter is not None:
            try:
                (self._adapter.keep if handover.failure is None else self._adapter.forget)()
            except OSError as error:  # of the last worker, which has the server serve it
                handover.failure = error

    def _served_adapter(self, request: Mapping[str, Any], server: VllmServers | None) -> ServedAdapter:
        from ckpt.engine.inference.vllm_adapter import ServedAdapter

        name = request["name"]
        adapter = self._adapters.get(name) or ServedAdapter(name, self.model, self.vllm_config)
        adapter.set_config(request["config"])
        if server is not None:
            server.require_adapter(name, adapter.folder)
        self._adapters[name] = adapter
        return adapter

    @property
    def _is_quantized_on_cpu(self) -> bool:
        return self.device.type == "cpu" and self.model_config.quantization is not None

    def _require_int8(self) -> None:
        for module in self.model.modules():
            method = type(getattr(module, "quant_method", None)).__name__
            is_plain = method == "NoneType" or method.startswith("Unquantized") or "KVCache" in method
            if not is_plain and not _is_packed_by_onednn(module):
                raise ConfigurationError(f"the served model is quantized by {method}: on CPUs, expected int8 with a scale per output")

    def _load(self, weights: Iterable[NamedTensor]) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        wanted = {name.replace(".base_layer.", ".") for name, _ in self.model.named_parameters()}  # tied ones once
        on_cpu, modules = self.device.type == "cpu", [*self.model.modules()]
        for method in (getattr(module, "quant_method", None) for module in modules if on_cpu):
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None  # type: ignore[union-attr]  # else vLLM does not pack the experts again
        initialize_layerwise_reload(self.model)
        packed = []
        if self._is_quantized_on_cpu:
            from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

            packed = [get_layerwise_info(module) for module in modules if _is_packed_by_onednn(module)]
            for info in packed:  # oneDNN keeps the address of the scales that it packs weights with: they stay where vLLM loads them
                info.kernel_tensors = None
        loaded = self.model.load_weights(weights)
        if incomplete := sum(info.can_load() for info in packed):
            raise MissingStateError(f"the update lacks weights or scales of {incomplete} quantized layers of the served model")
        finalize_layerwise_reload(self.model, self.model_config)
        if on_cpu:
            holders = Counter(id(parameter) for module in modules for parameter in module.parameters(recurse=False))
            for module in modules:
                is_tied = any(holders[id(parameter)] > 1 for parameter in module.parameters(recurse=False))
                if is_tied and (method := getattr(module, "quant_method", None)) is not None:
                    method.process_weights_after_loading(module)  # vLLM packs only the one whose name was loaded
        else:
            torch.accelerator.synchronize()
        if loaded is not None and self.model_config.quantization is None and (missing := sorted(wanted - loaded)):
            raise MissingStateError(
                f"the update has no weights for {len(missing)} parameters of the served model, such as {missing[0]}"
            )

    def finish_weight_update(self) -> None:
        """End the update; one that has not been loaded is given up."""
        self._give_up(_GIVEN_UP)

    def shutdown(self) -> None:
        """Leave the trainers."""
        engine, self._engine, self._server, self._adapter = self._engine, None, None, None
        self._give_up("the worker has left these trainers")
        if engine is not None:
            engine.close()

    def _give_up(self, why: str) -> None:
        handover, self._handover = self._handover, None
        if handover is not None:
            handover.fail(CheckpointError(why))


def _is_packed_by_onednn(module: torch.nn.Module) -> bool:
    """Return whether it is a linear layer of int8 with scales on a CPU."""
    return hasattr(getattr(getattr(module, "scheme", None), "kernel", None), "dnnl_handler")


class _Handover:
    """The sink of an update: the engine's thread gives it the weights, and the thread that runs the model loads them.

    Args:
        timeout_s: how long the server may take from the commit until its workers load.
        server: of this worker, if it is the one that has the server load the version.
        adapter: that arrives; None: the model does.

    Attributes:
        failure: of the load, on any worker of the server.
    """

    failure: Exception | None = None

    def __init__(self, timeout_s: float, server: VllmServers | None, adapter: ServedAdapter | None) -> None:
        self._timeout_s = timeout_s
        self._server = server
        self._adapter = adapter
        self._update: Future[Any] = Future()
        self._weights: Future[tuple[Iterable[NamedTensor], WeightVersion]] = Future()
        self._loaded: Future[None] = Future()
        self._serving: Future[None] | None = None

    def receive(self, engine: VersionedEngine) -> None:
        """Receive in a thread."""
        self._update = in_thread(lambda: asyncio.run(engine.receive_into(self)), "ckpt-vllm")
        self._update.add_done_callback(self._pass_failure)

    def check(self, layout: WeightLayout) -> None:
        """See `Sink.check`. vLLM's models say only while they load what they lack."""
        if self._adapter is not None:
            self._adapter.check(layout)

    def load(self, weights: Iterable[NamedTensor], version: WeightVersion) -> None:
        """See `Sink.load`. Called by the engine's thread."""
        try:
            self._weights.set_result((weights, version))
        except InvalidStateError:
            raise CheckpointError(f"step {version.step} has arrived, and had been given up") from None
        if self._server is not None:
            adapter = (self._adapter.name, self._adapter.folder) if self._adapter is not None else None
            self._serving = in_thread(partial(serve, self._server, version.step, lambda: self.failure, adapter), "ckpt-vllm-serve")
            self._serving.add_done_callback(self._pass_failure)
        try:
            self._loaded.result(self._timeout_s)
        except TimeoutError:
            raise CheckpointError(
                f"step {version.step} has arrived, and the server did not have its workers load it for {self._timeout_s:g} s"
            ) from None

    @contextmanager
    def weights(self, step: int) -> Iterator[Iterable[NamedTensor]]:
        """Yield the weights when they have arrived; afterwards wait until the other workers have loaded theirs."""
        weights, version = self._weights.result()
        try:
            if version.step != step:
                raise CheckpointError(f"the weights that have arrived are of step {version.step}, not of {step}")
            yield weights
        except BaseException as error:
            self.fail(error)
            raise
        if not self._loaded.done():
            self._loaded.set_result(None)
        try:
            self._update.result()
        except RankAbsentError as error:
            # It was committed: whoever is left serves it, for nobody can say any more that all have loaded it.
            _log.warning("step %d is served, and others that have it are gone: %s", step, error)

    def fail(self, error: BaseException) -> None:
        """End the waiting on both sides."""
        for waiting in (self._weights, self._loaded):
            with suppress(InvalidStateError):
                waiting.set_exception(error)

    def is_served(self) -> bool:
        """Return whether this worker has the server load the version, which has arrived; if not, it gives the version up."""
        self.fail(CheckpointError(_GIVEN_UP))
        if self._server is None or self._weights.exception() is not None:
            return False
        return self._serving is None or not self._serving.done()

    def _pass_failure(self, ended: Future[Any]) -> None:
        if (error := ended.exception()) is not None:
            self.fail(error)


@dataclass
class CkptTrainerInitInfo(TrainerInitInfo):
    """How a trainer joins; see `VllmTrainer`. `rank` is its rank in torch's default process group, or 0 without one."""

    backend: ClassVar[str] = BACKEND
    num_workers: int | None = None
    engine: str = "broadcast"
    settings: dict[str, Any] = field(default_factory=dict)


class CkptTrainerWeightTransferEngine(VllmTrainer, TrainerWeightTransferEngine[CkptTrainerInitInfo]):
    """The trainers' end in vLLM's interface: `VllmTrainer`, made by `trainer_init`."""

    init_info_cls = CkptTrainerInitInfo

    @classmethod
    def trainer_init(cls, init_info: CkptTrainerInitInfo, *, client: Any, source: Any = None) -> Self:
        """Join the other trainers and the workers of all servers. Collective.

        Args:
            client: `VllmServers`, or one of vLLM's.
            source: of all weights on each rank, as vLLM's `ModuleSource`.

        Raises: see `VllmTrainer`.
            ConfigurationError: the source holds parts only.
        """
        if source is None or getattr(source, "held_names", lambda: None)() is not None:
            raise ConfigurationError("expected a source of all weights on each rank, such as vLLM's ModuleSource(model)")
        topology = current_topology()
        with topology.operation("the join of vLLM's workers"), topology.phase("ranks"):
            if init_info.rank != topology.rank:
                raise ConfigurationError(f"rank={init_info.rank}: this is rank {topology.rank} of torch's default process group")
        made = cls(client, source, num_workers=init_info.num_workers, engine=init_info.engine, settings=init_info.settings)
        made.is_sender = init_info.is_sender
        return made
