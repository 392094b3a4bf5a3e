"""The whole error family in one file.

Every class is a `CheckpointError`, so one `except` catches what a checkpoint can do to a run, and most are also the
built-in they resemble. `Topology.phase` carries an error from the rank that met it to all others: `describe` turns it into
plain JSON, `rebuild` makes the same class with the same sentence on every rank.

A message may name arguments of the library as data: the library says `strict=False`, and a command `load.strict=false`.

    raise MissingStateError("no ema is saved: ", leave_out("ema"), ", or load with ", Argument("load.strict", False))

An error keeps them beside its text (`CheckpointError.arguments`), and `sentence` says each in the words of the face that shows the error.

Names in a checkpoint may hold any character, and reach terminals and logs by messages: every message of an error of this
family, and every record of the package's loggers, is one line of printable characters (`printable`).

Imports can fail: of a package that an installation may lack (`importing`), and of names that another package does not promise to keep.
`tests/unit/test_private_names.py` lists every use of `private_name`, and sees that nothing private is reached in another way.
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
from functools import cache
from importlib import import_module, metadata
from operator import attrgetter
from pathlib import Path
from typing import Any, Self


class Argument(str):
    """The part of a message that names an argument, or advises to give one; as a text, what the library says.

    Attributes:
        name: of the argument, after what it is given to: "load.strict", "saves.mode", "backend". Advice has a name of its own: "leave_out".
        value: that was found, or is advised.

    Example:
        >>> Argument("load.strict", False), Argument("saves.mode", "sync", "saves.mode=sync").name
        ('strict=False', 'saves.mode')
    """

    __slots__ = ("name", "value")
    name: str
    value: Any

    def __new__(cls, name: str, value: Any, text: str | None = None) -> Self:
        self = super().__new__(cls, f"{name.rpartition('.')[2]}={value}" if text is None else text)
        self.name, self.value = name, value
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(self.to_json())

    def to_json(self) -> list[Any]:
        """What `Argument(*...)` makes the same of; a value that is not plain as its text."""
        is_plain = self.value is None or isinstance(self.value, str | int | float | dict)
        return [self.name, self.value if is_plain else str(self.value), str(self)]


def declare(component: str, **settings: Any) -> Argument:
    """The advice to declare a component with other settings.

    Example:
        >>> declare("rng", sharing_pattern="per_group", process_group_name="tp")
        'declare component rng with sharing_pattern=per_group and process_group_name=tp'
    """
    named = " and ".join(f"{name}={value}" for name, value in settings.items())
    return Argument("declare", {component: settings}, f"declare component {component} with {named}")


def leave_out(component: str) -> Argument:
    """The advice to leave a component out of a load.

    Example:
        >>> leave_out("ema")
        'leave component ema out'
    """
    return Argument("leave_out", component, f"leave component {component} out")


LOAD_EARLIER = Argument("load_earlier", None, ". Load an earlier checkpoint.")
"""The advice at the end of a sentence about damage: it is for loads, and commands that load nothing say something else."""


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


def refused(name: str, found: Any, expected: str, text: str | None = None) -> ConfigurationError:
    """The error of an argument that has a wrong value: its name, what was found, and what is expected; see `Argument`."""
    return ConfigurationError(Argument(name, found, text), f": expected {expected}")


def unlike(subject: str, found: object, expected: str, name: str | None = None) -> ConfigurationError:
    """The error of an argument of a wrong type or value, of which not more than a line is shown.

    Args:
        subject: what it is called.
        name: of the `Argument`; None: as `subject`.
    """
    shown = f"a {type(found).__name__}"
    if isinstance(found, type):
        shown = f"the class {found.__name__}"
    elif found is None or isinstance(found, str | int | float):
        shown = repr(found) if len(repr(found)) <= _MOST_SHOWN else f"{found!r:.57}..."
    return ConfigurationError(Argument(name or subject, found, f"{subject} is {shown}"), f"; expected {expected}")


_MOST_SHOWN = 60
_STALE_ADDRESSES = (
    "If torchrun has restarted the ranks, start it with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment: else torch may meet "
    "addresses of the life before"
)
_DENIED = errno.EACCES, errno.EPERM
_FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG


def worded(text: str, arguments: Iterable[Argument], words: Callable[[Argument], str]) -> str:
    """Return a sentence with the arguments that it names in other words. One may begin as another does: the longer is meant."""
    named = {printable(argument): argument for argument in arguments}
    texts = "|".join(map(re.escape, sorted(named, key=len, reverse=True)))
    return re.sub(texts, lambda found: printable(words(named[found[0]])), text) if named else text


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
        attributes = vars(error)
        attributes["room"] = attributes.get("room") or _room(error) or _owner(error)  # kept: what is free changes
        return printable(f"{error.strerror}{where}{attributes['room']}")
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
    """Have `sentence` say how many bytes the block needs for a file or a rank's part, if the disk is full.

    Of nested blocks the outer counts that needs any.

    Args:
        free: bytes that were free before; None: an inner block says it, or those count that are free when the error comes.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            attributes = vars(error)
            if free is not None:
                attributes["free"] = free
            needed = num_bytes()
            if needed or "room" not in attributes:
                more = " and metadata" if needed <= attributes.get("free", -1) else ""
                attributes["room"] = _room(error, *([f"{needed:,} bytes{more} are needed for {what}"] if needed else []))
        raise


def is_full(error: OSError) -> bool:
    """Whether a disk, a quota or the allowed length of files is used up."""
    return error.errno in _FULL


def _room(error: OSError, *needed: str) -> str:
    """The bytes that are needed, and that were or are free at the path of a full disk's error, if it is absolute; "" for other errors."""
    sizes = list(needed)
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if error.errno == errno.EFBIG and most != resource.RLIM_INFINITY:
        sizes.append(f"ulimit -f allows {most:,} bytes for a file")
    elif error.errno in _FULL and isinstance(error.filename, str) and os.path.isabs(error.filename):
        for path in (error.filename, *map(str, Path(error.filename).parents)):
            with suppress(OSError):  # the file was not made, or is gone
                found = os.statvfs(path)
                now = f"{found.f_bavail * found.f_frsize:,} bytes are free"
                sizes.append(f"{vars(error)['free']:,} bytes were free before" if "free" in vars(error) else now)
                sizes += ["no file more can be made"] if found.f_files and not found.f_favail else []
                break
    return f" ({', '.join(sizes)})" if sizes else ""


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
    description = {"kind": kind.__name__, "message": sentence(error), "arguments": arguments}
    return description | {name: getattr(error, name, None) if is_ours or name != "file" else None for name in _CARRIED}


def rebuild(description: dict[str, Any]) -> CheckpointError:
    """Return the error that `describe` was given, as the same class of this family with the same sentence and arguments."""
    kind = _FAMILY.get(description["kind"], CheckpointError)
    arguments = [Argument(*argument) for argument in description["arguments"]]
    return kind(description["message"], arguments=arguments, **{name: description[name] for name in _CARRIED})


@contextmanager
def importing(what: str) -> Iterator[None]:
    """Turn a failed import inside the block into one sentence that names the package and the cause.

    Args:
        what: it is that needs the import, such as "the backend zarr".

    Raises:
        ConfigurationError: an import failed. Packages raise nearly anything when they are imported beside a wrong version of another.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise import_failure(what, error) from error


def import_failure(what: str, error: Exception) -> ConfigurationError:
    """Return what a person should read of a failed import: a package that is not installed, or one whose version does not fit."""
    package = (getattr(error, "name", None) or "").partition(".")[0].replace("ckpt", "ckpt-coordinator")
    if isinstance(error, ModuleNotFoundError) and error.name == package:
        return ConfigurationError(f"{what} needs the package {package}, which is not installed: pip install {package}")
    try:
        installed = f" with {package} {metadata.version(package)}, which is installed" if package else ""
    except metadata.PackageNotFoundError:
        installed = f" with the {package} that is installed"
    cause = str(error) if isinstance(error, ImportError) else sentence(error)
    upgraded = " ".join(dict.fromkeys(("ckpt-coordinator", package or "ckpt-coordinator")))
    return ConfigurationError(
        f"{what} cannot be imported{installed}: {cause}. Install versions that fit: pip install --upgrade {upgraded}"
    )


@cache
def private_name(module: str, name: str, needed_to: str) -> Any:
    """Return what has this name, which may be dotted, in a module. One of its parts begins with an underscore.

    Args:
        needed_to: completes "is needed to".

    Raises:
        ConfigurationError: the installed version has no such name.
    """
    try:
        return attrgetter(name)(import_module(module))
    except (ImportError, AttributeError) as error:
        package = module.partition(".")[0]
        raise ConfigurationError(
            f"{package} {metadata.version(package)} has no {module}.{name}, which is needed to {needed_to}: install another version of "
            f"{package}; docs/testing.md of ckpt-coordinator lists those that were tested"
        ) from error


SIZES = ("buffer_mib", "segment_mib", "packed_mib", "max_in_flight_mib", "pinned_mib", "staging_budget_mib")
"""Sizes of memory that were given one by one."""


def require_no_sizes(given: Iterable[str]) -> None:
    """Refuse the sizes among some names of arguments.

    Raises:
        ConfigurationError
    """
    for name in given:
        if name in SIZES:
            budget = Argument("memory_budget_mib", 512, "memory_budget_mib=512")
            raise ConfigurationError(
                f"{name} is no argument any more: one budget of a rank bounds all host memory beside the state; give the coordinator, or "
                "the Checkpointer, ", budget,
            )  # fmt: skip
