"""A trainer that sends a version after the other to vLLM's servers, also to one that has gone and come back. A program for tests.

    python -m tests.servers.trainer <URLs, JSON> <first step> <folder of weights> ...

The weights of step n are those of folder n modulo their number. Prints `start n`, `sent n`, or `failed n <error>`, and sends step n again.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import count
from pathlib import Path

from safetensors.torch import load_file

from ckpt.engine.inference.vllm_servers import VllmServers, VllmTrainer
from ckpt.errors import CheckpointError

PAUSE_S = 0.5


def main(urls: str, first: str, *folders: str) -> None:
    states = [load_file(Path(folder) / "model.safetensors") for folder in folders]

    class Weights:
        step = 0

        def __iter__(self):  # type: ignore[no-untyped-def]
            return iter(states[self.step % len(states)].items())

    weights = Weights()
    trainer = VllmTrainer(VllmServers(json.loads(urls)), weights, settings={"timeout_s": 60.0})
    for step in count(int(first)):
        weights.step = step
        while True:
            print(f"start {step}", flush=True)
            try:
                trainer.send_weights(step)
                break
            except CheckpointError as error:
                print(f"failed {step} {error}", flush=True)
            trainer.rejoin()
        print(f"sent {step}", flush=True)
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
