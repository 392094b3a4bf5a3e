"""Serialize errors between trainer and writer process: same class, same sentence, same chain of causes."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise

from ckpt.errors import CheckpointError, ConfigurationError, sentence


def serialize_error(error: BaseException, process: str) -> bytes:
    """Return the bytes from which `deserialize_error` makes the error again, with its causes.

    Args:
        process: the process that raised it, for the traceback that is added to an unexpected error.
    """
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None:
        copy = _copied(cause)
        chain.append(copy)
        if not isinstance(cause, (CheckpointError, OSError)):
            copy.add_note(f"in {process}:\n" + "".join(traceback.format_exception(cause, chain=False)))
        if cause.__cause__ is None and type(copy) is not type(cause):
            chain.append(RuntimeError(str(copy)))  # marks the error as unexpected
        cause = cause.__cause__
    return pickle.dumps(chain)


def deserialize_error(data: bytes) -> BaseException:
    """Return the error of `serialize_error`. An error that pickle cannot copy has become a `CheckpointError`."""
    chain: list[BaseException] = pickle.loads(data)
    for error, cause in pairwise(chain):
        error.__cause__ = cause
    return chain[0]


@contextmanager
def refusing(problem: str, advice: str) -> Iterator[None]:
    """Turn whatever a class of a user raises when it is pickled, or made anew, into a `ConfigurationError`."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise ConfigurationError(f"{problem}: {sentence(error)}. {advice}, or give saves.writer='thread'.") from error


def _copied(error: BaseException) -> BaseException:
    """A copy by pickle if it says the same; SystemExit and the like would end the trainer, and are not copied."""
    says = sentence(error)  # before the copy, which then says as many free bytes
    if isinstance(error, Exception):
        with suppress(Exception):  # a class of a user may raise anything here
            copy: Exception = pickle.loads(pickle.dumps(error))
            if type(copy) is type(error) and sentence(copy) == says:
                return copy
    return CheckpointError(says)
