"""A real vLLM server on this machine's processor, and what it answers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

from ckpt.errors import CheckpointError
from ckpt.ranks.addresses import LOOPBACK
from tests.support.pace import patience
from tests.support.real_stores import free_ports

ON_CPU = {
    "VLLM_SERVER_DEV_MODE": "1",  # routes for RLHF
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
_UP_S = 300.0


class Answer(NamedTuple):
    """Tokens, and the versions of the weights that they were drawn from."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[str]


class VllmServer:
    """A server of a folder's weights; it takes updates from this package.

    Args:
        workers: that share each layer (tensor parallelism).
        backend: of `weight_transfer_config`.
    """

    def __init__(self, folder: Path, log: Path, workers: int = 1, backend: str = "ckpt", more: Sequence[str] = ()) -> None:
        (self.port,) = free_ports(1)
        self.url = f"http://{LOOPBACK}:{self.port}"
        self.folder, self.log, self._workers, self._backend, self._more = folder, log, workers, backend, more
        self.start()

    def start(self) -> None:
        """Start it, at the same address as before."""
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={self.folder}", "--skip-tokenizer-init"]
        command += [f"--host={LOOPBACK}", f"--port={self.port}", "--enable-scale-out", "--no-enable-prefix-caching", "--seed=0"]
        command += ["--dtype=float32", "--enforce-eager", "--max-model-len=128", f"--tensor-parallel-size={self._workers}"]
        command += [f"--weight-transfer-config={json.dumps({'backend': self._backend})}", *self._more]
        with self.log.open("ab") as out:
            environment = os.environ | ON_CPU
            self.process = psutil.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)

    def await_up(self) -> None:
        """Return when it answers."""
        deadline = time.monotonic() + patience(_UP_S)
        while True:
            try:
                if httpx.get(f"{self.url}/health", timeout=5.0).is_success:
                    return
            except httpx.HTTPError:
                pass
            assert self.process.is_running() and self.process.status() != psutil.STATUS_ZOMBIE, self.log.read_text()[-3000:]
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]
            time.sleep(0.5)

    def generate(self, prompt: Sequence[int], num: int = 8, timeout_s: float = 60.0, model: str | None = None) -> Answer:
        """Return the most probable tokens after a prompt. `model`: an adapter; None: the model itself.

        Raises:
            CheckpointError: it does not answer: it is gone, or paused.
        """
        sampling = {"temperature": 0, "max_tokens": num, "ignore_eos": True, "logprobs": 1, "detokenize": False}
        body = {"token_ids": list(prompt), "sampling_params": sampling, "model": model}
        try:
            said = httpx.post(f"{self.url}/inference/v1/generate", json=body, timeout=timeout_s)
        except httpx.HTTPError as error:
            raise CheckpointError(f"no answer: {error!r}") from error
        if said.is_error:
            raise CheckpointError(f"no answer: {said.text}")
        (choice,) = said.json()["choices"]
        logprobs = [one["logprob"] for one in choice["logprobs"]["content"]]
        return Answer(choice["token_ids"], logprobs, [span["version"] for span in choice["weight_versions"] or ()])

    def checksums(self) -> dict[str, Any]:
        """Return the digests that vLLM computes of the tensors of all workers."""
        said = httpx.post(f"{self.url}/weight_checker", json={"action": "checksum"}, timeout=60.0)
        said.raise_for_status()
        return dict(said.json()["checksums"])

    def version(self) -> str:
        """Return the version that it says it serves."""
        return str(httpx.get(f"{self.url}/weight_info", timeout=60.0).json()["weight_version"])

    def processes(self) -> list[psutil.Process]:
        """Return its processes: that of the address first, the workers last."""
        return [self.process, *self.process.children(recursive=True)]

    def workers(self) -> list[psutil.Process]:
        """Return the processes that hold weights."""
        return [one for one in self.processes() if "Worker" in one.name() or any("Worker" in part for part in one.cmdline())]

    def kill(self) -> None:
        """End all its processes as a lost machine does."""
        for one in reversed(self.processes()):
            try:
                one.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        self.process.wait()
