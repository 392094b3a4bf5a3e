"""What lies in an object store is opened there by the libraries of its formats, without this package."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
import torch
import zarr
import zarr.storage

import ckpt
from ckpt.format.manifest import MANIFEST_NAME
from ckpt.format.places import ObjectPath
from ckpt.storage.objects.store import store_of
from tests.support.object_server import ObjectServer
from tests.support.states import buffered

W = torch.arange(2_400_000.0).reshape(1200, 2000)  # smaller arrays are packed by zarr, in a store
STATE = {"w": W, "small": torch.arange(5), "n": 7}


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectServer]:
    with ObjectServer() as server, server.used():
        yield server


def place_of(address: str) -> str:
    """The key of the place of a checkpoint's files, which its manifest names."""
    place = ObjectPath("s3", "bucket", address)
    manifest = json.loads(bytes(store_of(place).get((place / MANIFEST_NAME).key)[0]))
    return f"{address}/{manifest['data']}"


def s3(server: ObjectServer, path: str) -> dict[str, Any]:
    return {
        "driver": "s3",
        "bucket": "bucket",
        "path": path,
        "endpoint": server.url,
        "aws_region": "us-east-1",
        "aws_credentials": {"type": "environment"},
    }


@pytest.mark.parametrize("kvstore", ["ocdbt", "file"])
def test_tensorstore_opens_an_array(server: ObjectServer, kvstore: str) -> None:
    from ckpt.backends.tensorstore import TensorStoreBackend

    ckpt.save(STATE, f"s3://bucket/ts-{kvstore}", format=buffered(TensorStoreBackend(kvstore=kvstore), segment_bytes=1 << 20))
    place = place_of(f"ts-{kvstore}")
    if kvstore == "ocdbt":
        store = {"driver": "ocdbt", "base": s3(server, f"{place}/arrays.ocdbt/"), "path": "state/w/"}
    else:
        store = s3(server, f"{place}/state/w/")
    found = ts.open({"driver": "zarr3", "kvstore": store}, read=True).result().read().result()
    assert np.array_equal(found, W.numpy())


def test_zarr_opens_the_group(server: ObjectServer) -> None:
    obstore_store = pytest.importorskip("obstore.store")
    ckpt.save(STATE, "s3://bucket/z", format="zarr")
    objects = obstore_store.S3Store("bucket", prefix=place_of("z"), client_options={"allow_http": True})
    group = zarr.open_group(zarr.storage.ObjectStore(objects, read_only=True), mode="r")
    assert np.array_equal(group["state/w"][:], W.numpy())


def test_safetensors_are_read_by_ranges(server: ObjectServer) -> None:
    ckpt.save(STATE, "s3://bucket/k", format="kimi-engine")
    place = ObjectPath("s3", "bucket", place_of("k"))
    index = json.loads(bytes(store_of(place).get((place / "state/model.safetensors.index.json").key)[0]))
    key = (place / "state" / index["weight_map"]["w"]).key
    (length,) = struct.unpack("<Q", store_of(place).get_range(key, 0, 8))
    row = json.loads(bytes(store_of(place).get_range(key, 8, 8 + length)))["w"]
    first, last = row["data_offsets"]
    data = store_of(place).get_range(key, 8 + length + first, 8 + length + last)
    assert np.array_equal(np.frombuffer(data, np.float32).reshape(row["shape"]), W.numpy())


def test_the_files_of_a_copy_on_disk_are_a_checkpoint(server: ObjectServer, tmp_path: Any) -> None:
    """`aws s3 cp --recursive` of the whole address; and the other way."""
    ckpt.save(STATE, "s3://bucket/c", format="tensorstore")
    for key, one in server.objects["bucket"].items():
        if key.startswith("c/"):
            file = tmp_path / key
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(one.data)
    assert torch.equal(ckpt.load(tmp_path / "c")["w"], W)
    ckpt.save(STATE, tmp_path / "d", format="zarr")
    for file in (tmp_path / "d").rglob("*"):
        if file.is_file():
            store_of(ObjectPath("s3", "bucket")).put(file.relative_to(tmp_path).as_posix(), file.read_bytes())
    assert torch.equal(ckpt.load("s3://bucket/d")["w"], W)
