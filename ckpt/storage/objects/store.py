"""The requests to one bucket: whole objects and ranges, conditional puts, lists. By obstore, which this file alone imports.

Every request is tried again after a failure that may pass, for `RETRY_S`. What remains is an `OSError` with the object's address: one
line, without the URL of the request, its query or an answer's body.
"""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from configparser import ConfigParser
from configparser import Error as ConfigParserError
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ckpt.errors import ConfigurationError, importing
from ckpt.format.places import ObjectPath, Place

RETRY_S = 60.0
"""Seconds in which a failed request is tried again. `retry_for` sets others."""

CONNECT_S = 10
READ_S = 60
"""Seconds without a byte after which an answer counts as lost."""

REQUEST_S = 3600
"""A whole request may take this: 64 MiB at 2 MB/s take 32 s, and how long they may take depends on the network."""

_SLOWEST_NAMED_AFTER_S = 2.0
"""Shorter saves and loads do not name the rank that took longest."""
_LONGEST_S = 1e6
_AGAIN_S = 0.1
_STATUS = re.compile(r"\b([45]\d\d) ([A-Z][A-Za-z ]+)")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_EXPIRED = re.compile(r"ExpiredToken|TokenRefreshRequired|token.{0,20}expired", re.IGNORECASE)


class Tag(NamedTuple):
    """The version of an object that a conditional put expects."""

    e_tag: str | None
    version: str | None


class Found(NamedTuple):
    """An object of a list: its key, and its size in bytes."""

    key: str
    size: int


Counts = dict[str, list[int]]
"""Kind of request, such as "put" -> the number of them, and the bytes of objects that they carried."""


class Store:
    """One bucket. Any thread may call it; a call returns when the store has answered. Keys are those of `ObjectPath`."""

    def __init__(self, scheme: str, bucket: str) -> None:
        with importing(f"{scheme}:// addresses"):
            import obstore
        self._obstore: Any = obstore
        self._name = f"{scheme}://{bucket}"
        self._endpoint = _host_of(os.environ.get("AWS_ENDPOINT_URL", "")) if scheme == "s3" else ""
        self._keeps_memory = scheme == "memory"  # its objects are the memory that it is given
        self._store = _client(scheme, bucket)
        self._counts: Counts = {}
        self._counting = threading.Lock()

    def counts(self) -> Counts:
        """Return what this process has asked of the bucket so far."""
        with self._counting:
            return {operation: list(row) for operation, row in self._counts.items()}

    def get(self, key: str) -> tuple[memoryview, Tag]:
        """Return an object's bytes and its version.

        Raises:
            FileNotFoundError: there is none.
        """

        def ask() -> tuple[memoryview, Tag]:
            found = self._obstore.get(self._store, key)
            return memoryview(found.bytes()), _tag_of(found.meta)

        data, tag = self._again("get", key, ask)
        self._count("get", len(data))
        return data, tag

    def get_range(self, key: str, start: int, stop: int) -> memoryview:
        """Return the bytes [start, stop) of an object, fewer where it ends before.

        Raises:
            FileNotFoundError: there is none.
        """
        if stop <= start:
            return memoryview(b"")

        def ask() -> memoryview:
            try:
                return memoryview(self._obstore.get_range(self._store, key, start=start, end=stop))
            except self._obstore.exceptions.GenericError as error:
                if not _is_past_end(error):
                    raise
                return memoryview(b"")

        data: memoryview = self._again("get", key, ask)
        self._count("get", len(data))
        return data

    def get_into(self, key: str, start: int, stop: int, buffers: Sequence[memoryview]) -> int:
        """Fill buffers in turn with the bytes [start, stop) of an object; return their number. See `get_range`."""
        return fill(buffers, self.get_range(key, start, stop))

    def head(self, key: str) -> tuple[int, Tag]:
        """Return an object's size and version.

        Raises:
            FileNotFoundError: there is none.
        """
        found = self._again("head", key, lambda: self._obstore.head(self._store, key))
        return int(found["size"]), _tag_of(found)

    def put(self, key: str, data: memoryview | bytes) -> Tag:
        """Store an object whole. The memory may be used again when this returns."""
        if self._keeps_memory:
            data = bytes(data)
        # In parts obstore would still send the memory when this has returned.
        done = self._again("put", key, lambda: self._obstore.put(self._store, key, data, use_multipart=False))
        self._count("put", len(data))
        return Tag(done["e_tag"], done["version"])

    def create(self, key: str, data: bytes) -> Tag | None:
        """Store an object that must not exist; return its version, or None: there is one, with other bytes.

        `data` differs from that of every other writer. An answer can get lost: its repetition is refused then, although the first had won,
        and so the bytes decide.
        """
        return self._conditional(key, data, "create")

    def replace(self, key: str, data: bytes, expected: Tag) -> Tag | None:
        """Store an object in place of an expected version; return its version, or None: there is another by now, or none. See `create`."""
        mode = {name: value for name, value in expected._asdict().items() if value is not None}
        return self._conditional(key, data, mode)

    def copy(self, source: str, key: str) -> None:
        """Copy an object within the bucket, by the store itself.

        Raises:
            FileNotFoundError: there is no such object.
        """
        self._again("copy", source, lambda: self._obstore.copy(self._store, source, key))

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects. One that is not there is none too many."""
        keys = list(keys)
        for at in range(0, len(keys), 1000):
            try:
                self._delete(keys[at : at + 1000])
            except FileNotFoundError:  # of a store that deletes them one by one, and may have stopped at this one
                for key in keys[at : at + 1000]:
                    with suppress(FileNotFoundError):
                        self._delete([key])

    def _delete(self, keys: list[str]) -> None:
        self._again("delete", keys[0], lambda: self._obstore.delete(self._store, keys))

    def below(self, key: str) -> Iterator[Found]:
        """Yield the objects below a key, at any depth.

        Raises:
            OSError: there is no such bucket.
        """
        start = f"{key}/" if key else None
        for page in self._again("list", key, lambda: list(self._obstore.list(self._store, start))):
            yield from (Found(row["path"], row["size"]) for row in page)

    def names(self, key: str) -> tuple[list[str], dict[str, float]]:
        """Return what is just below a key: names that have objects below them; and names of objects, with the time of each.

        Times are when an object was put, by the store's clock, in seconds.

        Raises:
            OSError: there is no such bucket.
        """
        start = f"{key}/" if key else ""
        found = self._again("list", key, lambda: self._obstore.list_with_delimiter(self._store, start or None))
        folders = [folder.removeprefix(start).strip("/") for folder in found["common_prefixes"]]
        return folders, {listed["path"].removeprefix(start): listed["last_modified"].timestamp() for listed in found["objects"]}

    def _conditional(self, key: str, data: bytes, mode: Any) -> Tag | None:
        errors = self._obstore.exceptions
        try:
            done = self._again("put", key, lambda: self._obstore.put(self._store, key, data, mode=mode))
            self._count("put", len(data))
            return Tag(done["e_tag"], done["version"])
        except (errors.AlreadyExistsError, errors.PreconditionError, FileNotFoundError):
            try:
                found, tag = self.get(key)
            except FileNotFoundError:
                return None
            return tag if bytes(found) == data else None

    def _again(self, operation: str, key: str, ask: Callable[[], Any]) -> Any:
        """Ask, and ask again where the client itself does not: after an answer that ends too early, and after a lost conditional put.

        Whoever asked with a condition finds it broken, perhaps by the first try: see `create`.
        """
        until = time.monotonic() + RETRY_S
        while True:
            try:
                with self._telling(operation, key):
                    return ask()
            except OSError as error:
                if error.errno != errno.EIO or time.monotonic() > until:
                    raise
            time.sleep(_AGAIN_S)

    @contextmanager
    def _telling(self, operation: str, key: str) -> Iterator[None]:
        """Count a request, and turn its errors into an `OSError` of the object."""
        errors = self._obstore.exceptions
        try:
            yield
        except (errors.AlreadyExistsError, errors.PreconditionError):
            raise
        except FileNotFoundError as error:
            if operation == "list" or "NoSuchBucket" in str(error):
                raise OSError(errno.ENXIO, "there is no such bucket", self._name) from None
            raise FileNotFoundError(errno.ENOENT, "there is no such object", f"{self._name}/{key}") from None
        except (errors.BaseError, OSError) as error:
            if "NoSuchBucket" in str(error):
                raise OSError(errno.ENXIO, "there is no such bucket", self._name) from None
            raise _as_os_error(error, errors, f"{self._name}/{key}", self._endpoint) from None
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of the client's own language: no Exception, and with a traceback of its own
                raise
            raise OSError(errno.EINVAL, f"the client failed ({_first_line(error)})", f"{self._name}/{key}") from None
        finally:
            self._count(operation, 0, requests=1)

    def _count(self, operation: str, num_bytes: int, *, requests: int = 0) -> None:
        with self._counting:
            row = self._counts.setdefault(operation, [0, 0])
            row[0] += requests
            row[1] += num_bytes


def fill(buffers: Sequence[memoryview], data: memoryview) -> int:
    """Fill buffers in turn with bytes; return their number. They have room for these."""
    at = 0
    for buffer in buffers:
        piece = data[at : at + len(buffer)]
        buffer[: len(piece)] = piece
        at += len(piece)
        if at == len(data):
            break
    return at


def store_of(place: ObjectPath) -> Store:
    """Return the store of an address. One client serves a process: its connections are kept.

    Raises:
        ConfigurationError: this process was forked from one that has a client, whose threads it does not have.
    """
    if (given := _GIVEN.get((place.scheme, place.bucket))) is not None:
        return given
    if _FORKED:
        raise ConfigurationError(
            f"{place.scheme}://{place.bucket} cannot be used here: this process was forked from one that has used an object store, and "
            "lacks the threads of its client; start it by spawn or forkserver, or use no object store before the fork"
        )
    if not _USED:
        _USED.append(os.getpid())
    return _store_in(place.scheme, place.bucket)


_GIVEN: dict[tuple[str, str], Store] = {}


@contextmanager
def given_store(place: ObjectPath, store: Store) -> Iterator[None]:
    """Inside the block the addresses of a bucket lead to this store, in this process."""
    _GIVEN[place.scheme, place.bucket] = store
    try:
        yield
    finally:
        del _GIVEN[place.scheme, place.bucket]


class CountedRequests:
    """Counts what this process asks of the store of a place from now on, heartbeats and saves beside it included; of a folder nothing."""

    def __init__(self, place: Place) -> None:
        self._store = None if isinstance(place, Path) else store_of(place)
        self._before = self._store.counts() if self._store is not None else {}

    def made(self) -> Counts:
        """Return the requests since this object was made."""
        now = self._store.counts() if self._store is not None else {}
        since = {kind: [a - b for a, b in zip(row, self._before.get(kind, [0, 0]), strict=True)] for kind, row in now.items()}
        return {kind: row for kind, row in since.items() if any(row)}


def all_of(counts: Iterable[Counts]) -> Counts:
    """Add up the requests of several ranks, or of several parts of a save."""
    total: Counts = {}
    for count in counts:
        for operation, row in count.items():
            total[operation] = [a + b for a, b in zip(total.get(operation, [0, 0]), row, strict=True)]
    return {operation: total[operation] for operation in sorted(total)}


def transfer_figures(
    num_bytes: int, seconds: float, requests: Mapping[str, Sequence[int]], slowest_rank: int | None
) -> str:
    """The figures of a save or a load, as all lines about one have them.

    Example:
        >>> transfer_figures(5_000_000_000, 2.5, {"put": (12, 5_000_000_000)}, 3)
        '2.500 s, 5000.0 MB, 2.00 GB/s, 12 put, rank 3 slowest'
    """
    rate = num_bytes / seconds / 1e9 if seconds > 0 else 0.0
    counts = "".join(f", {number:,} {kind}" for kind, (number, _) in requests.items())
    slowest = f", rank {slowest_rank} slowest" if slowest_rank is not None and seconds > _SLOWEST_NAMED_AFTER_S else ""
    return f"{seconds:.3f} s, {num_bytes / 1e6:.1f} MB, {rate:.2f} GB/s{counts}{slowest}"


def retry_for(seconds: float) -> None:
    """Set for how long this process tries failed requests again. Clients in use keep the time that they were made with."""
    global RETRY_S
    if seconds != RETRY_S:
        RETRY_S = seconds
        forget_clients()


def forget_clients() -> None:
    """Make new clients from now on, for the environment may have changed. A client in use stays until it is let go."""
    _store_in.cache_clear()


@cache
def _store_in(scheme: str, bucket: str) -> Store:
    return Store(scheme, bucket)


def _in_child() -> None:
    _FORKED.extend(_USED[:1])


os.register_at_fork(after_in_child=_in_child)


def _client(scheme: str, bucket: str) -> Any:
    """Make the client. Endpoint, region and credentials come from the environment and the files that the providers' own tools read."""
    from obstore import store as clients

    if scheme == "memory":
        return _MEMORY.setdefault(bucket, clients.MemoryStore())
    made = {"s3": clients.S3Store, "gs": clients.GCSStore, "az": clients.AzureStore}[scheme]
    options: dict[str, Any] = _profile(f"s3://{bucket}") if scheme == "s3" else {}
    endpoint = os.environ.get("AWS_ENDPOINT_URL") or options.get("endpoint") or "https://"
    if scheme == "s3" and os.environ.get("AWS_ENDPOINT_URL") == "":
        raise ConfigurationError("AWS_ENDPOINT_URL is empty: unset it, or give the URL of a server")
    if scheme == "s3" and not endpoint.startswith(("http://", "https://")):
        raise ConfigurationError(
            f"the endpoint of s3://{bucket} is {endpoint.rpartition('@')[2]}: expected a URL, such as http://{endpoint.rpartition('@')[2]}"
        )
    if scheme == "s3" and not endpoint.startswith("http:"):
        options["unsigned_payload"] = True  # TLS protects the bytes: to hash them again takes 0.7 s a GB
    try:
        return made(
            bucket,
            client_options={
                "allow_http": True,  # for an endpoint that the environment names so; the providers' own are https
                "connect_timeout": timedelta(seconds=CONNECT_S),
                "read_timeout": timedelta(seconds=READ_S),
                "timeout": timedelta(seconds=REQUEST_S),
            },
            retry_config={"max_retries": 1000, "retry_timeout": timedelta(seconds=min(RETRY_S, _LONGEST_S))},
            **options,
        )
    except Exception as error:  # obstore names no class for them
        raise ConfigurationError(
            f"the client of {scheme}://{bucket} cannot be made: {_first_line(error)}. Its settings come from the environment"
        ) from None


def _profile(what: str) -> dict[str, str]:
    """Read what the environment lacks from the files of AWS's own tools: the keys of a profile, its region and endpoint.

    Raises:
        ConfigurationError: `AWS_PROFILE` names a profile that has no keys, as one of single sign-on or of a role has none.
    """
    name = os.environ.get("AWS_PROFILE", "default")
    has_keys = any(name.startswith(_OTHER_KEYS) for name in os.environ)
    settings: dict[str, str] = {}
    for variable, file, section in (
        ("AWS_CONFIG_FILE", "~/.aws/config", "default" if name == "default" else f"profile {name}"),
        ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials", name),
    ):
        path = os.path.expanduser(os.environ.get(variable, file))
        parser = ConfigParser(interpolation=None, default_section="")
        try:
            parser.read(path)
        except (ConfigParserError, UnicodeDecodeError):
            if has_keys:
                continue
            raise ConfigurationError(f"{path} cannot be read: it is no file of profiles") from None
        if parser.has_section(section):
            settings |= parser[section]
    found = {ours: settings[theirs] for theirs, ours in _IN_PROFILES.items() if theirs in settings}
    for option, variables in _SET_BY.items():
        if any(os.environ.get(name) for name in variables):
            found.pop(option, None)
    if has_keys:
        return {option: value for option, value in found.items() if option in _SET_BY}
    if "AWS_PROFILE" in os.environ and not {"access_key_id", "secret_access_key"} <= found.keys():
        raise ConfigurationError(
            f"{what}: the profile {name} of AWS_PROFILE has no keys in ~/.aws; where it is one of single sign-on or of a role, put its "
            'keys into the environment: eval "$(aws configure export-credentials --format env)"'
        )
    return found


_IN_PROFILES = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
    "region": "region",
    "endpoint_url": "endpoint",
}
"""Names in the files of AWS's tools -> options of the client."""

_SET_BY = {"region": ("AWS_REGION", "AWS_DEFAULT_REGION"), "endpoint": ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT")}
"""Options that are no secret -> variables that come before a profile's."""

_OTHER_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_", "AWS_SKIP_SIGNATURE")
"""Variables whose keys come before a profile's."""

_USED: list[int] = []
"""Registry: this process, if it has used a store."""

_FORKED: list[int] = []
"""Registry: the process that this one was forked from, if that had used a store."""

_MEMORY: dict[str, Any] = {}
"""Registry: the stores in this process's memory, by bucket."""


def _tag_of(meta: Any) -> Tag:
    return Tag(meta.get("e_tag"), meta.get("version"))


def _is_past_end(error: Exception) -> bool:
    """Whether a range begins where the object has ended. The name of the object, which the error has too, does not count."""
    status = _STATUS.search(str(error))
    return status[1] == "416" if status else "range" in _first_line(error).lower()


def _as_os_error(error: Exception, errors: Any, address: str, endpoint: str) -> OSError:
    text = str(error)
    status, code = _STATUS.search(text), _CODE.search(text)
    reason = f"{status[1]} {code[1] if code else status[2].strip()}" if status else _first_line(error)
    if _EXPIRED.search(text):
        return PermissionError(errno.EACCES, "the credentials have expired", address)
    if isinstance(error, errors.PermissionDeniedError | errors.UnauthenticatedError) or (status and status[1] in ("401", "403")):
        return PermissionError(errno.EACCES, f"the store denies access ({reason})", address)
    if status is None:
        return OSError(errno.EIO, f"the store does not answer ({reason}{endpoint})", address)
    return OSError(errno.EIO, f"the store refuses ({reason})", address)


def _host_of(url: str) -> str:
    """Where an own server is said to be, for a sentence: without what may be a secret."""
    with suppress(ValueError):
        return f", at {host}" if (host := urlsplit(url).netloc.rpartition("@")[2]) else ""
    return ""


def _first_line(error: BaseException) -> str:
    """The reason in an error of obstore, without the address of the request and without what comes after it."""
    line = str(error).partition("\n")[0]
    reason = line.rpartition(" - ")[2] if " - " in line else line
    return re.sub(r"https?://\S+", "...", reason)[:200].rstrip(". ")
