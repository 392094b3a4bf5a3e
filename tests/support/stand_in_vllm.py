"""A small stand-in for vLLM: the classes and functions that the plug-in takes from it, and a server whose workers are processes.

`tests/servers/test_vllm.py` compares them with vLLM's own, in an environment that has it.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, Generic, TypeVar
from urllib.parse import parse_qs, urlsplit

import torch
from safetensors.torch import load_file

from tests.support.pace import patience
from tests.support.ranks import forkserver

_A, _B = TypeVar("_A"), TypeVar("_B")


class WeightTransferEngine(Generic[_A, _B]):
    """See vLLM's."""

    init_info_cls: ClassVar[type]
    update_info_cls: ClassVar[type]

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        self.config, self.vllm_config, self.device, self.model = config, vllm_config, device, model
        self.parallel_config, self.model_config = vllm_config.parallel_config, vllm_config.model_config

    def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
        return self.init_info_cls(**init_dict)

    def parse_update_info(self, update_dict: dict[str, Any]) -> Any:
        return self.update_info_cls(**update_dict)


class TrainerWeightTransferEngine(Generic[_A]):
    """See vLLM's."""

    def __init__(self, *, client: Any, source: Any = None, is_sender: bool = True) -> None:
        self.client, self.source, self.is_sender = client, source, is_sender


class WeightTransferInitInfo: ...


class WeightTransferUpdateInfo: ...


@dataclass
class TrainerInitInfo:
    rank: int = field(kw_only=True)

    @property
    def is_sender(self) -> bool:
        return self.rank == 0


class _Factory:
    def __init__(self) -> None:
        self._registry: dict[str, tuple[str, str]] = {}

    def register_engine(self, name: str, module_path_or_cls: str, class_name: str) -> None:
        if name in self._registry:
            raise ValueError(f"{name} is already registered")
        self._registry[name] = module_path_or_cls, class_name


def initialize_layerwise_reload(model: torch.nn.Module) -> None:
    """Until `finalize_layerwise_reload` the model is not to be used."""
    assert not getattr(model, "is_reloading", False)
    model.is_reloading = True  # type: ignore[assignment]


def finalize_layerwise_reload(model: torch.nn.Module, model_config: Any) -> None:
    assert model.is_reloading
    model.is_reloading = False  # type: ignore[assignment]


@dataclass
class PEFTHelper:
    """See vLLM's."""

    r: int
    lora_alpha: int
    target_modules: list[str] | str

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any]) -> PEFTHelper:
        return cls(**{one.name: config_dict[one.name] for one in fields(cls)})

    def validate_legal(self, lora_config: Any) -> None:
        if self.r > lora_config.max_lora_rank:
            raise ValueError(f"LoRA rank {self.r} is greater than max_lora_rank {lora_config.max_lora_rank}.")

    def get_rank_and_scaling(self, module_name: str) -> tuple[int, float]:
        return self.r, self.lora_alpha / self.r


class LoRAModel:
    """See vLLM's."""

    def __init__(self, lora_model_id: int, rank: int, loras: dict[str, torch.Tensor]) -> None:
        self.id, self.rank, self.loras = lora_model_id, rank, loras

    @classmethod
    def from_lora_tensors(
        cls,
        lora_model_id: int,
        tensors: dict[str, torch.Tensor],
        peft_helper: PEFTHelper,
        device: str = "cuda",
        dtype: torch.dtype | None = None,
        model_vocab_size: int | None = None,
        weights_mapper: Any = None,
        skip_prefixes: list[str] | None = None,
    ) -> LoRAModel:
        return cls(lora_model_id, peft_helper.r, tensors)


def parse_fine_tuned_lora_name(name: str, weights_mapper: Any = None) -> tuple[str, bool]:
    """Return the module, and whether it is its lora_A."""
    parts = name.removeprefix("base_model.model.").split(".")
    assert parts[-2] in ("lora_A", "lora_B"), name
    return ".".join(parts[:-2]), parts[-2] == "lora_A"


class LoraManager:
    """What vLLM's LoRAModelManager has that the plug-in uses. `holds`: the adapters of this worker."""

    def __init__(self, model: Model) -> None:
        self.modules = {"packed": SimpleNamespace(base_layer=SimpleNamespace(input_size=70))}
        self.packed_modules = {"packed": ["one", "other"]}
        self.lora_config, self.vocab_size = SimpleNamespace(lora_dtype=torch.float32), 1000
        self.holds: dict[int, LoRAModel] = {}
        self._model = model

    def add_adapter(self, adapter: LoRAModel) -> None:
        for tensor in adapter.loras.values():
            tensor.mul_(2)  # vLLM multiplies by alpha / r, in place
        self.holds[adapter.id] = adapter

    def activate_adapter(self, lora_id: int) -> None:
        if self._model.fails:
            raise ValueError("the model does not take this adapter")

    def remove_all_adapters(self) -> None:
        self.holds.clear()


def modules() -> dict[str, ModuleType]:
    """Return vLLM's modules that the plug-in imports, by name."""
    names = ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer", "vllm.model_executor", "vllm.model_executor.model_loader")
    made = {name: ModuleType(name) for name in (*names, "vllm.lora")}
    for name, one in {"lora_model": LoRAModel, "peft_helper": PEFTHelper, "utils": parse_fine_tuned_lora_name}.items():
        made[f"vllm.lora.{name}"] = module = ModuleType(f"vllm.lora.{name}")
        setattr(module, one.__name__, one)
    made["vllm"].envs = SimpleNamespace(VLLM_ALLOW_RUNTIME_LORA_UPDATING=True)  # type: ignore[attr-defined]
    base = ModuleType("vllm.distributed.weight_transfer.base")
    for one in (TrainerInitInfo, TrainerWeightTransferEngine, WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo):
        setattr(base, one.__name__, one)
    factory = ModuleType("vllm.distributed.weight_transfer.factory")
    factory.WeightTransferEngineFactory, factory.WeightTransferTrainerFactory = _Factory(), _Factory()  # type: ignore[attr-defined]
    reload = ModuleType("vllm.model_executor.model_loader.reload")
    reload.initialize_layerwise_reload = initialize_layerwise_reload  # type: ignore[attr-defined]
    reload.finalize_layerwise_reload = finalize_layerwise_reload  # type: ignore[attr-defined]
    made["vllm.distributed.weight_transfer"].factory = factory  # type: ignore[attr-defined]
    state = made["vllm.distributed.parallel_state"] = ModuleType("vllm.distributed.parallel_state")
    state.get_world_group = lambda: SimpleNamespace(cpu_group=None)  # type: ignore[attr-defined]  # torch's default group
    return made | {one.__name__: one for one in (base, factory, reload)}


@contextmanager
def installed() -> Iterator[Any]:
    """Import the plug-in with the stand-in for vLLM; yield it."""
    name, adapter = "ckpt.engine.inference.vllm", "ckpt.engine.inference.vllm_adapter"
    made = modules()
    kept = {one: sys.modules.pop(one) for one in [*sys.modules] if one in (name, adapter) or one.partition(".")[0] == "vllm"}
    sys.modules.update(made)
    try:
        yield __import__(name, fromlist=["register"])
    finally:
        for one in (*made, name, adapter):
            sys.modules.pop(one, None)
        sys.modules.update(kept)


class Model(torch.nn.Module):
    """A matrix and a vector. With `fails` it fails in the middle of a load. Adapters: of `one`, and of `other`, which it lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.lora_manager: LoraManager | None = LoraManager(self)
        self.one = torch.nn.Parameter(torch.zeros(300, 70))
        self.two = torch.nn.Parameter(torch.zeros(1000))
        self.fails = False

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            if self.fails and loaded:
                raise ValueError("the model does not take this")
            self.get_parameter(name).data.copy_(tensor)
            loaded.add(name)
        return loaded


class Source:
    """Weights of a step, as a `WeightSource` of vLLM."""

    def __init__(self, held: Any = None) -> None:
        self.step = 0
        self.names = ["one", "two"]
        self._held = held

    def held_names(self) -> Any:
        return self._held

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in Model().named_parameters():
            if name in self.names:
                yield name, weight(name, self.step, parameter.shape)


def weight(name: str, step: int, shape: torch.Size) -> torch.Tensor:
    """Return the weight of a name after a step."""
    return torch.arange(shape.numel(), dtype=torch.float32).reshape(shape) + 1000.0 * step + len(name)


class _Worker:
    """vLLM's worker, as far as updates go. It runs in a process of its own, all calls in one thread."""

    def __init__(self, plugin: Any, rank: int, world_size: int) -> None:
        self.model = Model()
        parallel = SimpleNamespace(rank=rank, world_size=world_size, data_parallel_index=0, nnodes=1, pipeline_parallel_size=1)
        parallel.world_size_across_dp = world_size
        configs = SimpleNamespace(
            parallel_config=parallel, model_config=SimpleNamespace(quantization=None), lora_config=SimpleNamespace(max_lora_rank=8)
        )
        self.engine = plugin.CkptWeightTransferEngine(None, configs, torch.device("cpu"), self.model)
        self._is_open = False

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.engine.init_transfer_engine(self.engine.parse_init_info(init_info))

    def start_weight_update(self) -> None:
        if self._is_open:
            raise RuntimeError("start_weight_update called while a weight update is already active")
        self.engine.start_weight_update()
        self._is_open = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if not self._is_open:
            raise RuntimeError("start_weight_update must be called before update_weights")
        try:
            self.engine.update_weights(update_info)
        except BaseException:
            self._is_open = False
            raise

    def finish_weight_update(self) -> None:
        if not self._is_open:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update")
        self.engine.finish_weight_update()
        self._is_open = False
        if self.model.lora_manager is not None:
            self.model.lora_manager.remove_all_adapters()

    def load_adapter(self, number: int, path: str) -> list[Any]:
        """Read an adapter from its folder if it is not here; return its tensors, and its config."""
        manager = self.model.lora_manager
        if number not in manager.holds:
            tensors = load_file(f"{path}/adapter_model.safetensors")
            manager.holds[number] = LoRAModel(number, 0, tensors)
        tensors = {name: tensor.tolist() for name, tensor in manager.holds[number].loras.items()}
        return [tensors, (Path(path) / "adapter_config.json").read_text()]

    def set_takes_adapters(self, takes: bool) -> None:
        """Be a worker of a server with --enable-lora, or of one without."""
        self.model.lora_manager = LoraManager(self.model) if takes else None

    def holds(self) -> int:
        """Return the step whose weights the model holds, bit for bit; -1: of none."""
        assert not getattr(self.model, "is_reloading", False), "not while it is loaded"
        step = round((self.model.one[0, 0].item() - 3) / 1000)
        of_step = all(torch.equal(one, weight(name, step, one.shape)) for name, one in self.model.named_parameters())
        return step if of_step else -1

    def set_fails(self, fails: bool) -> None:
        """Have the model fail in the middle of loads, or take the next one."""
        self.model.fails, self.model.is_reloading = fails, False  # type: ignore[assignment]


def _work(pipe: Connection, rank: int, world_size: int, store: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world_size)
    with installed() as plugin:
        worker = _Worker(plugin, rank, world_size)
        while True:
            try:
                name, args = pipe.recv()
            except EOFError:
                worker.engine.shutdown()
                return
            try:
                pipe.send((getattr(worker, name)(*args), None))
            except Exception as error:
                pipe.send((None, str(error)))


class _Process:
    """A worker's process."""

    def __init__(self, rank: int, world_size: int, store: str) -> None:
        context = forkserver()
        self._pipe, there = context.Pipe()
        self.process = context.Process(target=_work, args=(there, rank, world_size, store), daemon=True)
        self.process.start()
        there.close()
        self._turn = threading.Lock()

    def call(self, name: str, *args: Any) -> Any:
        with self._turn:
            try:
                self._pipe.send((name, args))
                said, error = self._pipe.recv()
            except (OSError, EOFError):
                raise RuntimeError("EngineDeadError: a worker has ended") from None
        if error is not None:
            raise RuntimeError(error)
        return said

    def end(self) -> None:
        self._pipe.close()
        self.process.join(patience(10.0))
        self.process.kill()


class Server:
    """A vLLM server with the routes for RLHF; `POST /generate` answers with its version, and with the step that each worker holds.

    Args:
        gates: {route: an event}: a request to it waits for the event first.

    Attributes:
        asked: routes, in the order of their requests.
    """

    def __init__(self, num_workers: int = 2, gates: dict[str, threading.Event] | None = None) -> None:
        self._store = tempfile.TemporaryDirectory()
        self.workers = [_Process(rank, num_workers, f"{self._store.name}/store") for rank in range(num_workers)]
        self._answers: list[deque[Future[Any]]] = [deque() for _ in self.workers]
        self._turn = threading.Lock()
        self.asked: list[str] = []
        self.gates = gates or {}
        self.version = "default"
        self.running = threading.Event()
        self.running.set()
        self._idle = threading.Condition()
        self._in_flight = 0
        self.adapters: dict[str, str] = {}
        made = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}")
                url = urlsplit(self.path)
                status, said = made.answer(url.path[1:], parse_qs(url.query), body)
                self.send_response(status)
                text = json.dumps(said).encode()
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: Any) -> None: ...

        class Http(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

        self._http = Http(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        for worker in self.workers:
            worker.end()
        self._store.cleanup()

    def kill(self) -> None:
        """End it as a lost machine does."""
        for worker in self.workers:
            worker.process.kill()
        self._store.cleanup()
        self._http.shutdown()
        self._http.server_close()

    def answer(self, route: str, query: dict[str, list[str]], body: dict[str, Any]) -> tuple[int, Any]:
        self.asked.append(route)
        if route in self.gates:
            self.gates[route].wait(30)
        try:
            return 200, getattr(self, f"_{route.replace('/', '_')}")(**{name: value for name, (value,) in query.items()}, **body)
        except Exception as error:
            return 500, {"error": str(error)}

    def _call(self, name: str, *args: Any) -> list[Any]:
        """Have all workers do it. As with vLLM's, the answers behind the first error are taken for those to the next call."""
        with self._turn, ThreadPoolExecutor(len(self.workers)) as pool:
            for worker, answers in zip(self.workers, self._answers, strict=True):
                answers.append(pool.submit(worker.call, name, *args))
            return [answers.popleft().result() for answers in self._answers]

    def _health(self) -> None: ...

    def _get_world_size(self) -> Any:
        return {"world_size": len(self.workers)}

    def _init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", init_info)

    def _start_weight_update(self) -> None:
        self._call("start_weight_update")

    def _update_weights(self, update_info: dict[str, Any]) -> None:
        self._call("update_weights", update_info)

    def _finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update")
        self.version = weight_version or self.version

    def _pause(self, mode: str) -> None:
        assert mode == "wait"
        self.running.clear()
        with self._idle:
            self._idle.wait_for(lambda: self._in_flight == 0)

    def _resume(self) -> None:
        self.running.set()

    def _v1_models(self) -> Any:
        return {"data": [{"id": "model", "root": "/model"}, *({"id": name, "root": path} for name, path in self.adapters.items())]}

    def _v1_load_lora_adapter(self, lora_name: str, lora_path: str) -> None:
        assert lora_name not in self.adapters
        self._call("load_adapter", len(self.adapters) + 1, lora_path)
        self.adapters[lora_name] = lora_path

    def _weight_info(self) -> Any:
        return {"weight_version": self.version}

    def _is_paused(self) -> Any:
        return {"is_paused": not self.running.is_set()}

    def _generate(self, model: str = "model") -> Any:
        number = 0 if model == "model" else [*self.adapters].index(model) + 1
        self.running.wait()
        with self._idle:
            self._in_flight += 1
        try:
            ask = ("load_adapter", number, self.adapters[model]) if number else ("holds",)
            holds = [worker.call(*ask) for worker in self.workers]
            return {"weight_version": self.version, "holds": holds}
        finally:
            with self._idle:
                self._in_flight -= 1
                self._idle.notify_all()
