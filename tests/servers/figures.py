"""Seconds from a trainer's step to the first token of its weights in vLLM: by this package, and by files.

    python -m tests.servers.figures [workers] [rounds]

In turn, with the same weights (0.5 GB): `VllmTrainer.send_weights`; safetensors on a memory disk, read again by vLLM's `reload_weights`
while the server is paused; and, once, the same files and a server that is started again.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx
import torch
import transformers

from ckpt.engine import HuggingFaceWeights
from ckpt.engine.inference.vllm_servers import VllmServers, VllmTrainer
from tests.servers.vllm_server import VllmServer

SIZES = {"vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}


def main(workers: int = 1, rounds: int = 5) -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, head_dim=64, max_position_embeddings=128))
    num_bytes = sum(one.nbytes for one in model.parameters())
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        model.save_pretrained(root / "model")
        server = VllmServer(root / "model", root / "log", workers)
        stack.callback(server.kill)
        server.await_up()
        servers = VllmServers([server.url])
        trainer = stack.enter_context(VllmTrainer(servers, HuggingFaceWeights(model)))
        step = 0

        def send() -> None:
            trainer.send_weights(step)

        def write_and_reload() -> None:
            model.save_pretrained(root / "newer")
            servers.pause()
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(root / "newer")}}
            httpx.post(f"{server.url}/collective_rpc", json=body, timeout=300).raise_for_status()
            servers.resume()

        def write_and_start_again() -> None:
            model.save_pretrained(root / "model")
            server.kill()
            server.start()
            server.await_up()

        def measured(update: Callable[[], None]) -> float:
            nonlocal step
            step += 1
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.001)
            began = time.perf_counter()
            update()
            server.generate([5, 6, 7], num=1)
            return time.perf_counter() - began

        took: dict[str, list[float]] = {"send_weights": [], "files, reload_weights": [], "files, started again": []}
        for number in range(1 + rounds):
            for name, update in (("send_weights", send), ("files, reload_weights", write_and_reload)):
                seconds = measured(update)
                if number > 0:  # the first ones take memory from the system
                    took[name].append(seconds)
        trainer.shutdown()
        took["files, started again"].append(measured(write_and_start_again))
        print(f"{num_bytes / 1e9:.2f} GB, {workers} workers: median (least to most) of {rounds}")
        for name, seconds in took.items():
            ratio = statistics.median(seconds) / statistics.median(took["send_weights"])
            print(f"| {name} | {statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f}) | {ratio:.1f} |")
        print({name: f"{value:.2f}" for name, value in trainer.report.items() if name.endswith("_s")})


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
