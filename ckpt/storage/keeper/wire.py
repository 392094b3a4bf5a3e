"""What a keeper and those who ask it say to each other: a proof that both are of one job, then requests and answers.

Both sides draw a nonce, and each proves with the nonces that it has the job's secret, by HMAC-SHA256 (RFC 2104). What follows is not
encrypted, like all traffic between the ranks of a job.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
from typing import NamedTuple

NONCE_BYTES = 16
PROOF_BYTES = 32
GREETING = b"ckpt-keeper 1\n"

READ, STAT, WRITE, LIST, LINK = range(1, 6)
"""What is asked for: bytes of a file; its size and version; a new file; the files below a folder; a new name for a file."""

DONE, MISSING, REFUSED = range(3)
"""Answers: as asked; there is no such file; the sentence that follows says why not."""

_REQUEST = struct.Struct("!BHQQ")
_ANSWER = struct.Struct("!BQ")


class Request(NamedTuple):
    """A request. `path` is below the keeper's folder, with `/` between parts.

    Attributes:
        start: the first byte that is asked for, of `READ`.
        num_bytes: those asked for, or those that follow: of a file, for `WRITE`, or of the path of the file, for `LINK`.
    """

    kind: int
    path: str
    start: int = 0
    num_bytes: int = 0


def send_request(link: socket.socket, request: Request) -> None:
    """Send a request; the bytes of a `WRITE` follow it."""
    path = request.path.encode()
    link.sendall(_REQUEST.pack(request.kind, len(path), request.start, request.num_bytes) + path)


def receive_request(link: socket.socket) -> Request | None:
    """Receive a request; None: the other side has left."""
    head = received(link, _REQUEST.size, may_end=True)
    if not head:
        return None
    kind, length, start, count = _REQUEST.unpack(head)
    return Request(kind, received(link, length).decode(), start, count)


def send_answer(link: socket.socket, kind: int, content: bytes | int = b"") -> None:
    """Send an answer with what it says, or with the number of bytes that follow."""
    count, data = (content, b"") if isinstance(content, int) else (len(content), content)
    link.sendall(_ANSWER.pack(kind, count) + data)


def receive_answer(link: socket.socket) -> tuple[int, int]:
    """Receive an answer, and the number of bytes that follow it."""
    kind, count = _ANSWER.unpack(received(link, _ANSWER.size))
    return kind, count


def received(link: socket.socket, num_bytes: int, *, may_end: bool = False) -> bytes:
    """Receive so many bytes.

    Args:
        may_end: return no bytes if the other side leaves before the first.

    Raises:
        ConnectionError: the other side has left.
    """
    data = bytearray(num_bytes)
    got = receive_into(link, memoryview(data), may_end=may_end)
    return bytes(data) if got else b""


def receive_into(link: socket.socket, memory: memoryview, *, may_end: bool = False) -> int:
    """Fill memory. See `received`."""
    at = 0
    while at < len(memory):
        count = link.recv_into(memory[at:], 0, socket.MSG_WAITALL)
        if not count:
            if may_end and not at:
                return 0
            raise ConnectionError("the other side has left")
        at += count
    return at


def limit_silence(link: socket.socket, seconds: float) -> None:
    """Have the kernel limit how long a call waits for the other side: whole pieces come in one call then, for two thirds of the time.

    Such a call raises BlockingIOError.
    """
    link.settimeout(None)
    time = struct.pack("ll", int(seconds), max(1, int(seconds % 1 * 1e6)))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        link.setsockopt(socket.SOL_SOCKET, option, time)


def prove_as_client(link: socket.socket, secret: bytes) -> None:
    """Prove to a keeper that this process is of its job, and require its own proof.

    Raises:
        ConnectionError: it has another secret, or is no keeper.
    """
    if received(link, len(GREETING)) != GREETING:
        raise ConnectionError("what answers there is no keeper of this version")
    theirs, mine = received(link, NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
    link.sendall(mine + _proof(secret, b"client", theirs + mine))
    if not hmac.compare_digest(received(link, PROOF_BYTES), _proof(secret, b"keeper", mine + theirs)):
        raise ConnectionError("the keeper there is of another job")


def prove_as_keeper(link: socket.socket, secret: bytes) -> bool:
    """Greet a client, and return whether it is of this job. A stranger gets a nonce, and nothing else."""
    mine = secrets.token_bytes(NONCE_BYTES)
    link.sendall(GREETING + mine)
    theirs, proof = received(link, NONCE_BYTES), received(link, PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(secret, b"client", mine + theirs)):
        return False
    link.sendall(_proof(secret, b"keeper", theirs + mine))
    return True


def _proof(secret: bytes, who: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, who + nonces, "sha256")
