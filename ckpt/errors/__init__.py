"""The whole error family on one screen.

Every class is a `CheckpointError`, so one `except` catches what a checkpoint can do to a run, and most are also the
built-in they resemble. `Topology.phase` carries an error from the rank that met it to all others: `describe` turns it into
plain JSON, `rebuild` makes the same class with the same sentence on every rank.

A message may name arguments of the library as data (`arguments`): `sentence` says them in the words of the face that shows the error.

Names in a checkpoint may hold any character, and reach terminals and logs by messages: every message of an error of this
family, and every record of the package's loggers, is one line of printable characters (`printable`).

Files:

    arguments               arguments that a message names
    imports                 imports that fail become one of these errors
    removed                 arguments of former versions
"""

from __future__ import annotations

import errno
import logging
import os
import re
import resource
import stat
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ckpt.errors.arguments import LOAD_EARLIER as LOAD_EARLIER
from ckpt.errors.arguments import Argument as Argument
from ckpt.errors.arguments import declare as declare
from ckpt.errors.arguments import leave_out as leave_out


def printable(text: str) -> str:
    """Return the text on one line, every character visible.

    Escapes control and format characters (escape sequences, direction marks, those of no width), line and paragraph breaks,
    halves of surrogate pairs and spaces that are not U+0020, such as "\\x1b" and "\\u202e". An escaped text stays as it is.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _make_printable(record: logging.LogRecord) -> bool:
    record.msg, record.args = printable(record.getMessage()), None
    return True


def logger_of(name: str) -> logging.Logger:
    """Return a logger whose records are printable. Other files get "ckpt" from `logging`; a logger does not filter its children's."""
    logger = logging.getLogger(name)
    logger.addFilter(_make_printable)
    return logger


logger_of("ckpt")


class CheckpointError(Exception):
    """A save or a load failed, for one reason, on every rank.

    Args:
        message: the sentence, in parts; those that are an `Argument` are kept.
        arguments: more of them, that the sentence has from another error, or may have.

    Attributes:
        arguments: those that the sentence names.
        rank: the rank that met the cause; None if all ranks met it alike or nobody can say.
        phase: the step of the save or load, such as "write"; None outside of one.
        component: the component at hand, if one was.
        file: the damaged file, by its path below the checkpoint, where one is damaged. Other checkpoints may link it.
    """

    def __init__(
        self,
        *message: str,
        arguments: Iterable[Argument] = (),
        rank: int | None = None,
        phase: str | None = None,
        component: str | None = None,
        file: str | None = None,
    ) -> None:
        super().__init__(printable("".join(message)))
        self.arguments = (*(part for part in message if isinstance(part, Argument)), *arguments)
        self.rank = rank
        self.phase = phase
        self.component = component
        self.file = file

    def __str__(self) -> str:  # KeyError and OSError have their own ideas of str(); a sentence stays a sentence
        return str(self.args[0])


class ConfigurationError(CheckpointError, ValueError):
    """The user asked for something that cannot be: a bad value, or two choices that exclude each other."""


class DeviceUnavailableError(CheckpointError, RuntimeError):
    """A device was asked for that this machine, or this installation of torch, does not have."""


class DeviceMemoryError(CheckpointError, RuntimeError):
    """A device has too little memory left for what is to be loaded, or for the smallest buffer on the way there."""


class ShapeMismatchError(CheckpointError, ValueError):
    """Two descriptions of one array differ in shape, data type or number of dimensions."""


class ShardingError(CheckpointError, ValueError):
    """The ranks' shards do not make up one global array: a hole, an overlap, a duplicate key."""


class ReplicationError(CheckpointError, ValueError):
    """Copies that were declared equal are not."""


class StateChangedError(CheckpointError, RuntimeError):
    """What was being saved was written to before its copy was complete."""


class SaveAbandonedError(CheckpointError, RuntimeError):
    """A save in the background was given up, for its process is to end."""


class MissingStateError(CheckpointError, KeyError):
    """A component or a key is only in the checkpoint, or only wanted, and the load is strict; or nothing at all matches."""


class WorldSizeError(CheckpointError, ValueError):
    """The checkpoint was written by other ranks, groups or nodes than these, and a component cannot follow."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no committed checkpoint where one was named."""


class CheckpointGoneError(CheckpointNotFoundError):
    """A checkpoint was removed, or replaced, while it was read. It is not damaged."""


class CheckpointExistsError(CheckpointError, FileExistsError):
    """A fresh run would write over the checkpoints of an earlier one."""


class FolderInUseError(CheckpointError, RuntimeError):
    """Another run uses a folder that only one may use at a time."""


class CorruptCheckpointError(CheckpointError, ValueError):
    """Bytes of a committed checkpoint are missing, truncated or changed."""


class StorageError(CheckpointError, OSError):
    """The file system refused: full, read-only, not shared by the ranks, gone."""


class RankAbsentError(CheckpointError, TimeoutError):
    """A rank did not come: killed, hung, or never called."""


class RankLeftError(RankAbsentError):
    """A rank left in the middle of something that several do together. What it left for is the better thing to tell, if known."""


_FAMILY: dict[str, type[CheckpointError]] = {
    name: kind for name, kind in list(globals().items()) if isinstance(kind, type) and issubclass(kind, CheckpointError)
}


def check_choice(name: str, found: str, choices: Collection[str]) -> str:
    """Return one of the choices, if it is one."""
    if found not in choices:
        raise refused(name, found, f"one of {', '.join(choices)}")
    return found


def refused(name: str, found: Any, expected: str, said: str | None = None) -> ConfigurationError:
    """The error of an argument that has a wrong value: its name, what was found, and what is expected; see `Argument`."""
    return ConfigurationError(Argument(name, found, said), f": expected {expected}")


def unlike(said: str, found: object, expected: str, name: str | None = None) -> ConfigurationError:
    """The error of an argument of a wrong type or value, of which not more than a line is shown.

    Args:
        said: what it is called.
        name: of the `Argument`; None: as `said`.
    """
    shown = f"a {type(found).__name__}"
    if isinstance(found, type):
        shown = f"the class {found.__name__}"
    elif found is None or isinstance(found, str | int | float):
        shown = repr(found) if len(repr(found)) <= _MOST_SHOWN else f"{found!r:.57}..."
    return ConfigurationError(Argument(name or said, found, f"{said} is {shown}"), f"; expected {expected}")


_MOST_SHOWN = 60
_STALE_ADDRESSES = (
    "If torchrun has restarted the ranks, start it with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment: else torch may meet "
    "addresses of the life before"
)
_DENIED = errno.EACCES, errno.EPERM
_FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG


def worded(said: str, arguments: Iterable[Argument], words: Callable[[Argument], str]) -> str:
    """Return a sentence with the arguments that it names in other words. One may begin as another does: the longer is meant."""
    named = {printable(argument): argument for argument in arguments}
    texts = "|".join(map(re.escape, sorted(named, key=len, reverse=True)))
    return re.sub(texts, lambda found: printable(words(named[found[0]])), said) if named else said


def sentence(error: BaseException, words: Callable[[Argument], str] = str) -> str:
    """Return what a person should read of an error, in one line.

    Our own errors are sentences already. An `OSError` reads "No space left on device: 'path'", and of a full disk also how many bytes
    were needed (see `needing`) and are free; without permission, whose the file or folder is. Anything else is given with the name of
    its class, because "0" or "'weight'" alone says nothing.

    Args:
        words: how the reader gives an argument; by default as the library takes it.
    """
    if isinstance(error, CheckpointError):
        return worded(str(error), error.arguments, words)
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename!r}" if error.filename else ""
        said = vars(error)
        said["room"] = said.get("room") or _room(error) or _owner(error)  # kept: what is free changes
        return printable(f"{error.strerror}{where}{said['room']}")
    text = printable(" ".join(str(error).split()))
    if "connectFullMesh failed" in text:  # gloo's: the addresses in its store are those of processes that have ended
        text += f". {_STALE_ADDRESSES}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def is_unread(error: BaseException) -> bool:
    """Whether bytes could not be read, which tells nothing of damage: no permission, a store that does not answer, a newer format."""
    is_missing = isinstance(error, FileNotFoundError | NotADirectoryError)
    return isinstance(error, ConfigurationError) or (isinstance(error, OSError) and not is_missing)


@contextmanager
def telling(what: str, *advice: str) -> Iterator[None]:
    """Turn an `OSError` inside the block into a `StorageError` with this sentence, and this advice if the disk is not just full."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        more = () if is_full(error) or not advice else ("; ", *advice)
        raise StorageError(what, *more, f": {sentence(error)}") from error


def free_bytes(folder: str | Path) -> int | None:
    """Bytes that are free for a folder's files; None: it cannot be asked."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


@contextmanager
def needing(what: object, num_bytes: Callable[[], int], free: int | None = None) -> Iterator[None]:
    """Have `sentence` say how many bytes the block needs for a file or a share, if the disk is full.

    Of nested blocks the outer counts that needs any.

    Args:
        free: bytes that were free before; None: an inner block says it, or those count that are free when the error comes.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            said = vars(error)
            if free is not None:
                said["free"] = free
            needed = num_bytes()
            if needed or "room" not in said:
                more = " and metadata" if needed <= said.get("free", -1) else ""
                said["room"] = _room(error, *([f"{needed:,} bytes{more} are needed for {what}"] if needed else []))
        raise


def is_full(error: OSError) -> bool:
    """Whether a disk, a quota or the allowed length of files is used up."""
    return error.errno in _FULL


def _room(error: OSError, *needed: str) -> str:
    """The bytes that are needed, and that were or are free at the path of a full disk's error, if it is absolute; "" for other errors."""
    said = list(needed)
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if error.errno == errno.EFBIG and most != resource.RLIM_INFINITY:
        said.append(f"ulimit -f allows {most:,} bytes for a file")
    elif error.errno in _FULL and isinstance(error.filename, str) and os.path.isabs(error.filename):
        for path in (error.filename, *map(str, Path(error.filename).parents)):
            with suppress(OSError):  # the file was not made, or is gone
                found = os.statvfs(path)
                now = f"{found.f_bavail * found.f_frsize:,} bytes are free"
                said.append(f"{vars(error)['free']:,} bytes were free before" if "free" in vars(error) else now)
                said += ["no file more can be made"] if found.f_files and not found.f_favail else []
                break
    return f" ({', '.join(said)})" if said else ""


def _owner(error: OSError) -> str:
    """The owner and mode of what one may not open, or of the folder that it is to be made in, if the path is absolute; "" for others."""
    if error.errno in _DENIED and isinstance(error.filename, str) and os.path.isabs(error.filename):
        for path in (error.filename, *map(str, Path(error.filename).parents)):
            with suppress(OSError):  # it is not there, or lies in a folder that one may not enter
                found = os.lstat(path)
                whose = f"user {found.st_uid}, group {found.st_gid}, mode {stat.S_IMODE(found.st_mode):04o}"
                return f" ({path!r} is of {whose}; this is user {os.geteuid()})"
    return ""


_CARRIED = ("rank", "phase", "component", "file")


def describe(error: BaseException) -> dict[str, Any]:
    """Return the JSON that `rebuild` turns back into this error on another rank."""
    is_ours = isinstance(error, CheckpointError)
    kind = type(error) if is_ours else StorageError if isinstance(error, OSError) else CheckpointError
    arguments = [argument.to_json() for argument in error.arguments] if isinstance(error, CheckpointError) else []
    said = {"kind": kind.__name__, "message": sentence(error), "arguments": arguments}
    return said | {name: getattr(error, name, None) if is_ours or name != "file" else None for name in _CARRIED}


def rebuild(description: dict[str, Any]) -> CheckpointError:
    """Return the error that `describe` was given, as the same class of this family with the same sentence and arguments."""
    kind = _FAMILY.get(description["kind"], CheckpointError)
    arguments = [Argument(*said) for said in description["arguments"]]
    return kind(description["message"], arguments=arguments, **{name: description[name] for name in _CARRIED})
