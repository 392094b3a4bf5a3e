"""A trainer and a rollout: before every step the rollout receives the weights, acts with them, and sends what it has seen.

python examples/rl_weight_sync.py

The trainer starts the rollout; both listen on the loopback interface only. Killed at any moment, resumed by the same command.
"""

import argparse
import asyncio
import os
from multiprocessing.connection import Connection

import torch
from torch import multiprocessing, nn

from ckpt import Checkpointer
from ckpt.engine import BroadcastCheckpointEngine, LiveModel, MasterMetadata
from ckpt.state.statefuls import ModelState


def policy() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))


def roll_out(meeting: MasterMetadata, num_updates: int, trainer: Connection) -> None:
    """Receive each version of the weights, choose actions by it, and send states, actions and rewards."""
    engine = BroadcastCheckpointEngine(bucket_mib=1)
    engine.init_process_group(1, 1, 1, meeting)
    model = policy()
    live = LiveModel(ModelState(model))
    for _ in range(num_updates):
        asyncio.run(engine.receive_into(live))
        with live.reading() as version, torch.no_grad():
            assert version is not None
            generator = torch.Generator().manual_seed(version.step)
            states = torch.randn(64, 8, generator=generator)
            actions = torch.multinomial(model(states).softmax(1), 1, generator=generator).flatten()
        rewards = (actions == states[:, :4].argmax(1)).float()
        trainer.send([one.numpy() for one in (states, actions, rewards)])
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", default="outputs/rl_weight_sync")
    args = parser.parse_args()

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the engine's addresses: this machine only
    model = policy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Checkpointer(args.folder, model=model, optimizer=optimizer, every=20, keep_last=3) as checkpoints:
        start = checkpoints.restore()
        engine = BroadcastCheckpointEngine(bucket_mib=1, is_master=True)
        meeting = engine.prepare()
        samples, rollout_end = multiprocessing.Pipe(duplex=False)
        rollout_args = (meeting, max(0, args.steps - start), rollout_end)
        rollout = multiprocessing.get_context("spawn").Process(target=roll_out, args=rollout_args, daemon=True)
        rollout.start()
        rollout_end.close()
        engine.init_process_group(0, 1, 1, meeting)
        for step in range(start + 1, args.steps + 1):
            asyncio.run(engine.send_weights(model.state_dict().items(), step - 1))
            states, actions, rewards = map(torch.from_numpy, samples.recv())
            chosen = model(states).log_softmax(1).gather(1, actions[:, None]).flatten()
            loss = -(chosen * (rewards - rewards.mean())).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpoints.step(step, metrics={"reward": rewards.mean().item()})
            print(f"step {step}: loss {loss.item()!r} reward {rewards.mean().item():.2f}", flush=True)
        engine.close()
        rollout.join()


if __name__ == "__main__":
    main()
