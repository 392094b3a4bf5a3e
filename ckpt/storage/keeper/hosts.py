"""The files of checkpoints that lie on several hosts, each on one or more, as one store to read from: each byte from the nearest host."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

from ckpt.errors import CorruptCheckpointError
from ckpt.storage.checkpoint_files import CheckpointFolder
from ckpt.storage.files import after
from ckpt.storage.keeper.client import Peer
from ckpt.storage.objects.store import Found, Store, Tag

SCHEME = "hosts"
"""Of the addresses of such checkpoints, in reports: no user gives one."""

HERE, THERE = "read on this host", "read on other hosts"
"""What the reads of a load are counted as."""

_log = logging.getLogger("ckpt")


class HostsStore(Store):
    """See the module. Any thread. It can only be read; keys are paths below the folder of every host.

    Args:
        own: the folder of this host.
        number: of this host.
        peers: number of each other host -> its keeper.
        files: path -> size in bytes, and the numbers of the hosts that have it.
    """

    def __init__(
        self, own: Path, number: int, peers: Mapping[int, Peer], files: Mapping[str, tuple[int, Sequence[int]]]
    ) -> None:
        self._own = CheckpointFolder(own)
        self._number = number
        self._peers = peers
        self._sizes = {path: size for path, (size, _) in files.items()}
        self._places = {path: nearest_first(hosts, number) for path, (_, hosts) in files.items()}
        self._silent: set[int] = set()
        self._counts = {}
        self._counting = threading.Lock()

    def get(self, key: str) -> tuple[memoryview, Tag]:
        """See `Store.get`."""
        return self.get_range(key, 0, self._size(key)), self.head(key)[1]

    def get_range(self, key: str, start: int, stop: int) -> memoryview:
        """See `Store.get_range`."""
        memory = memoryview(bytearray(max(0, min(stop, self._size(key)) - start)))
        return memory[: self.get_into(key, start, stop, [memory])]

    def get_into(self, key: str, start: int, stop: int, buffers: Sequence[memoryview]) -> int:
        """See `Store.get_into`. If a host does not answer, or has lost the file, the next one is asked."""
        count = min(stop, self._size(key)) - start
        if count <= 0:
            return 0
        wanted = _first(buffers, count)
        failure: OSError | None = None
        for host in sorted(self._places[key], key=self._silent.__contains__):  # those last: each costs its patience again
            try:
                is_here = host == self._number
                got = self._read_here(key, start, wanted) if is_here else self._peers[host].read_into(key, start, wanted)
                if got == count:
                    self._count(HERE if is_here else THERE, count, requests=1)
                    return count
                failure = OSError(errno.EIO, "a host has fewer bytes of it than were saved", key)
            except (OSError, CorruptCheckpointError) as error:
                failure = error if isinstance(error, OSError) else OSError(errno.EIO, str(error), key)
                if host != self._number and not isinstance(error, FileNotFoundError):
                    self._silent.add(host)
            _log.info("%s", failure)
            self._leave_out(key, host)
        raise failure or FileNotFoundError(errno.ENOENT, "no host has it any more", key)

    def head(self, key: str) -> tuple[int, Tag]:
        """See `Store.head`. A path has one content: the save's that this store is made for."""
        return self._size(key), Tag(None, None)

    def below(self, key: str) -> Iterator[Found]:
        """See `Store.below`."""
        start = f"{key}/" if key else ""
        yield from (Found(path, size) for path, size in self._sizes.items() if path.startswith(start))

    def names(self, key: str) -> tuple[list[str], dict[str, float]]:
        """See `Store.names`."""
        start = f"{key}/" if key else ""
        rest = [path.removeprefix(start) for path in self._sizes if path.startswith(start)]
        folders = dict.fromkeys(path.partition("/")[0] for path in rest if "/" in path)
        return list(folders), {path: 0.0 for path in rest if "/" not in path}

    def close(self) -> None:
        """Let go of files and connections."""
        self._own.close()
        for peer in self._peers.values():
            peer.close()

    def _leave_out(self, key: str, host: int) -> None:
        if host in self._places[key]:
            self._places[key].remove(host)

    def _size(self, key: str) -> int:
        if key not in self._sizes:
            raise FileNotFoundError(errno.ENOENT, "no host has it", key)
        return self._sizes[key]

    def _read_here(self, key: str, start: int, buffers: Sequence[memoryview]) -> int:
        """Fill buffers with a file's bytes of this host; return their number. Mapped memory is slower: each page of it is a fault."""
        left, at = list(buffers), start
        with self._own.opened(key) as file:
            while left and (count := file.read_at(left, at)):
                at += count
                left = after(left, count)
        return at - start


def _first(buffers: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """The first bytes of buffers."""
    ends = accumulate(map(len, buffers), initial=0)
    return [buffer[: max(0, num_bytes - at)] for buffer, at in zip(buffers, ends, strict=False)]


def nearest_first(hosts: Sequence[int], own: int) -> list[int]:
    """Order hosts: this one, then those with the next higher numbers, so that not all hosts ask one.

    Example:
        >>> nearest_first([0, 1, 3], 2), nearest_first([0, 1, 3], 1)
        ([3, 0, 1], [1, 3, 0])
    """
    return sorted(hosts, key=lambda host: (host < own, host))
