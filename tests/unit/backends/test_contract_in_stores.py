"""The contract of a backend, with every format, in object stores: the tests of folders, inherited."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ckpt.backends.base import Backend
from ckpt.errors import CheckpointError
from ckpt.format.box import Box
from ckpt.format.records import ArraySpec
from ckpt.storage.objects import store
from tests.support.arrays import SAVES, Saved, array, expected, read_by_extents
from tests.support.backend_contract import BackendContract
from tests.support.object_server import ObjectServer
from tests.support.stored_path import StoredPath
from tests.unit.backends import test_array_backends as folders


class Places:
    """Makes a new address for each test; what is in memory stays for all of them."""

    numbers = itertools.count()

    def __init__(self, scheme: str) -> None:
        self.scheme = scheme

    def mktemp(self, name: str) -> StoredPath:
        return StoredPath(self.scheme, "bucket", f"{name}-{next(self.numbers)}")


@pytest.mark.filterwarnings("ignore")
class InStores(BackendContract):
    @pytest.fixture(
        scope="class",
        params=["s3", pytest.param("gs", marks=pytest.mark.full), pytest.param("memory", marks=pytest.mark.full)],
    )
    def tmp_path_factory(self, request: pytest.FixtureRequest) -> Iterator[Places]:
        with pytest.MonkeyPatch.context() as patch, ObjectServer() as server, server.used():
            patch.setattr(store, "RETRY_S", 0.3)
            yield Places(request.param)

    @pytest.fixture
    def tmp_path(self, tmp_path_factory: Places) -> StoredPath:  # type: ignore[override]
        return tmp_path_factory.mktemp("t")

    def lose(self, saved: Saved, path: str, number: int) -> None:
        BackendContract.lose(self, saved, path, number)

    def require_equal_elsewhere(self, *_: object) -> None:
        """`test_open_objects.py` reads them with other libraries."""

    def test_a_refusal_of_the_file_system_is_an_os_error_that_names_the_file(self, tmp_path: StoredPath) -> None:  # type: ignore[override]
        self._require_refused(StoredPath(tmp_path.scheme, "no-such-bucket", "x"), "no such bucket" if tmp_path.scheme != "memory" else None)

    def test_a_root_that_cannot_be_written_is_an_error_that_names_it(self, tmp_path: StoredPath) -> None:  # type: ignore[override]
        self._require_refused(StoredPath(tmp_path.scheme, "denied", "x"), "denied" if tmp_path.scheme != "memory" else None)

    def _require_refused(self, root: StoredPath, match: str | None) -> None:
        if match is None:
            pytest.skip("memory refuses nothing")
        spec, value = array("model/w", torch.arange(40_000.0), 40_000)
        writer = self.make().writer(root, 0, lambda num_bytes: None)  # type: ignore[arg-type]
        writer.expect([expected(spec, 0)])
        with pytest.raises((OSError, CheckpointError), match=match):
            writer.write(spec, 0, value)
            writer.finish()
        writer.abort()


class TestZarr(InStores, folders.TestZarr): ...


class TestZarrCompressed(InStores, folders.TestZarrCompressed): ...


class ByExtents:
    """A backend whose chunks are raw: of a store they are always read by their extents, and by no library."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def __getattr__(self, name: str) -> Any:
        if name == "backend" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.backend, name)

    def read(self, root: Any, spec: ArraySpec, box: Box, out: torch.Tensor) -> None:
        saved = next((one for one in reversed(SAVES) if one.root == root and spec in one.arrays), None)
        if saved is None:
            pytest.skip("which array is there the manifest says")
        out.copy_(read_by_extents(saved, spec, box))


class Raw(InStores):
    def test_an_array_without_elements_is_described_and_read(self, tmp_path: StoredPath) -> None:  # type: ignore[override]
        pytest.skip("such an array is read by no library")


class TestTensorStoreInOcdbt(Raw, folders.TestTensorStoreInOcdbt):
    def make(self) -> Any:
        return ByExtents(super().make())


class TestKimiEngine(Raw, folders.TestKimiEngine):
    def make(self) -> Any:
        return ByExtents(super().make())


class TestTensorStoreInFiles(Raw, folders.TestTensorStoreInFiles):
    def make(self) -> Any:
        return ByExtents(super().make())
