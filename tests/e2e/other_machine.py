"""What another machine finds of a command that runs on its own one: two network namespaces and a cable between them.

    python -m tests.e2e.other_machine <pid> <file>     inside the other machine, as `watched` starts it

`unshare` makes both, also for a user without rights where the system allows that. The command's machine is called by its outer
address, as the name of a host often leads there. No packet leaves this machine.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

OUTER = "10.99.0.1"
_REPO = Path(__file__).resolve().parents[2]
_INSIDE = f"""
hostname {OUTER}
ip link set lo up
until ip address add {OUTER}/24 dev inside 2> /dev/null; do sleep 0.02; done
ip link set inside up
exec "$@"
"""
_OTHER = """
inside=$1; found=$2; shift 2
unshare --net --uts sh -e -c "$inside" machine "$@" &
until [ "$(readlink /proc/$!/ns/net)" != "$(readlink /proc/$$/ns/net)" ]; do sleep 0.02; done
ip link add outside type veth peer name inside
ip link set inside netns $!
ip address add 10.99.0.2/24 dev outside
ip link set outside up
exec "$PYTHON" -m tests.e2e.other_machine $! "$found"
"""


@dataclass(frozen=True)
class Found:
    """
    Attributes:
        listening: every address and port that something of the command ever listened on.
        reached: those ports that the other machine could connect to.
    """

    listening: frozenset[tuple[str, int]]
    reached: frozenset[int]
    code: int
    said: str

    @property
    def beyond_loopback(self) -> set[str]:
        return {address for address, _ in self.listening if address not in ("127.0.0.1", "::1", "::ffff:127.0.0.1")}


@cache
def why_not_here() -> str:
    """Why no such machines can be made here; "" if they can."""
    if not all(map(shutil.which, ("unshare", "ip", "hostname"))):
        return "needs unshare, ip and hostname"
    made = [
        "unshare",
        "--map-root-user",
        "--net",
        "--uts",
        "ip",
        "link",
        "add",
        "outside",
        "type",
        "veth",
        "peer",
        "name",
        "inside",
    ]
    tried = subprocess.run(made, capture_output=True, text=True, check=False)
    return f"network namespaces are not permitted: {tried.stderr.strip()}" if tried.returncode else ""


def watched(command: list[str], folder: Path, *, timeout_s: float = 120.0, **environment: str) -> Found:
    """Run a command to its end on a machine of its own, and have another one look for what it listens on, all the time."""
    folder.mkdir(parents=True, exist_ok=True)
    found = folder / "found.json"
    process = subprocess.Popen(
        ["unshare", "--map-root-user", "--net", "sh", "-e", "-c", _OTHER, "other", _INSIDE, str(found), *command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(_REPO), "PYTHON": sys.executable} | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
        process.wait()
    assert found.exists(), said
    seen = json.loads(found.read_text())
    listening = frozenset((address, port) for address, port in seen["listening"])
    return Found(listening, frozenset(seen["reached"]), seen["code"], said)


def _look(pid: int) -> tuple[set[tuple[str, int]], set[int], int]:
    """Look until the process has ended; return what it listened on, what could be reached, and its exit code."""
    listening: set[tuple[str, int]] = set()
    reached: set[int] = set()
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return listening, reached, os.waitstatus_to_exitcode(status)
        for address, port in _listeners(pid) - listening:
            listening.add((address, port))
            try:
                socket.create_connection((OUTER, port), timeout=2.0).close()
                reached.add(port)
            except OSError:
                continue
        time.sleep(0.05)


def _listeners(pid: int) -> set[tuple[str, int]]:
    """Everything in the process's network namespace that listens."""
    found = set()
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        try:
            rows = Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
        except OSError:  # it has just ended
            continue
        for row in rows:
            _, local, _, state, *_ = row.split()
            address, port = local.split(":")
            if state == "0A":
                words = [bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)]
                found.add((socket.inet_ntop(family, b"".join(words)), int(port, 16)))
    return found


if __name__ == "__main__":
    all_listening, all_reached, code = _look(int(sys.argv[1]))
    Path(sys.argv[2]).write_text(
        json.dumps({"listening": sorted(all_listening), "reached": sorted(all_reached), "code": code})
    )
