"""The recipe's model in a vLLM server: the names that GPT-2 has there, a server that the run starts, and its answers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ckpt.engine import CheckpointEngineRegistry
from ckpt.engine.base import NamedTensor
from ckpt.engine.inference.inference_requests import ServerRequest
from ckpt.engine.inference.vllm_servers import VllmServers, VllmTrainer
from ckpt.engine.versioned import VersionedEngine
from ckpt.errors import CheckpointError, ConfigurationError, CorruptCheckpointError
from ckpt.ranks.addresses import LOOPBACK
from ckpt.ranks.topology import Topology
from recipes.support.config import made
from recipes.support.ranks import RANK_VARIABLES
from recipes.training.gpt import GPT, SIZES, Size

LOG_NAME = "vllm.log"
_END_S = 20.0


class AsGpt2:
    """Weights of the recipe's GPT under the names, and in the layout, that GPT-2 has in transformers.

    There `c_attn` has all queries first, then keys and values, and a linear layer is stored transposed.
    """

    def __init__(self, weights: Iterable[NamedTensor], size: Size) -> None:
        self._weights = weights
        self._heads = size.heads

    def __iter__(self) -> Iterator[NamedTensor]:
        for name, tensor in self._weights:
            if ".c_attn." in name:
                tensor = tensor.unflatten(0, (self._heads, 3, -1)).transpose(0, 1).flatten(0, 2)
            if ".c_" in name and tensor.dim() == 2:
                tensor = tensor.t()
            yield (name if name == "lm_head.weight" else f"transformer.{name}"), tensor


def write_gpt2(folder: Path, model: GPT) -> None:
    """Write a folder that vLLM and transformers open, with the weights of a whole model."""
    from safetensors.torch import save_file  # which vLLM and transformers bring

    folder.mkdir(parents=True, exist_ok=True)
    size, tied = model.size, "lm_head.weight" in model.tied_names
    sizes = {"vocab_size": size.vocabulary, "n_positions": size.context, "n_embd": size.width, "n_layer": size.layers}
    settings = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_head": size.heads, "tie_word_embeddings": tied}
    settings |= {"activation_function": "gelu_new", "dtype": "float32", "bos_token_id": None, "eos_token_id": None}
    (folder / "config.json").write_text(json.dumps(settings | sizes, indent=2))
    weights = {name: tensor for name, tensor in model.state_dict().items() if name not in model.tied_names}
    save_file({name: tensor.contiguous() for name, tensor in AsGpt2(weights.items(), size)}, folder / "model.safetensors")


class Served:
    """Updates of vLLM's servers in place of rollouts; see `recipes.training.syncing`. Collective among the trainers, all ranks of the run.

    Args:
        cfg: of the run; `cfg["inference"]` has the keys of the servers.
    """

    def __init__(self, cfg: Mapping[str, Any], topology: Topology) -> None:
        self._cfg = cfg
        self._keys = cfg["inference"]
        self._topology = topology
        self._stack = ExitStack()
        self._before: list[list[int]] = []
        self.engine: VersionedEngine = made(cfg["engine"])  # it says in which types weights travel
        self.sender = self

    def open(self, run_dir: Path) -> None:
        """Start a server, if none is given, with weights of another seed, and join the workers of all."""
        with self._topology.operation("the set-up of the run"), self._topology.phase("start vLLM") as phase:
            if self._topology.is_lead:
                phase.from_lead = self._keys["urls"] or [self._start(run_dir)]
                self._before = [self._tokens(url) for url in phase.from_lead]
        self._servers = VllmServers(phase.from_lead, timeout_s=self._keys["timeout_s"])
        (name,) = (name for name, kind in CheckpointEngineRegistry.engines.items() if kind is type(self.engine))
        settings = {key: value for key, value in self._cfg["engine"].items() if key != "_target_"}
        self._trainer = self._stack.enter_context(VllmTrainer(self._servers, (), engine=name, settings=settings))

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, Any]:
        """Update all servers; return the figures."""
        self._trainer.source = AsGpt2(weights, SIZES[self._cfg["model"]["size"]])
        await self._trainer.update(global_steps)
        return dict(self._trainer.report)

    def end(self, run_dir: Path, published: dict[str, Any]) -> list[dict[str, Any]]:
        """Return what each server answers, and did before the first update, on the lead.

        Raises:
            CorruptCheckpointError: a server names another version.
        """
        with self._topology.operation("the answers of vLLM"), self._topology.phase("generate") as phase:
            if self._topology.is_lead:
                phase.from_lead = [
                    {"url": url, "before": before, "after": self._tokens(url, published["version"])}
                    for url, before in zip(self._servers.urls, self._before, strict=True)
                ]
        return [published | row for row in phase.from_lead]

    def close(self) -> None:
        """Leave the servers, and end the one that the run has started."""
        self._stack.close()

    def _tokens(self, url: str, version: int | None = None) -> list[int]:
        sampling = {"temperature": 0, "max_tokens": self._keys["tokens"], "ignore_eos": True, "detokenize": False}
        body = {"token_ids": list(self._keys["prompt"].encode()), "sampling_params": sampling}
        (choice,) = ServerRequest(url, timeout_s=self._keys["timeout_s"]).ask("POST", "inference/v1/generate", body).json()["choices"]
        versions = [span["version"] for span in choice["weight_versions"] or ()]
        if version is not None and versions != [str(version)]:
            raise CorruptCheckpointError(f"the inference engine at {url} answers by version {versions}, and the trainers hold {version}")
        return list(choice["token_ids"])

    def _start(self, run_dir: Path) -> str:
        seed, folder, log = self._cfg["train"]["seed"] + 1, run_dir / "served", run_dir / LOG_NAME
        write_gpt2(folder, made(self._cfg["model"], seed=seed))
        with socket.create_server((LOOPBACK, 0)) as free:
            port = free.getsockname()[1]
        command = [self._keys["python"] or sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={folder.resolve()}"]
        command += [f"--host={LOOPBACK}", f"--port={port}", "--skip-tokenizer-init", "--enable-scale-out"]
        command += ['--weight-transfer-config={"backend": "ckpt"}', f"--tensor-parallel-size={self._keys['workers']}", *self._keys["args"]]
        environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES} | {"VLLM_SERVER_DEV_MODE": "1"}
        with log.open("wb") as out:
            server = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
        self._stack.callback(_end, server)
        url = f"http://{LOOPBACK}:{port}"

        def look() -> None:
            if server.poll() is not None:
                raise CheckpointError(f"the vLLM server that this run has started has ended with code {server.returncode}: see {log}")
            self._topology.progress()

        VllmServers([url], timeout_s=self._keys["timeout_s"]).await_up(look)
        return url


def check_inference(run: Mapping[str, Any]) -> None:
    """Refuse keys that do not fit inference servers.

    Raises:
        ConfigurationError: names one.
    """
    roles, keys = run["roles"], run["inference"]
    if roles["inference"] not in (None, "vllm"):
        raise ConfigurationError(f"roles.inference={roles['inference']}: expected vllm, or null for rollouts of this recipe")
    if roles["inference"] is None:
        return
    if roles["colocated"]:
        raise ConfigurationError("roles.inference=vllm: its workers are other processes; give roles.colocated=false")
    if run["model"]["_target_"] != f"{GPT.__module__}.{GPT.__qualname__}":
        raise ConfigurationError("roles.inference=vllm serves model=gpt alone: for other models use ckpt.engine.inference.vllm_servers")
    if not keys["prompt"]:
        raise ConfigurationError("inference.prompt is empty: expected at least one character")


def _end(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(_END_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
