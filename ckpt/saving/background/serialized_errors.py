"""Errors as they travel between a process and its trainer: the same class, the same sentence, and how they came about."""

from __future__ import annotations

import pickle
import traceback
from typing import Any

from ckpt.errors import CheckpointError, describe, rebuild, sentence


def serialize_error(error: BaseException, who: str) -> dict[str, Any]:
    """Return what `deserialize_error` makes the same error of. It can be pickled, whatever the error is.

    Args:
        who: the process that met it, for the traceback of an error that nobody foresaw.
    """
    foreseen = isinstance(error, (CheckpointError, OSError))
    return {
        "ours": describe(error) if isinstance(error, CheckpointError) else None,
        "pickled": None if isinstance(error, CheckpointError) else _pickled(error),
        "sentence": sentence(error),
        "trace": None if foreseen else f"in {who}:\n" + "".join(traceback.format_exception(error, chain=False)),
        "cause": None if error.__cause__ is None else serialize_error(error.__cause__, who),
    }


def deserialize_error(message: dict[str, Any]) -> BaseException:
    """Return the error that `serialize_error` was given. One of a class that does not travel becomes a `CheckpointError`."""
    error = _error_of(message)
    if message["cause"] is not None:
        error.__cause__ = deserialize_error(message["cause"])
    if message["trace"] is not None:
        error.add_note(message["trace"])
    return error


def _error_of(message: dict[str, Any]) -> BaseException:
    if message["ours"] is not None:
        return rebuild(message["ours"])
    if message["pickled"] is not None:
        error: BaseException = pickle.loads(message["pickled"])
        return error
    error = CheckpointError(message["sentence"])
    error.__cause__ = RuntimeError(message["sentence"])
    return error


def _pickled(error: BaseException) -> bytes | None:
    """The error's bytes, if what they are made into says the same, and is nothing that would end a program."""
    if not isinstance(error, Exception):
        return None
    try:
        data = pickle.dumps(error)
        copy = pickle.loads(data)
    except Exception:  # whatever a class of somebody's may raise here: its sentence can be told
        return None
    return data if type(copy) is type(error) and sentence(copy) == sentence(error) else None
