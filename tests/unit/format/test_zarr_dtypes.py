"""zarr-python learns bfloat16 and float8, in Zarr v3 and v2, so that it and TensorStore read each other's arrays."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
import zarr
from zarr.dtype import data_type_registry

from ckpt.format import zarr_dtypes

NAMES = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    zarr_dtypes.register()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "invalid value", RuntimeWarning)  # NumPy comparing our NaN patterns
        yield


def every_value(name: str) -> np.ndarray:
    """All bit patterns of a type."""
    dtype = np.dtype(getattr(ml_dtypes, name))
    return np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}").view(dtype)


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_every_bit_pattern_written_by_zarr_is_read_by_zarr_and_by_tensorstore(
    tmp_path: Path, name: str, zarr_format: int
) -> None:
    values = every_value(name)
    chunks = (len(values) // 3 + 1,)  # three, and the last is not full
    stored = zarr.create_array(
        tmp_path / "w", shape=values.shape, chunks=chunks, dtype=values.dtype, compressors=None, zarr_format=zarr_format
    )
    stored[:] = values
    again = zarr.open_array(tmp_path / "w", mode="r")[:]
    driver = {
        "driver": "zarr3" if zarr_format == 3 else "zarr",
        "kvstore": {"driver": "file", "path": f"{tmp_path}/w/"},
    }
    assert again.dtype == values.dtype
    assert again.tobytes() == values.tobytes() == ts.open(driver).result().read().result().tobytes()


@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
@pytest.mark.parametrize("name", NAMES)
def test_every_bit_pattern_written_by_tensorstore_is_read_by_zarr(tmp_path: Path, name: str, driver: str) -> None:
    values = every_value(name)
    spec = {"driver": driver, "kvstore": {"driver": "file", "path": f"{tmp_path}/w/"}}
    ts.open(spec, create=True, dtype=ts.dtype(name), shape=values.shape).result().write(values).result()
    assert zarr.open_array(tmp_path / "w", mode="r")[:].tobytes() == values.tobytes()


def test_bfloat16_declares_the_order_of_its_bytes(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "w", shape=(1,), dtype="bfloat16", compressors=None)
    codecs = json.loads((tmp_path / "w/zarr.json").read_bytes())["codecs"]
    assert codecs == [{"name": "bytes", "configuration": {"endian": "little"}}]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fill", ["NaN", 0, 1.5, -0.0])
def test_fill_values_survive_metadata_bit_for_bit(tmp_path: Path, name: str, fill: float | str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name))
    value = dtype.type(float(fill))
    zarr.create_array(tmp_path / "w", shape=(3,), dtype=dtype, fill_value=value, compressors=None)
    assert zarr.open_array(tmp_path / "w", mode="r")[:].tobytes() == value.tobytes() * 3
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{tmp_path}/w/"}}
    assert ts.open(spec).result().read().result().tobytes() == value.tobytes() * 3


def test_the_special_fill_values_of_other_writers_are_understood() -> None:
    kind = zarr_dtypes.BFloat16()
    assert np.isnan(kind.from_json_scalar("NaN", zarr_format=3))
    assert kind.from_json_scalar("-Infinity", zarr_format=3) == -np.inf
    assert kind.to_json_scalar(np.inf, zarr_format=3) == "Infinity"
    assert kind.from_json_scalar("0x7fc1", zarr_format=3).tobytes() == b"\xc1\x7f"
    with pytest.raises(TypeError, match="expected a number for bfloat16, found 'much'"):
        kind.from_json_scalar("much", zarr_format=3)


def test_registering_again_changes_nothing_and_keeps_what_zarr_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(data_type_registry.contents)
    zarr_dtypes.register()
    assert data_type_registry.contents == before
    monkeypatch.setitem(data_type_registry.contents, "bfloat16", zarr_dtypes.Float8E5M2)
    zarr_dtypes.register()
    assert data_type_registry.contents["bfloat16"] is zarr_dtypes.Float8E5M2


def test_importing_the_module_registers_nothing() -> None:
    code = "import ckpt.format.zarr_dtypes; from zarr.dtype import data_type_registry as r; print('bfloat16' in r.contents)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
