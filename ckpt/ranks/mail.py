"""Messages between the ranks of one life of a job, whatever their channel: over Unix sockets within a host, over the store between hosts.

    rank -- socket --> first rank of its host -- queue in the store --> first rank of the other host -- socket --> rank

The first rank of a host, its hub, reads the host's queue, from which the store's server wakes it, and carries for the others. So a rank
that is no hub has one connection to the store, and a hub two, however many branches there are. A socket needs no port and no secret: the
kernel says whose process is at the other end.

The end of a connection is the end of a process. Whoever sees it tells all hubs, and these all ranks, which look at once. A rank whose hub
is gone, or silent, sends over the store itself; what it would be told it reads from the truth (agreement.py). A rank that reaches no hub,
for it is in another container, reads a queue of its own.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from queue import Empty, SimpleQueue

from ckpt.ranks.addresses import peer_of
from ckpt.ranks.store_client import StoreClient
from ckpt.ranks.stores import StoreGoneError
from ckpt.ranks.waiting import start

_AT_ONCE_S = 0.0005
"""A message that is there within this time has been waiting for the reader."""
_CONNECT_S = 5.0
"""Longest wait for the hub to listen."""
_LENGTH = struct.Struct("<I")
_LONGEST_BYTES = 1 << 30

LOOK = b""
"""In place of a message: something has happened, look at once."""

# Kinds of letters: what a socket or a queue carries.
_MESSAGE, _GONE, _HELLO, _BYE, _STOP, _NOTHING, _SEVERAL, _VALUE = b"mghbs-+v"


class _Letter:
    """Kind, ranks (to whom, or of whom), channel, message: encoded as one run of bytes."""

    @staticmethod
    def encode(kind: int, ranks: Iterable[int] = (), channel: str = "", data: bytes = b"") -> bytes:
        return b"%c%b\0%b\0%b" % (kind, ",".join(map(str, ranks)).encode(), channel.encode(), data)

    @staticmethod
    def decode(letter: bytes) -> tuple[int, list[int], str, bytes]:
        ranks, channel, data = letter[1:].split(b"\0", 2)
        return letter[0], [int(rank) for rank in ranks.split(b",") if rank], channel.decode(), data

    @staticmethod
    def split(run: bytearray) -> list[bytes]:
        """Take the letters with their lengths from the beginning of `run`, and leave what is not whole.

        Raises:
            ValueError: one is longer than any rank writes.
        """
        letters = []
        while len(run) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(run)[0]
            if end > _LONGEST_BYTES:
                raise ValueError(f"a letter of {end} bytes")
            if len(run) < end:
                break
            letters.append(bytes(run[_LENGTH.size : end]))
            del run[:end]
        return letters

    @staticmethod
    def join(letters: Sequence[bytes]) -> bytes:
        """Return one letter that carries several."""
        run = b"".join(_LENGTH.pack(len(letter)) + letter for letter in letters)
        return letters[0] if len(letters) == 1 else _Letter.encode(_SEVERAL, data=run)


class _Peer:
    """A connection within the host. Reads and writes without waiting; what does not fit waits here."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.rank = -1  # not said yet
        self.said_bye = False
        self._lock = threading.Lock()
        self._read, self._unsent = bytearray(), bytearray()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def has_unread(self) -> bool:
        """Whether something has come that `receive` has not returned."""
        with suppress(OSError):
            return bool(self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        return False

    def send(self, letter: bytes = b"") -> None:
        """Send a letter, or more of those before it. A connection that has ended is noted by whoever reads it."""
        with self._lock:
            if letter:
                self._unsent += _LENGTH.pack(len(letter)) + letter
            with suppress(OSError):
                while self._unsent and (num := self.connection.send(self._unsent)):
                    del self._unsent[:num]

    def receive(self) -> list[bytes] | None:
        """Return the letters that have come; None: the other process has ended.

        Raises: as `_Letter.split`.
        """
        try:
            data = self.connection.recv(1 << 20)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        self._read += data
        return _Letter.split(self._read)


class Mail:
    """This rank's messages, by channel.

    Args:
        client: of the part of the store that this life of the job uses.
        hosts: of all ranks, by name.
        life: name of this life, which no other job of this machine can have.
        timeout_s: that the store may be silent.

    Attributes:
        gone: ranks whose processes have ended, as far as this one has heard.
    """

    def __init__(self, client: StoreClient, rank: int, hosts: Sequence[str], life: str, timeout_s: float) -> None:
        self.client = client
        self.gone: set[int] = set()
        self._rank = rank
        first: dict[str, int] = {}
        self._hub_of = [first.setdefault(host, first_rank) for first_rank, host in enumerate(hosts)]
        self._hub = self._hub_of[rank]
        self._has_neighbours = self._hub_of.count(self._hub) > 1 and sys.platform == "linux"
        self._where = f"\0ckpt-{life}-{self._hub}"
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._channels: dict[str, SimpleQueue[bytes | None]] = {}
        self._peers: dict[int, _Peer] = {}
        self._is_taking = {"queue": False, "sockets": False}  # a thread has read letters, and not passed all of them on
        self._carrier = 0  # the thread that reads the sockets
        self._carried: dict[int, list[bytes]] = {}  # queue -> letters that it has read together
        self._failure: StoreGoneError | None = None
        self._pushed_s = time.monotonic()
        self._threads: list[threading.Thread] = []
        self._is_closing = self._is_reader = False
        self._wake: socket.socket | None = None
        self._sockets = ExitStack()
        with ExitStack() as unless_open:
            unless_open.callback(self.close)
            unless_open.callback(self._sockets.close)
            is_connected = self._has_neighbours and self._open_sockets()
            self._is_reader = not is_connected
            if self._is_reader:
                self._reader = StoreClient(client.connection, writer=rank, timeout_s=timeout_s, pops=True)
                self._run(self._read_queue, "queue")
            if self._has_neighbours:
                self._run(self._read_sockets, "mail")
            unless_open.pop_all()

    # What the agreements use

    def send(self, to: Sequence[int], channel: str, data: bytes, *, directly: bool = False) -> None:
        """Send a message to a channel of other ranks. Order between two ranks is kept. Any thread.

        Args:
            directly: over the store, for this host's hub is silent.
        """
        if directly or not self._give_to_hub(_Letter.encode(_MESSAGE, to, channel, data)):
            self._route(_MESSAGE, to, channel, data)

    def send_value(self, to: Sequence[int], channel: str, head: bytes, key: str) -> None:
        """Send a message, `head` and the value of a key of the store, which each host reads once."""
        data = key.encode() + b"\0" + head
        if not self._give_to_hub(_Letter.encode(_VALUE, to, channel, data)):
            self._route(_VALUE, to, channel, data)

    def receive(self, channel: str, timeout_s: float) -> bytes | None:
        """Return the next message in a channel, or `LOOK`; None: none has come. Signal handlers run meanwhile.

        Raises:
            StoreGoneError: the store does not answer.
        """
        if self._failure is not None:
            raise StoreGoneError(str(self._failure), is_silent=self._failure.is_silent)
        with suppress(Empty):
            data = self._of(channel).get(timeout=timeout_s)
            return self.receive(channel, 0.0) if data is None else data
        return None

    def has_more(self, channel: str) -> bool:
        """Whether there are messages, or may be: some that have come to this process and have not been read yet.

        Asked on the way that a message takes, so that none is missed that moves on meanwhile.
        """
        if any(peer.has_unread() for peer in [*self._peers.values()]):
            return True
        if self._is_reader and self.client.num_waiting(_queue(self._rank)) > 0:
            return True
        return any(self._is_taking.values()) or not self._of(channel).empty()

    def keep_alive(self) -> None:
        """Send this rank a letter from time to time: if none comes for `timeout_s`, the store is gone."""
        if self._is_reader and time.monotonic() - self._pushed_s > self._timeout_s / 4:
            self._pushed_s = time.monotonic()
            self.client.push(_queue(self._rank), _Letter.encode(_NOTHING))

    def fail(self, error: StoreGoneError) -> None:
        """Wake all who wait for a message: there will be none."""
        with self._lock:
            self._failure = error
            for channel in self._channels.values():
                channel.put(None)

    def forget(self, channel: str) -> None:
        """Drop the messages in a channel that is closed."""
        with self._lock:
            self._channels.pop(channel, None)

    def close(self) -> None:
        """Leave: stop reading, and let other ranks of the host know that this one has not died."""
        self._is_closing = True
        for peer in [*self._peers.values()]:
            peer.send(_Letter.encode(_BYE, [self._rank]))
        with suppress(StoreGoneError):
            if self._is_reader:
                self.client.push(_queue(self._rank), _Letter.encode(_STOP))
        self._poke()
        for thread in self._threads:
            thread.join(min(5.0, self._timeout_s))

    # Routes

    def _give_to_hub(self, letter: bytes) -> bool:
        own = self._peers.get(self._hub) if self._rank != self._hub else None
        if own is None:
            return False
        own.send(letter)
        self._note_unsent(own)
        return True

    def _route(self, kind: int, to: Iterable[int], channel: str, data: bytes) -> None:
        """Carry a message further: to this rank, to ranks of this host, or to other hosts' hubs, once each."""
        by_queue: dict[int, list[int]] = {}
        peers: list[_Peer] = []
        is_mine = False
        for rank in to:
            if rank == self._rank:
                is_mine = True
            elif self._rank == self._hub and (peer := self._peers.get(rank)) is not None:
                peers.append(peer)
            else:
                hub = self._hub_of[rank]
                is_carried = hub not in self.gone and hub != self._rank
                by_queue.setdefault(hub if is_carried else rank, []).append(rank)
        for queue, ranks in by_queue.items():
            letter = _Letter.encode(kind, ranks, channel, data)
            if threading.get_ident() == self._carrier:
                self._carried.setdefault(queue, []).append(letter)
            else:
                self.client.push(_queue(queue), letter)
        message: bytes | None = data
        if kind == _VALUE and (peers or is_mine):
            key, _, head = data.partition(b"\0")
            value = self.client.peek(key.decode())
            message = None if value is None else head + value
        if message is None:  # these ranks are late, and look for the truth themselves
            return
        for peer in peers:
            peer.send(_Letter.encode(_MESSAGE, [peer.rank], channel, message))
            self._note_unsent(peer)
        if is_mine:  # last: this rank may leave when it has it
            self._of(channel).put(message)

    def _take(self, letter: bytes, peer: _Peer | None = None) -> None:
        """Take a letter from a socket or from the queue."""
        kind, ranks, channel, data = _Letter.decode(letter)
        if kind in (_MESSAGE, _VALUE):
            self._route(kind, ranks, channel, data)
        elif kind == _SEVERAL:
            for part in _Letter.split(bytearray(data)):
                self._take(part)
        elif kind == _GONE:
            self._hear_of(ranks)
        elif peer is not None and kind == _HELLO:
            peer.rank = ranks[0]
            self._peers[peer.rank] = peer
        elif peer is not None and kind == _BYE:
            peer.said_bye = True

    def _hear_of(self, ranks: Iterable[int]) -> None:
        """Note that ranks have ended; a hub passes it on to its host."""
        if news := set(ranks) - self.gone:
            self.gone |= news
            if self._rank == self._hub:
                for peer in [*self._peers.values()]:
                    peer.send(_Letter.encode(_GONE, news))
            with self._lock:
                for channel in self._channels.values():
                    channel.put(LOOK)

    def _tell_of(self, rank: int) -> None:
        """Tell all hosts that a rank has ended, as this one has seen."""
        self._hear_of([rank])
        letter = _Letter.encode(_GONE, [rank])
        for hub in {*self._hub_of} - self.gone - {self._rank}:
            self.client.push(_queue(hub), letter)

    def _of(self, channel: str) -> SimpleQueue[bytes | None]:
        with self._lock:
            return self._channels.setdefault(channel, SimpleQueue())

    # Threads

    def _run(self, read: Callable[[], None], name: str) -> None:
        def until_the_store_is_gone() -> None:
            try:
                read()
            except StoreGoneError as error:
                self.fail(error)

        thread = threading.Thread(target=until_the_store_is_gone, name=f"{name} of rank {self._rank}", daemon=True)
        start(thread)
        self._threads.append(thread)

    def _read_queue(self) -> None:
        queue = _queue(self._rank)
        while not self._is_closing:
            since_s = time.monotonic()
            letters = [self._reader.pop(queue)]
            self._is_taking["queue"] = True
            if time.monotonic() - since_s < _AT_ONCE_S:  # many ranks write to this one
                letters += self._reader.pop_waiting(queue)
            for letter in letters:
                if letter is not None:
                    self._take(letter)
            self._is_taking["queue"] = False
        del self._reader  # and with it the connection

    def _read_sockets(self) -> None:
        """Serve the connections within the host, until this rank leaves."""
        with self._sockets:
            self._carrier = threading.get_ident()
            while not self._is_closing:
                ready = self._selector.select()
                self._is_taking["sockets"] = True
                for key, events in ready:
                    if key.fileobj is self._woken:
                        self._woken.recv(4096)
                    elif not isinstance(key.data, _Peer):
                        self._accept()
                    elif key.fileobj is key.data.connection:
                        self._serve(key.data, events)
                    else:
                        self._end(key.data)
                self._carry()
                self._is_taking["sockets"] = False
                for peer in [*self._peers.values()]:
                    wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.has_unsent else 0)
                    with suppress(KeyError):
                        self._selector.modify(peer.connection, wanted, peer)

    def _carry(self) -> None:
        carried, self._carried = self._carried, {}
        for queue, letters in carried.items():
            self.client.push(_queue(queue), _Letter.join(letters))

    def _serve(self, peer: _Peer, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            peer.send()
        if not events & selectors.EVENT_READ:
            return
        try:
            letters = peer.receive()
            for letter in letters or ():
                self._take(letter, peer)
        except ValueError:  # no rank writes so
            letters = None
        if letters is None:
            self._end(peer)

    def _end(self, peer: _Peer) -> None:
        """Note that a process has ended, or has closed its connection."""
        for key in [key for key in self._selector.get_map().values() if key.data is peer]:
            self._selector.unregister(key.fileobj)
        with suppress(ValueError):
            while letters := peer.receive():  # what it said last
                for letter in letters:
                    self._take(letter, peer)
        peer.connection.close()
        self._peers.pop(peer.rank, None)
        if not peer.said_bye and peer.rank >= 0 and not self._is_closing:
            self._carry()  # its last verdict comes first
            self._tell_of(peer.rank)

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._listener.accept()
            self._add(connection)

    def _add(self, connection: socket.socket) -> _Peer | None:
        """Serve a connection, if a process of this user is at its other end.

        The end of the process is watched, too: those that it has forked, such as loaders of data, keep its connections open.
        """
        self._sockets.enter_context(connection)
        pid, uid = peer_of(connection)
        if uid != os.getuid():
            connection.close()
            return None
        peer = _Peer(connection)
        self._selector.register(connection, selectors.EVENT_READ, peer)
        with suppress(OSError):  # of another pid namespace, whose pids are 0 here; or it has just ended
            if pid > 0:
                process = os.pidfd_open(pid)
                self._sockets.callback(os.close, process)
                self._selector.register(process, selectors.EVENT_READ, peer)
        return peer

    def _open_sockets(self) -> bool:
        """Listen, or connect to the hub of this host; return whether this rank has a hub, and needs no queue."""
        self._selector = self._sockets.enter_context(selectors.DefaultSelector())
        wake, self._woken = (self._sockets.enter_context(end) for end in socket.socketpair())
        wake.setblocking(False)
        self._wake = wake
        self._selector.register(self._woken, selectors.EVENT_READ)
        if self._rank != self._hub:
            return self._connect()
        self._listener = self._sockets.enter_context(socket.socket(socket.AF_UNIX))
        self._listener.bind(self._where)
        self._listener.listen(len(self._hub_of))
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        return False

    def _connect(self) -> bool:
        """Connect to the hub of this host, once it listens; False: it cannot be reached."""
        ends_s = time.monotonic() + min(_CONNECT_S, self._timeout_s / 4)
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(self._where)
                break
            except OSError:
                connection.close()
                if time.monotonic() > ends_s:
                    return False
                time.sleep(0.002)
        peer = self._add(connection)
        if peer is None:
            return False
        peer.rank = self._hub
        peer.send(_Letter.encode(_HELLO, [self._rank]))
        self._peers[self._hub] = peer
        return True

    def _note_unsent(self, peer: _Peer) -> None:
        """Have the thread that serves the sockets send the rest."""
        if peer.has_unsent:
            self._poke()

    def _poke(self) -> None:
        with suppress(OSError):
            if self._wake is not None:
                self._wake.send(b"!")


def _queue(rank: int) -> str:
    return f"inbox/{rank}"
