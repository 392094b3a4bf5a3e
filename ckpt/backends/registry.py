"""The backends by user-facing name, and by the store that they read. A backend's module is imported when it is first made."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ckpt.backends.base import Backend
from ckpt.errors import CorruptCheckpointError, importing, unlike


def _zarr() -> Backend:
    from ckpt.backends.zarr import ZarrBackend

    return ZarrBackend()


def _tensorstore() -> Backend:
    from ckpt.backends.tensorstore import TensorStoreBackend

    return TensorStoreBackend()


def _kimi_engine() -> Backend:
    from ckpt.backends.kimi_engine import KimiEngineBackend

    return KimiEngineBackend()


BACKENDS: Mapping[str, Callable[[], Backend]] = {
    "zarr": _zarr,
    "tensorstore": _tensorstore,
    "kimi-engine": _kimi_engine,
}
"""User-facing name -> maker of the backend with its defaults."""


_STORES: dict[str, Callable[[], Backend]] = {"zarr": _zarr, "ocdbt": _tensorstore, "safetensors": _kimi_engine}
"""Registry: store, as a manifest names it -> maker of the backend that reads it."""


def name_of_store(store: str) -> str:
    """Return the name in `BACKENDS` of the backend that reads a store; of one that somebody registered, the store's own."""
    return next((name for name, make in BACKENDS.items() if make is _STORES.get(store)), store)


def register_store(store: str, make: Callable[[], Backend]) -> None:
    """Register the backend that reads encoded chunks of `store`, in this process. Replaces an earlier registration."""
    _STORES[store] = make


def backend_of_store(store: str) -> Backend:
    """Return a new backend that reads `store`. It need not be the backend that the run saves with.

    Raises:
        CorruptCheckpointError: the store is not registered.
        ConfigurationError: the store's library cannot be imported.
    """
    if store not in _STORES:
        raise CorruptCheckpointError(f"the manifest names the store {store!r}; known are {', '.join(sorted(_STORES))}")
    with importing(f"reading chunks of the store {store!r}"):
        return _STORES[store]()


def backend_named(name: str) -> Backend:
    """Return a new backend with its defaults, by one of the names in `BACKENDS`.

    Raises:
        ConfigurationError: the name is unknown, or the backend's library cannot be imported.
    """
    if name not in BACKENDS:
        raise unlike("backend", name, f"one of {', '.join(BACKENDS)}, or an object such as ZarrBackend()")
    with importing(f"the backend {name}"):
        return BACKENDS[name]()
