"""An object store on loopback, for tests: S3's requests, and those of Google Cloud Storage; it counts them, and fails as it is told.

    with ObjectServer() as server, server.used():
        ckpt.save(state, "s3://bucket/x")
        server.counts()

It keeps the conditions of puts exactly. A body is received into one buffer and sent from it, so that it takes little time of its own.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple, Self
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

from ckpt.storage.objects import store

_ERRORS = {
    "500": (500, "InternalError"),
    "503": (503, "SlowDown"),
    "429": (429, "TooManyRequests"),
    "403": (403, "AccessDenied"),
    "expired": (400, "ExpiredToken"),
}
_XML = {"Content-Type": "application/xml"}


class Request(NamedTuple):
    """One request, as it came: `operation` such as "put" or "list"; bytes of both bodies; the fault that it met."""

    number: int
    operation: str
    key: str
    bytes_up: int
    bytes_down: int
    fault: str | None


@dataclass(slots=True)
class Stored:
    """One object."""

    data: bytearray
    generation: int
    time: float = field(default_factory=time.time)

    @property
    def tag(self) -> str:
        return f'"{self.generation:032x}"'


class Answer(NamedTuple):
    """Status, headers and body."""

    status: int
    heads: Mapping[str, str] = MappingProxyType({})
    body: memoryview | bytes = b""


class ObjectServer:
    """A context manager; each connection has a thread.

    Attributes:
        fault: called with (number, operation, key) before a request is carried out. It returns None, or what happens to it: a key of
            `_ERRORS`; "drop": nothing is done, and the connection ends; "lost": it is done, and not answered; "half": half of the answer's
            body comes; "flip": one bit of it is another; "late:<seconds>": it waits.
        after: called likewise once it was carried out, before the answer.
        ignores_conditions: puts overwrite, whatever their condition, as some stores do.
        objects: bucket -> key -> object.
    """

    def __init__(self, buckets: tuple[str, ...] = ("bucket",)) -> None:
        self.objects: dict[str, dict[str, Stored]] = {name: {} for name in buckets}
        self.requests: list[Request] = []
        self.fault: Callable[[int, str, str], str | None] = lambda number, operation, key: None
        self.after: Callable[[int, str, str], object] = lambda number, operation, key: None
        self.ignores_conditions = False
        self._lock = threading.Lock()
        self._generations = itertools.count(1)
        self._uploads: dict[str, dict[int, bytearray]] = {}
        self._num_requests = 0
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=512)
        self._connections: set[socket.socket] = set()

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for one in list(self._connections):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listening.getsockname()[1]}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which obstore's clients find this server."""
        account = {"gcs_base_url": self.url, "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "a-secret",
            "AWS_REGION": "us-east-1",
            "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account),
        }

    @contextmanager
    def used(self) -> Iterator[Self]:
        """Have this process, and those that it starts inside the block, use this server."""
        before = {name: os.environ.get(name) for name in self.environment}
        os.environ.update(self.environment)
        store.forget_clients()
        try:
            yield self
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value
            store.forget_clients()

    def counts(self) -> dict[str, tuple[int, int, int]]:
        """Operation -> number of requests, bytes that came, bytes that went."""
        found: dict[str, tuple[int, int, int]] = {}
        for one in self.requests:
            number, up, down = found.get(one.operation, (0, 0, 0))
            found[one.operation] = number + 1, up + one.bytes_up, down + one.bytes_down
        return found

    def forget(self) -> None:
        """Count from 0 on again, and do without faults."""
        self.requests.clear()
        self._num_requests = 0
        self.fault = self.after = lambda number, operation, key: None

    def keys(self, bucket: str = "bucket") -> list[str]:
        return sorted(self.objects[bucket])

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._connections.add(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError, ValueError), connection, connection.makefile("rb", 1 << 16) as stream:
            while self._answer_one(connection, stream):
                pass
        self._connections.discard(connection)

    def _answer_one(self, connection: socket.socket, stream: BinaryIO) -> bool:
        """Answer the next request of a connection; return whether it goes on."""
        if not (line := stream.readline()):
            return False
        method, target, _ = line.decode("latin-1").split(" ", 2)
        heads = {}
        while (line := stream.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode("latin-1").partition(":")
            heads[name.lower()] = value.strip()
        if "100-continue" in heads.get("expect", ""):
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = _body_of(heads, stream)
        if body is None:
            return False  # half a request does nothing
        address = urlsplit(target)
        query = dict(parse_qsl(address.query, keep_blank_values=True))
        operation, bucket, key = _what(method, unquote(address.path), query, heads)
        with self._lock:
            number, self._num_requests = self._num_requests, self._num_requests + 1
        fault = self.fault(number, operation, key)
        if fault is not None and fault.startswith("late:"):
            time.sleep(float(fault[5:]))
        if fault == "drop":
            self.requests.append(Request(number, operation, key, len(body), 0, fault))
            return False
        answer = _error(*_ERRORS[fault]) if fault in _ERRORS else self._do(operation, bucket, key, query, heads, body)
        size = 0 if method == "HEAD" else len(answer.body)
        self.requests.append(Request(number, operation, key, len(body), size, fault))
        self.after(number, operation, key)
        if fault == "lost":
            return False
        data = bytearray(answer.body) if fault == "flip" else answer.body
        if fault == "flip" and data:
            data[len(data) // 2] ^= 1  # type: ignore[index]
        rows = {"Content-Length": str(len(data)), **answer.heads}
        head = f"HTTP/1.1 {answer.status} -\r\n" + "".join(f"{name}: {value}\r\n" for name, value in rows.items()) + "\r\n"
        connection.sendall(head.encode("latin-1"))
        if method != "HEAD":
            connection.sendall(data[: len(data) // 2] if fault == "half" else data)
        return fault != "half"

    def _do(
        self, operation: str, bucket: str, key: str, query: dict[str, str], heads: dict[str, str], body: bytearray
    ) -> Answer:
        objects = self.objects.get(bucket)
        if objects is None:
            return _error(404, "NoSuchBucket")
        match operation:
            case "put":
                return self._put(objects, key, body, heads)
            case "copy":
                source = unquote(heads.get("x-amz-copy-source") or heads["x-goog-copy-source"]).lstrip("/")
                from_bucket, _, from_key = source.partition("/")
                found = self.objects.get(from_bucket, {}).get(from_key)
                return _error(404, "NoSuchKey") if found is None else self._put(objects, key, found.data, heads, "CopyObjectResult")
            case "get" | "head":
                return _got(objects.get(key), heads)
            case "delete":
                there = objects.pop(key, None)
                return Answer(204) if there or "x-amz-date" in heads else _error(404, "NoSuchKey")
            case "delete many":
                keys = [unescape(one) for one in re.findall(r"<Key>(.*?)</Key>", body.decode())]
                for one in keys:
                    objects.pop(one, None)
                rows = "".join(f"<Deleted><Key>{escape(one)}</Key></Deleted>" for one in keys)
                return Answer(200, _XML, f"<DeleteResult>{rows}</DeleteResult>".encode())
            case "list":
                return _listed(objects, query)
            case "list json":
                return _listed_as_json(objects, query)
            case "begin upload":
                name = f"upload-{next(self._generations)}"
                self._uploads[name] = {}
                text = f"<InitiateMultipartUploadResult><UploadId>{name}</UploadId></InitiateMultipartUploadResult>"
                return Answer(200, _XML, text.encode())
            case "upload part":
                self._uploads[query["uploadId"]][int(query["partNumber"])] = body
                return Answer(200, {"ETag": f'"{query["partNumber"]}"'})
            case "end upload":
                parts = self._uploads.pop(query["uploadId"])
                whole = bytearray().join(parts[number] for number in sorted(parts))
                return self._put(objects, key, whole, heads, "CompleteMultipartUploadResult")
        return _error(501, "NotImplemented")

    def _put(
        self, objects: dict[str, Stored], key: str, body: bytearray, heads: dict[str, str], result: str = ""
    ) -> Answer:
        with self._lock:
            there = objects.get(key)
            wanted, generation = heads.get("if-match"), heads.get("x-goog-if-generation-match")
            fits = (
                not (heads.get("if-none-match") == "*" and there is not None)
                and (wanted is None or (there is not None and there.tag == wanted))
                and (generation is None or int(generation) == (there.generation if there is not None else 0))
            )
            if not fits and not self.ignores_conditions:
                return _error(412, "PreconditionFailed")
            one = objects[key] = Stored(body, next(self._generations))
        text = f"<{result}><ETag>{one.tag}</ETag><LastModified>{_iso(one.time)}</LastModified></{result}>" if result else ""
        return Answer(200, {"ETag": one.tag, "x-goog-generation": str(one.generation), **_XML}, text.encode())


def _body_of(heads: dict[str, str], stream: BinaryIO) -> bytearray | None:
    """Receive a body; None: the connection ended before."""
    body = bytearray(int(heads.get("content-length", 0)))
    view, at = memoryview(body), 0
    while at < len(body):
        count = stream.readinto(view[at:])  # type: ignore[attr-defined]
        if not count:
            return None
        at += count
    if heads.get("transfer-encoding") == "chunked":
        while size := int(stream.readline().split(b";")[0], 16):
            body += stream.read(size)
            stream.readline()
        stream.readline()
    return body


def _what(method: str, path: str, query: dict[str, str], heads: dict[str, str]) -> tuple[str, str, str]:
    """Return operation, bucket and key of a request."""
    json_list = re.fullmatch(r"/storage/v1/b/([^/]+)/o", path)
    if json_list is not None:
        return "list json", json_list[1], query.get("prefix", "")
    bucket, _, key = path.lstrip("/").partition("/")
    match method:
        case "PUT":
            is_copy = "x-amz-copy-source" in heads or "x-goog-copy-source" in heads
            operation = "upload part" if "uploadId" in query else "copy" if is_copy else "put"
        case "GET":
            operation = "get" if key else "list"
        case "POST":
            operation = "delete many" if "delete" in query else "begin upload" if "uploads" in query else "end upload"
        case "HEAD" | "DELETE":
            operation = method.lower()
        case _:
            operation = "other"
    return operation, bucket, key or query.get("prefix", "")


def _got(one: Stored | None, heads: dict[str, str]) -> Answer:
    if one is None:
        return _error(404, "NoSuchKey")
    if heads.get("if-match", one.tag) != one.tag:
        return _error(412, "PreconditionFailed")
    when = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(one.time))
    said = {"ETag": one.tag, "Last-Modified": when, "x-goog-generation": str(one.generation), "Accept-Ranges": "bytes"}
    said["Content-Type"] = "application/octet-stream"
    size = len(one.data)
    wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", heads.get("range", ""))
    if wanted is None:
        return Answer(200, said | {"Content-Length": str(size)}, memoryview(one.data))
    first = int(wanted[1]) if wanted[1] else max(size - int(wanted[2]), 0)
    stop = min(int(wanted[2]) + 1, size) if wanted[1] and wanted[2] else size
    if first >= size:
        return _error(416, "InvalidRange")
    said |= {"Content-Range": f"bytes {first}-{stop - 1}/{size}", "Content-Length": str(stop - first)}
    return Answer(206, said, memoryview(one.data)[first:stop])


def _page(objects: dict[str, Stored], query: dict[str, str], after: str) -> tuple[list[tuple[str, Stored]], list[str], str]:
    """Return one page of a list: objects, common prefixes, and the last key of it if there are more, else ""."""
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
    rows: list[tuple[str, Stored]] = []
    folders: list[str] = []
    last = ""
    for key, one in sorted(objects.copy().items()):
        if not key.startswith(prefix) or key <= after or (folders and key.startswith(folders[-1])):
            continue
        if len(rows) + len(folders) == int(query.get("max-keys", 1000)):
            return rows, folders, last
        rest = key[len(prefix) :]
        if delimiter and delimiter in rest:
            folders.append(prefix + rest[: rest.index(delimiter) + 1])
            last = folders[-1] + "\U0010ffff"
        else:
            rows.append((key, one))
            last = key
    return rows, folders, ""


def _listed(objects: dict[str, Stored], query: dict[str, str]) -> Answer:
    rows, folders, more = _page(objects, query, query.get("continuation-token") or query.get("start-after") or "")
    text = "".join(
        f"<Contents><Key>{escape(key)}</Key><LastModified>{_iso(one.time)}</LastModified><ETag>{one.tag}</ETag>"
        f"<Size>{len(one.data)}</Size></Contents>"
        for key, one in rows
    )
    text += "".join(f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in folders)
    text += f"<NextContinuationToken>{escape(more)}</NextContinuationToken>" if more else ""
    count = f"<KeyCount>{len(rows) + len(folders)}</KeyCount><IsTruncated>{'true' if more else 'false'}</IsTruncated>"
    return Answer(200, _XML, f"<ListBucketResult><Name>bucket</Name>{count}{text}</ListBucketResult>".encode())


def _listed_as_json(objects: dict[str, Stored], query: dict[str, str]) -> Answer:
    rows, folders, more = _page(objects, query, query.get("pageToken", ""))
    items = [
        {"name": key, "size": str(len(one.data)), "generation": str(one.generation), "etag": one.tag, "updated": _iso(one.time)}
        for key, one in rows
    ]
    said: dict[str, Any] = {"items": items, "prefixes": folders} | ({"nextPageToken": more} if more else {})
    return Answer(200, {"Content-Type": "application/json"}, json.dumps(said).encode())


def _error(status: int, code: str) -> Answer:
    text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>"
    return Answer(status, _XML, text.encode())


def _iso(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds % 1 * 1000):03d}Z"
