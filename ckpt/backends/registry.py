"""Which backend reads which store. Filled by one named call; a backend is imported when a chunk needs it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from ckpt.backends.base import Backend
from ckpt.errors import ConfigurationError, CorruptCheckpointError

_STORES: dict[str, Callable[[], Backend]] = {}


def register_store(store: str, make: Callable[[], Backend]) -> None:
    """Say who reads chunks of `store` that are not raw. A later registration replaces an earlier one."""
    _STORES[store] = make


def backend_of_store(store: str) -> Backend:
    """Return a backend able to read `store`, whatever backend the run saves with.

    Raises:
        CorruptCheckpointError: no such store is known.
        ConfigurationError: the store's library is not installed.
    """
    if not _STORES:
        register_default_stores()
    if store not in _STORES:
        raise CorruptCheckpointError(f"the manifest names the store {store!r}; known are {', '.join(sorted(_STORES))}")
    try:
        return _STORES[store]()
    except ImportError as error:
        raise ConfigurationError(
            f"reading chunks of the store {store!r} needs the package {error.name}, which is not installed: "
            f"pip install {error.name}"
        ) from error


def register_default_stores() -> None:
    """Register the backends of this package, each imported only when it is needed."""
    register_store("zarr", lambda: import_module("ckpt.backends.zarr").ZarrBackend())
    register_store("safetensors", lambda: import_module("ckpt.backends.kimi_engine").KimiEngineBackend())
    register_store("ocdbt", lambda: import_module("ckpt.backends.tensorstore").TensorStoreBackend())
