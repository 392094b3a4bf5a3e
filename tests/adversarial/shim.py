"""The LD_PRELOAD shim of the campaign (shim.c): compiled here, and given its orders through a file that processes share."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from enum import IntEnum, IntFlag
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.c")
VARIABLE = "CKPT_SHIM"
"""Names the file with the orders, for programs that are started."""


class Kind(IntFlag):
    """Which calls count."""

    MUTATES = 1
    READS = 2


class Action(IntEnum):
    """What happens at the call whose turn it is."""

    COUNT = 0
    KILL = 1
    """The process that makes it is killed before."""
    KILL_ALL = 2
    """So is the whole process group."""
    TORN = 3
    """It is killed after half of a write, or after the whole of any other call."""
    FAIL = 4
    SHORT = 5
    """Half of the bytes are read or written, as POSIX allows."""


class _Orders(ctypes.Structure):
    """struct orders of shim.c."""

    _fields_ = (
        ("count", ctypes.c_long),
        ("fired", ctypes.c_long),
        ("target", ctypes.c_long),
        ("kinds", ctypes.c_int),
        ("action", ctypes.c_int),
        ("error", ctypes.c_int),
        ("lasts", ctypes.c_int),
        ("group", ctypes.c_int),
        ("clock_offset_s", ctypes.c_long),
        ("root", ctypes.c_char * 512),
        ("trace", ctypes.c_char * 512),
        ("fired_at", ctypes.c_char * 256),
    )


class Orders:
    """The orders of one case, and what came of them.

    Args:
        file: made here; removed with the folder it lies in.
        root: calls on files below it count.
        trace: file that opened files are written down in.
    """

    def __init__(self, file: Path, root: Path | None = None, trace: Path | None = None) -> None:
        self.file = file
        self._trace = trace
        file.write_bytes(bytes(ctypes.sizeof(_Orders)))
        with file.open("r+b") as stream:
            self._memory = mmap.mmap(stream.fileno(), ctypes.sizeof(_Orders))
        self._orders = _Orders.from_buffer(self._memory)
        self._orders.root = os.fsencode(root or "")
        self._orders.trace = os.fsencode(trace or "")

    def let(self, action: Action, at: int = 0, *, kinds: Kind = Kind.MUTATES, error: int = 0, lasts: int = 0) -> None:
        """Order what happens at call number `at`, from 1. Counting begins anew.

        Args:
            lasts: later calls fail, too, as on a full disk: 2: those that write data or make names; 1: also renames and links.
        """
        orders = self._orders
        orders.count, orders.fired, orders.fired_at = 0, 0, b""
        orders.kinds, orders.action, orders.error, orders.lasts = kinds, action, error, lasts
        orders.target = at

    def set_group(self, group: int) -> None:
        """Say which process group `Action.KILL_ALL` kills."""
        self._orders.group = group

    def set_clock_back(self, seconds: int) -> None:
        """Let the clock of day go wrong; a negative number sets it forward."""
        self._orders.clock_offset_s = -seconds

    @property
    def count(self) -> int:
        return int(self._orders.count)

    @property
    def fired_at(self) -> str:
        """The call that went wrong, and its file below the root; "" if none did."""
        return os.fsdecode(self._orders.fired_at)

    def traced(self) -> list[tuple[str, str]]:
        """What was opened, changed, started or connected to: (what, path)."""
        if self._trace is None or not self._trace.exists():
            return []
        lines = self._trace.read_text(errors="surrogateescape").splitlines()
        return [(what, path) for what, _, path in (line.partition(" ") for line in lines)]


def use(orders: Orders | None) -> None:
    """Obey these orders in this process, and in what it starts."""
    path = str(orders.file) if orders is not None else ""
    os.environ[VARIABLE] = path
    ctypes.CDLL(None).shim_use(os.fsencode(path))


def why_not() -> str:
    """Why the shim cannot be used here, as one sentence; "" if it can."""
    if not sys.platform.startswith("linux"):
        return f"the shim is an LD_PRELOAD library for Linux, this is {sys.platform}"
    if _compiler() is None:
        return "the shim needs a C compiler: install gcc, or name one in CC"
    return ""


def compiled(folder: Path) -> Path:
    """Compile the shim into a folder, in half a second, and return the library."""
    compiler = _compiler()
    assert compiler is not None, "see why_not"
    library = folder / "shim.so"
    command = [*compiler, "-O1", "-fPIC", "-shared", "-Wall", "-Werror", "-o", str(library), str(SOURCE), "-ldl"]
    outcome = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr
    return library


def _compiler() -> Sequence[str] | None:
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and shutil.which(name):
            return [name]
    return None


def named(error: int) -> str:
    """ENOSPC for its number."""
    return errno.errorcode[error]
