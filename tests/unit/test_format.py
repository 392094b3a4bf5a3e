"""A checkpoint as other libraries see it: zarr-python and tensorstore read what the coordinator wrote, without our code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore
import torch
import zarr
from safetensors import safe_open

from ckpt import StateComponent
from ckpt.backends.zarr import described_as
from ckpt.format import zarr_dtypes
from ckpt.format.dtypes import raw_bytes, zarr_name
from ckpt.ranks.topology import Topology
from tests.support import plain_safetensors
from tests.support.states import ALL_DTYPES, Held, coordinator, global_index, random_bits

NEED_REGISTERING = tuple(d for d in ALL_DTYPES if d is torch.bfloat16 or "float8" in str(d))
LARGE = (300, 500)


def written(root: Path, backend: str, state: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Save a state on one rank; return the checkpoint's folder and its manifest, as any program would read it."""
    made = coordinator(Topology.alone(), root, [StateComponent("model", Held(state), "global")], backend=backend)
    path = Path(made.save_checkpoint(checkpoint_id="1"))
    return path, json.loads((path / "checkpoint_manifest.json").read_text())


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(raw_bytes(tensor.contiguous()).numpy())


@pytest.mark.parametrize("backend", ["zarr", "file"])
def test_plain_zarr_opens_every_array(tmp_path: Path, backend: str) -> None:
    zarr_dtypes.register()
    state = {zarr_name(d): random_bits(LARGE, d, seed) for seed, d in enumerate(ALL_DTYPES)}
    path, manifest = written(tmp_path, backend, state)
    for name, tensor in state.items():
        entry = manifest["arrays"][f"model/{name}"]
        array = zarr.open(path / entry["path"], mode="r")
        assert array.shape == LARGE
        assert np.ascontiguousarray(array[:]).tobytes() == bits(tensor), name


@pytest.mark.parametrize("backend", ["zarr", "file", "ocdbt"])
def test_tensorstore_opens_every_array(tmp_path: Path, backend: str) -> None:
    state = {zarr_name(d): random_bits(LARGE, d, seed) for seed, d in enumerate(ALL_DTYPES)}
    path, manifest = written(tmp_path, backend, state)
    for name, tensor in state.items():
        entry = manifest["arrays"][f"model/{name}"]
        if entry["store"] == "ocdbt":
            kvstore: dict[str, Any] = {
                "driver": "ocdbt",
                "base": f"file://{path}/arrays.ocdbt/",
                "path": entry["path"] + "/",
            }
        else:
            kvstore = {"driver": "file", "path": str(path / entry["path"]) + "/"}
        array = tensorstore.open({"driver": "zarr3", "kvstore": kvstore}).result()
        assert array.dtype.name == described_as(name)
        assert np.ascontiguousarray(array.read().result()).tobytes() == bits(tensor), name


@pytest.mark.parametrize("shape", [LARGE, (7,), (), (0, 3)], ids=str)
def test_plain_safetensors_opens_every_tensor_by_its_name(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Of every size: small ones are not packed under a name of their own."""
    state = {zarr_name(d): random_bits(shape, d, seed) for seed, d in enumerate(ALL_DTYPES)}
    path, _ = written(tmp_path, "safetensors", {**state, "größe/β": random_bits(shape, torch.float32, 99)})
    assert plain_safetensors.keys_in(path / "model") == {*state, "größe/β"}
    assert set(plain_safetensors.names_in(path / "model")) == {*state, "größe/β"}
    for name, tensor in state.items():
        with safe_open(path / "model" / f"rank-00000-{name}.safetensors", "pt") as file:
            found = file.get_tensor(name)
        assert bits(found) == bits(tensor), name
        wanted = torch.view_as_real(tensor) if name in plain_safetensors.COMPLEX else tensor
        wanted = wanted.view(1) if name == plain_safetensors.SCALARS and shape == () else wanted
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)


@pytest.mark.parametrize("backend", ["zarr", "file"])
def test_a_packed_tensor_is_read_with_plain_zarr_in_three_lines(tmp_path: Path, backend: str) -> None:
    """The lines of docs/format.md."""
    checkpoint, manifest = written(tmp_path, backend, {"a": global_index((7,)), "h.0.bias": global_index((3, 50)) + 5})
    assert manifest["arrays"]["model/h.0.bias"] == {
        "dtype": "float32",
        "shape": [3, 50],
        "store": "zarr",
        "packed_in": [0],
    }

    index = json.loads((checkpoint / "index-00000.json").read_text())
    number, _, _, shape, first = index["pieces"]["model/h.0.bias"][0]
    bias = zarr.open(checkpoint / list(index["packed"])[number])[first : first + np.prod(shape)].reshape(shape)

    assert np.array_equal(bias, (global_index((3, 50)) + 5).numpy())


def test_the_group_of_a_checkpoint_can_be_walked(tmp_path: Path) -> None:
    path, _ = written(tmp_path, "zarr", {"w": global_index(LARGE), "b": global_index((3,))})
    group = zarr.open_group(path, mode="r")
    with pytest.warns(zarr.errors.ZarrUserWarning, match="plain.json is not recognized"):  # it is JSON of ours
        assert sorted(group["model"].array_keys()) == ["packed-float32-00000", "w"]


def test_bfloat16_keeps_its_values_not_only_its_bits(tmp_path: Path) -> None:
    zarr_dtypes.register()
    values = torch.linspace(-3, 3, 200 * 300).view(200, 300).to(torch.bfloat16)
    path, _ = written(tmp_path, "zarr", {"w": values})
    array = zarr.open(path / "model" / "w", mode="r")[:]
    assert array.dtype == ml_dtypes.bfloat16
    assert np.array_equal(array.astype(np.float32), values.float().numpy())


def test_small_tensors_are_packed_in_arrays_of_limited_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.saving.writing.PACKED_BYTES", 1 << 20)
    state = {f"t.{number}": random_bits((60, 64), torch.float32, number) for number in range(200)}  # of 15 KiB
    made = coordinator(Topology.alone(), tmp_path, [StateComponent("model", Held(state), "global")])
    checkpoint = Path(made.save_checkpoint(checkpoint_id="1"))
    index = json.loads((checkpoint / "index-00000.json").read_text())
    assert list(index["packed"]) == [
        "model/packed-float32-00000",
        "model/packed-float32-00000-00001",
        "model/packed-float32-00000-00002",
    ]
    assert all(0 < elements * 4 <= 1 << 20 for elements in index["packed"].values())
    for name, tensor in state.items():
        number, _, _, shape, first = index["pieces"][f"model/{name}"][0]
        array = zarr.open(checkpoint / list(index["packed"])[number])
        assert array[first : first + np.prod(shape)].tobytes() == bits(tensor), name
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    coordinator(Topology.alone(), tmp_path, [StateComponent("model", Held(into), "global")]).load_checkpoint()
    assert all(bits(into[name]) == bits(tensor) for name, tensor in state.items())
