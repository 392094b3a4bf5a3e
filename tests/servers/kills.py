"""Kill trainers, engines and workers of vLLM at random moments before, in and after updates; no answer may come from half a version.

    python -m tests.servers.kills [number of events] [seed]

Two servers, one with two workers, are asked all the time. Each answer has the tokens of the weights of the version that it names, to the
logit; and no server answers from an older version after another one has answered from a newer one. What was killed is started again, and
catches up. Prints a line for each event, and a table.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

import psutil

from ckpt.errors import CheckpointError
from tests.servers.models import write
from tests.servers.vllm_server import Answer, VllmServer

PROMPT = [5, 6, 7]
VICTIMS, MOMENTS = ("trainer", "engine", "worker"), ("before", "in", "after")
FOLDERS = 3
_PATIENCE_S = 400.0
_OFTEN_S, _SELDOM_S = 0.02, 0.7


class Seen(NamedTuple):
    server: int
    began: float
    ended: float
    answer: Answer


class Watch:
    """Asks a server all the time; seldom with `every_s` of a while, for a server that starts needs the processors."""

    def __init__(self, number: int, server: VllmServer, seen: SimpleQueue[Seen]) -> None:
        self._number, self._server, self._seen = number, server, seen
        self.every_s = _OFTEN_S
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        while not self._over.wait(self.every_s):
            began = time.monotonic()
            try:
                answer = self._server.generate(PROMPT, num=4, timeout_s=120.0)
            except CheckpointError:
                time.sleep(0.5)
                continue
            self._seen.put(Seen(self._number, began, time.monotonic(), answer))

    def end(self) -> None:
        self._over.set()
        self._thread.join()


class Trainer:
    """The process of `trainer.py`, and what it says."""

    def __init__(self, urls: list[str], first: int, folders: list[Path], log: Path) -> None:
        command = [sys.executable, "-m", "tests.servers.trainer", json.dumps(urls), str(first), *map(str, folders)]
        self._log = log
        with log.open("ab") as out:
            self.process = psutil.Popen(command, stdout=subprocess.PIPE, stderr=out, text=True)
        self._said: SimpleQueue[str] = SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self.process.stdout:
            self._said.put(line.strip())

    def await_word(self, word: str, problems: list[str]) -> int:
        """Return the step of the next line that begins with the word; add errors that it tells meanwhile."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                line = self._said.get(timeout=1.0)
            except Empty:
                is_there = self.process.is_running() and self.process.status() != psutil.STATUS_ZOMBIE
                assert is_there, f"the trainer has ended by itself: {self._log.read_text()[-2000:]}"
                assert time.monotonic() < deadline, f"no {word} from the trainer for {_PATIENCE_S:g} s"
                continue
            said, step, *rest = line.split(" ", 2)
            if said == "failed":
                problems.extend(rest)
            if said == word:
                return int(step)

    def forget(self) -> None:
        """Drop what it has said."""
        while not self._said.empty():
            self._said.get()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def check(seen: list[Seen], expected: dict[tuple[int, str], Answer]) -> None:
    """Check that each answer is of its version, and that none is of an older version than one that had ended before it began."""
    newest = 0
    by_end = sorted(seen, key=lambda one: one.ended)
    for one in sorted(seen, key=lambda one: one.began):
        versions = one.answer.versions
        assert len(versions) == 1, f"{one}: parts of several versions"
        known = expected.setdefault((one.server, _weights_of(versions[0])), one.answer)  # two workers sum in another order
        same = (one.answer.tokens, one.answer.logprobs) == (known.tokens, known.logprobs)
        assert same, f"{one}: not the weights of this version, which answer {known}"
        while by_end and by_end[0].ended <= one.began:
            newest = max(newest, _step(by_end.pop(0).answer))
        assert versions[0] == "default" or _step(one.answer) >= newest, f"{one}: step {newest} had been served before"


def _step(answer: Answer) -> int:
    return 0 if answer.versions[0] == "default" else int(answer.versions[0])


def _weights_of(version: str) -> str:
    return "0" if version == "default" else str(int(version) % FOLDERS)


def events(number: int, dice: random.Random) -> Iterator[tuple[str, str]]:
    """Yield victim and moment of each event, all pairs equally often."""
    pairs = [*product(VICTIMS, MOMENTS)]
    for at in range(number):
        if at % len(pairs) == 0:
            dice.shuffle(pairs)
        yield pairs[at % len(pairs)]


def main(number: int = 9, seed: int = 0) -> None:
    dice, took, problems = random.Random(seed), dict[str, list[float]](), Counter[str]()
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folders = [write("llama", at, root / str(at)) for at in range(FOLDERS)]
        servers = [VllmServer(folders[0], root / f"server-{at}", workers) for at, workers in enumerate((1, 2))]
        for server in servers:
            stack.callback(server.kill)
            server.await_up()
        seen: SimpleQueue[Seen] = SimpleQueue()
        watches = [Watch(at, server, seen) for at, server in enumerate(servers)]
        urls, log, step = [server.url for server in servers], root / "trainer", 1
        trainer = Trainer(urls, step, folders, log)
        stack.callback(lambda: trainer.kill())
        said: list[str] = []
        for _ in range(2 * FOLDERS):
            step = trainer.await_word("sent", said)
        kept: list[Seen] = []
        for at, (victim, moment) in enumerate(events(number, dice), 1):
            trainer.forget()
            said = []
            if moment == "before":
                step = trainer.await_word("sent", said)
                time.sleep(dice.uniform(0.05, 0.3))
            elif moment == "in":
                step = trainer.await_word("start", said)
                time.sleep(dice.uniform(0.0, 1.0))
            else:
                step = trainer.await_word("sent", said)
            began, where = time.monotonic(), dice.randrange(2)
            if victim == "trainer":
                trainer.kill()
                trainer = Trainer(urls, step + 1, folders, log)
            else:
                server = servers[where]
                if victim == "engine":
                    next(one for one in server.processes() if "EngineCore" in " ".join(one.cmdline()) + one.name()).kill()
                else:
                    dice.choice(server.workers()).kill()
                time.sleep(1.0)
                server.kill()
                for watch in watches:
                    watch.every_s = _SELDOM_S
                server.start()
                server.await_up()
                for watch in watches:
                    watch.every_s = _OFTEN_S
            step = trainer.await_word("sent", said)
            if victim != "trainer" and said:
                problems[f"{victim} {moment}: {' '.join(said[0].split())[:160]}"] += 1
            for one in servers:
                one.await_up()
                while (version := one.version()) == "default" or int(version) < step:
                    time.sleep(0.1)
            took.setdefault(f"{victim} | {moment}", []).append(time.monotonic() - began)
            kept += [seen.get() for _ in range(seen.qsize())]
            check(kept, {})
            assert {one.server for one in kept} == {0, 1}
            seconds = took[f"{victim} | {moment}"][-1]
            print(f"{at:3} {victim:8} {moment:8} serves a newer version after {seconds:6.1f} s, {len(kept)} answers", flush=True)
        for watch in watches:
            watch.end()
        kept += [seen.get() for _ in range(seen.qsize())]
        check(kept, {})
        names = {one.server for one in kept}
        assert names == {0, 1}
        print(f"{number} events, {len(kept)} answers, none of half a version, none older than one before")
        for name, seconds in sorted(took.items()):
            print(f"| {name} | {len(seconds)} | {statistics.median(seconds):.1f} ({max(seconds):.1f}) |")
        for said_so, num in sorted(problems.items()):
            print(f"{num} x {said_so}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
