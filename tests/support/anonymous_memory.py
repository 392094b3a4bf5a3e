"""The most anonymous memory that code takes on top, in this process, or measured in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MEASURED = """
import sys
from pathlib import Path
from tests.support.anonymous_memory import growth
{imports}

with growth() as most:
    {measured}
print(most[0])
"""


@contextmanager
def growth() -> Iterator[list[int]]:
    """Watch the block. Afterwards the list holds the bytes by which this process's anonymous memory grew at most in it."""
    most: list[int] = []
    ended, before = threading.Event(), _anonymous_bytes()
    seen = [before]

    def watch() -> None:
        while not ended.wait(0.002):
            seen.append(_anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield most
    finally:
        ended.set()
        watcher.join()
        most.append(max(seen) - before)


def _anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def most_anonymous_bytes(imports: str, measured: str, *args: str | Path) -> int:
    """Run `imports`, then `measured`, with `args` from `sys.argv[1]` on.

    Returns:
        Bytes by which anonymous memory grew at most while `measured` ran.
    """
    script = _MEASURED.format(imports=imports, measured=measured.strip().replace("\n", "\n    "))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, *map(str, args)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
    )
    return int(done.stdout)
