"""The command `serve`: the pages of checkpoints, folders and sweeps as one small site, for the user of this machine alone.

The server listens on loopback. Other users of the machine can reach that, and so can the pages of other sites in a browser: every address
begins with a secret, only the server's own name is answered, and only what the folder's listing has is looked up.

    /<secret>/                            the runs and sweeps below the folder; the one run, if the folder is one
    /<secret>/runs/<folder>/              the commits of a run
    /<secret>/runs/<folder>/<checkpoint>/ one checkpoint
    /<secret>/sweeps/<folder>/            a sweep
"""

from __future__ import annotations

import json
import secrets
import sys
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from ckpt.catalog.committed import Committed
from ckpt.cli.arguments import argued, argument, message_of
from ckpt.cli.listing import roots_below
from ckpt.cli.pages.inspect_page import checkpoint_page, folder_page
from ckpt.cli.pages.page import Served, page
from ckpt.cli.pages.sweep_page import sweep_page
from ckpt.cli.reading import committed_in, mark_of
from ckpt.cli.tables import show
from ckpt.errors import CheckpointError, CheckpointNotFoundError, ConfigurationError, CorruptCheckpointError, sentence
from ckpt.format.digests import digest_of
from ckpt.format.places import Place, as_place

LOOPBACK = "127.0.0.1"
SWEEP = "sweep.json"
_MOST_SWEEP_BYTES = 64 << 20


@dataclass
class ServeKeys:
    """The keys of the command."""

    path: str = argued("a folder of runs, of sweeps or of checkpoints, or the address of a run's")
    port: int = argued("on this machine; 0: any that is free", default=0)
    open: bool = argued("open the first page in a browser", default=False)

    def validate(self) -> None:
        """Raise ConfigurationError for a number that is no port."""
        if not 0 <= self.port < 1 << 16:
            raise ConfigurationError(f"{argument('port', self.port)}: expected 0 to 65535")


@dataclass(frozen=True)
class Page:
    """A page of the site.

    Attributes:
        seen: what it shows, as far as it tells whether that has changed.
        made: makes its HTML.
    """

    seen: Sequence[object]
    made: Callable[[Served], str]
    above: Sequence[tuple[str, str]] = ()

    @property
    def tag(self) -> str:
        return digest_of(repr(self.seen).encode("utf-8", "surrogatepass"))[:16]


_Run = tuple[Place, Sequence[Committed[Place]]]
"""A folder of checkpoints, and what it holds, the oldest commit first."""


class Site:
    """The pages of one folder or address. Each request looks at it anew."""

    def __init__(self, root: Place) -> None:
        self.root = root

    def page(self, parts: Sequence[str]) -> Page:
        """Return the page at a path below the secret.

        Raises:
            CheckpointNotFoundError: there is none.
        """
        name, roots, sweeps = "/".join(parts), self._roots(), self._sweeps()
        above = [("all", _up(len(parts)))] if parts else []
        if name in sweeps:
            return self._sweep(sweeps[name], above)
        if name in roots:
            return self._run(*roots[name], above)
        if not parts:
            return self._first(roots, sweeps)
        folder, _, last = name.rpartition("/")
        root, committed = roots.get(folder, (self.root, ()))
        for checkpoint in committed:
            if checkpoint.path.name == last:
                return self._checkpoint(checkpoint, [*above, (root.name, "../")] if folder else above)
        raise CheckpointNotFoundError("there is no such page; what it showed may have been removed")

    def _roots(self) -> Mapping[str, _Run]:
        """Path of the page -> folder of checkpoints, and what it holds. One that is the site's own is its first page."""
        committed = committed_in(self.root)
        if committed or not isinstance(self.root, Path):
            return {"": (self.root, committed)}
        return {f"runs/{root.relative_to(self.root).as_posix()}": (root, found) for root, found in roots_below(self.root).items()}

    def _sweeps(self) -> Mapping[str, Path]:
        if not isinstance(self.root, Path):
            return {}
        found = [file for pattern in (SWEEP, f"*/{SWEEP}", f"*/*/{SWEEP}") for file in self.root.glob(pattern)]
        return {f"sweeps/{file.parent.relative_to(self.root).as_posix()}": file for file in sorted(found)}

    def _first(self, roots: Mapping[str, _Run], sweeps: Mapping[str, Path]) -> Page:
        runs = []
        for name, (_, committed) in roots.items():
            newest = committed[-1]
            row = {"name": name.removeprefix("runs/"), "link": f"{quote(name)}/", "count": len(committed), "newest": newest.path.name}
            runs.append(row | {"committed": newest.timestamp, "time": newest.timestamp.timestamp()})
        tables: list[dict[str, Any]] = []
        for name, file in sweeps.items():
            table: dict[str, Any] = {"name": name.removeprefix("sweeps/"), "link": f"{quote(name)}/", "mark": None}
            try:
                jobs = _jobs(file)
                table |= {"jobs": len(jobs), "failed": sum(job["error"] is not None for job in jobs)}
            except (CheckpointError, OSError) as error:
                table |= {"mark": mark_of(error), "problem": message_of(error)}
            tables.append(table)
        title = self.root.absolute().name if isinstance(self.root, Path) else str(self.root)
        lead = f"The folder {self.root}" if runs or tables else f"{self.root} holds no run yet: the page waits for the first checkpoint."
        return Page([runs, tables], lambda served: page("site.html", title, lead, served, runs=runs, sweeps=tables))

    def _run(self, root: Place, committed: Sequence[Committed[Place]], above: Sequence[tuple[str, str]]) -> Page:
        seen = [(commit.path.name, commit.timestamp) for commit in committed]
        return Page(seen, partial(folder_page, root), above)

    def _checkpoint(self, checkpoint: Committed[Place], above: Sequence[tuple[str, str]]) -> Page:
        return Page([checkpoint], partial(checkpoint_page, checkpoint.path), above)

    def _sweep(self, file: Path, above: Sequence[tuple[str, str]]) -> Page:
        jobs = _jobs(file)

        def made(served: Served) -> str:
            try:
                return sweep_page(jobs, served)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise _no_sweep(file) from error

        return Page(jobs, made, above)


def _up(levels: int) -> str:
    return "../" * levels


def _jobs(file: Path) -> list[dict[str, Any]]:
    with file.open("rb") as opened:
        data = opened.read(_MOST_SWEEP_BYTES + 1)
    try:
        jobs = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _no_sweep(file) from error
    if not (isinstance(jobs, list) and jobs and all(isinstance(job, dict) and "error" in job for job in jobs)):
        raise _no_sweep(file)
    return jobs


def _no_sweep(file: Path) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{file} is not the table of a sweep")


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD, and nothing else."""

    server: SiteServer
    server_version, sys_version = "ckpt", ""
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        names = {f"{name}:{self.server.server_port}" for name in (LOOPBACK, "localhost")}
        _, secret, *parts = unquote(self.path.partition("?")[0], errors="surrogateescape").split("/")
        is_known = secrets.compare_digest(secret.encode("utf-8", "replace"), self.server.secret.encode())
        if self.headers.get("Host") not in names or not is_known:
            self._send(HTTPStatus.NOT_FOUND, "not found: the address is the one that ckpt serve has printed\n", "text/plain", "")
            return
        if not parts or parts[-1]:  # links on a page are relative to its folder
            self.send_response(HTTPStatus.MOVED_PERMANENTLY)
            self.send_header("Location", f"{self.path.partition('?')[0].rpartition('/')[2]}/")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        try:
            found = self.server.site.page(parts[:-1])
            html = "" if self.command == "HEAD" else found.made(Served(found.tag, found.above))
            self._send(HTTPStatus.OK, html, "text/html", found.tag)
        except CheckpointNotFoundError as error:
            self._send(HTTPStatus.NOT_FOUND, self._trouble(error, parts), "text/html", "")
        except (CheckpointError, OSError) as error:
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, self._trouble(error, parts), "text/html", "")

    def _trouble(self, error: BaseException, parts: Sequence[str]) -> str:
        above = [("all", _up(len(parts) - 1))] if len(parts) > 1 else []
        return page("page.html", "This page cannot be shown", sentence(error), Served("", above))

    def _send(self, status: HTTPStatus, text: str, kind: str, tag: str) -> None:
        data = text.encode("utf-8", "replace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Frame-Options", "DENY")
        if tag:
            self.send_header("ETag", f'"{tag}"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of requests."""


class SiteServer(ThreadingHTTPServer):
    """The server of a site, on loopback."""

    daemon_threads = True

    def __init__(self, site: Site, port: int) -> None:
        self.site = site
        self.secret = secrets.token_urlsafe(16)
        super().__init__((LOOPBACK, port), _Handler)

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/{self.secret}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a browser that went away; a bug keeps its traceback."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


def serve(keys: ServeKeys) -> int:
    """Serve the site until the user interrupts it.

    Raises:
        CheckpointNotFoundError: there is no such folder.
        ConfigurationError: the port is in use.
    """
    root = as_place(keys.path, "path")
    if isinstance(root, Path) and not root.is_dir():
        raise CheckpointNotFoundError(f"{root} is no folder; give a folder of runs or of checkpoints")
    try:
        server = SiteServer(Site(root), keys.port)
    except OSError as error:
        given = argument("port", keys.port)
        raise ConfigurationError(f"{given}: {sentence(error)}; give another one, or 0 for any that is free") from error
    with server:
        show(f"{root} is shown at {server.address} until Ctrl-C", "")
        sys.stdout.flush()
        if keys.open:
            webbrowser.open(server.address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0
