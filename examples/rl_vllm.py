"""GRPO in small, on one machine: vLLM samples answers, a trainer rewards those that say TOKEN often, and sends vLLM the new weights.

python examples/rl_vllm.py

Needs vLLM, transformers and this package in one environment. Killed at any moment, resumed by the same command, which takes the server that
the killed one has left.
"""

import argparse
import os
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ckpt import Checkpointer
from ckpt.engine import HuggingFaceWeights
from ckpt.engine.inference.vllm_servers import VllmServers, VllmTrainer

TOKEN, PROMPTS, GROUP, LENGTH = 7, [[1, 2], [3, 4, 5], [6]], 16, 12
PORT = 8765
ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


def policy() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, head_dim=64, max_position_embeddings=128, tie_word_embeddings=False))


def start_server(model: LlamaForCausalLM, folder: Path) -> subprocess.Popen:
    model.save_pretrained(folder)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={folder}", "--host=127.0.0.1", f"--port={PORT}"]
    command += ["--dtype=float32", "--enforce-eager", "--skip-tokenizer-init", "--max-model-len=64", "--no-enable-prefix-caching"]
    command += ["--enable-scale-out", '--weight-transfer-config={"backend": "ckpt"}']
    with open(folder / "vllm.log", "wb") as log:
        return subprocess.Popen(command, env=os.environ | ON_CPU | {"VLLM_SERVER_DEV_MODE": "1"}, stdout=log, stderr=log)


def sampled(prompt: list[int], step: int) -> torch.Tensor:
    """Return GROUP answers of vLLM, of the version `step`."""
    sampling = {"n": GROUP, "seed": step, "temperature": 1.0, "max_tokens": LENGTH, "ignore_eos": True, "detokenize": False}
    body = {"token_ids": prompt, "sampling_params": sampling}
    said = httpx.post(f"http://127.0.0.1:{PORT}/inference/v1/generate", json=body, timeout=120).raise_for_status().json()
    assert all(span["version"] == str(step) for one in said["choices"] for span in one["weight_versions"])
    return torch.tensor([one["token_ids"] for one in sorted(said["choices"], key=lambda one: one["index"])])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--folder", default="outputs/rl_vllm")
    args = parser.parse_args()

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the engine's addresses: this machine only
    torch.set_num_threads(1)
    model = policy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with socket.socket() as there:
        is_up = there.connect_ex(("127.0.0.1", PORT)) == 0
    server = None if is_up else start_server(model, Path(args.folder) / "served")
    servers = VllmServers([f"http://127.0.0.1:{PORT}"])
    try:
        with Checkpointer(f"{args.folder}/checkpoints", model=model, optimizer=optimizer, every=5, keep_last=2) as checkpoints:
            start = checkpoints.restore()
            with VllmTrainer(servers, HuggingFaceWeights(model)) as vllm:
                for step in range(start + 1, args.steps + 1):
                    vllm.send_weights(step)
                    rewards, losses = [], []
                    for prompt in PROMPTS:
                        answers = sampled(prompt, step)
                        reward = (answers == TOKEN).float().mean(1)
                        tokens = torch.cat([torch.tensor([prompt] * GROUP), answers], 1)
                        logits = model(tokens[:, :-1]).logits[:, len(prompt) - 1 :]
                        chosen = logits.log_softmax(-1).gather(-1, answers[..., None])[..., 0].sum(1)
                        losses.append(-(chosen * (reward - reward.mean()) / (reward.std() + 1e-4)).mean())
                        rewards.append(reward.mean())
                    optimizer.zero_grad()
                    torch.stack(losses).mean().backward()
                    optimizer.step()
                    reward = torch.stack(rewards).mean().item()
                    checkpoints.step(step, metrics={"reward": reward})
                    print(f"step {step}: reward {reward:.4f}", flush=True)
    finally:
        if server is not None:
            server.terminate()


if __name__ == "__main__":
    main()
