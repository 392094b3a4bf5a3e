"""The most anonymous memory that code takes on top, measured in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_MEASURED = """
import sys, threading
from pathlib import Path
{imports}

def anonymous():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("RssAnon"))

def watch():
    while not ended.wait(0.002):
        seen.append(anonymous())

ended, seen = threading.Event(), [anonymous()]
watcher = threading.Thread(target=watch)
watcher.start()
{measured}
ended.set()
watcher.join()
print(max(seen) - seen[0])
"""


def most_anonymous_bytes(imports: str, measured: str, *args: str | Path) -> int:
    """Run `imports`, then `measured`, with `args` from `sys.argv[1]` on.

    Returns:
        Bytes by which anonymous memory grew at most while `measured` ran.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _MEASURED.format(imports=imports, measured=measured), *map(str, args)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
    )
    return int(done.stdout)
