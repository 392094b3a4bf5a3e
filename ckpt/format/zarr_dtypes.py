"""Teach zarr-python the data types it lacks: bfloat16 and the float8 formats of torch.

The names are those of the zarr-extensions registry, which TensorStore uses too, so each library reads the other's arrays.
Importing this module changes nothing: call `register()` before opening such an array.

    import zarr, ckpt.format.zarr_dtypes
    ckpt.format.zarr_dtypes.register()
    zarr.open_array("checkpoint-00000020/model/h.0.weight")[:]      # an ml_dtypes.bfloat16 array
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import ml_dtypes
import numpy as np
import zarr.dtype
import zarr.errors
from zarr.dtype import UInt8, UInt16, ZDType, data_type_registry

_ZarrFormat = Literal[2, 3]
_OtherType: type[ValueError] = (
    getattr(zarr.errors, "DataTypeValidationError", None) or zarr.dtype.DataTypeValidationError
)
"""What zarr-python expects of a type that metadata do not name. It has moved in 3.2."""
_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, kw_only=True)
class _MlFloat(ZDType[np.dtype[Any], np.generic]):
    """A float of the package ml_dtypes, under one name in Zarr v2 and v3. Fill values keep every bit of a NaN.

    Each is also the unsigned integer of its size: codecs ask a type for its size and byte order, and zarr-python's public names
    have these two only in whole types.
    """

    scalar_type: ClassVar[type[Any]]

    def __init_subclass__(cls) -> None:
        cls.scalar_type = getattr(ml_dtypes, cls._zarr_v3_name)
        cls.dtype_cls = type(cls._native())

    @classmethod
    def _native(cls) -> np.dtype[Any]:
        return np.dtype(cls.scalar_type)

    @classmethod
    def from_native_dtype(cls, dtype: np.dtype[Any]) -> Self:
        if dtype != cls._native():
            raise _OtherType(f"expected {cls._native()}, found {dtype}")
        return cls()

    def to_native_dtype(self) -> np.dtype[Any]:
        return self._native()

    @classmethod
    def _from_json_v2(cls, data: Any) -> Self:
        return cls._named(data["name"] if isinstance(data, dict) else data)

    @classmethod
    def _from_json_v3(cls, data: Any) -> Self:
        return cls._named(data["name"] if isinstance(data, dict) and set(data) == {"name"} else data)

    @classmethod
    def _named(cls, name: object) -> Self:
        if name != cls._zarr_v3_name:
            raise _OtherType(f"expected {cls._zarr_v3_name!r}, found {name!r}")
        return cls()

    def to_json(self, zarr_format: _ZarrFormat) -> Any:
        return {"name": self._zarr_v3_name, "object_codec_id": None} if zarr_format == 2 else self._zarr_v3_name

    def _check_scalar(self, data: object) -> bool:
        return isinstance(data, (bool, int, float, np.generic))

    def cast_scalar(self, data: object) -> np.generic:
        if not self._check_scalar(data):
            raise TypeError(f"expected a number for {self._zarr_v3_name}, found {data!r}")
        scalar: np.generic = self.scalar_type(data)
        return scalar

    def default_scalar(self) -> np.generic:
        return self.cast_scalar(0)

    def from_json_scalar(self, data: object, *, zarr_format: _ZarrFormat) -> np.generic:
        """Read a fill value: a number, "NaN", "Infinity", "-Infinity", or the bits as hex, such as "0x7fc0"."""
        if isinstance(data, str) and data.startswith("0x"):
            dtype = self._native()
            bits: np.generic = np.frombuffer(int(data, 16).to_bytes(dtype.itemsize, "little"), dtype=dtype)[0]
            return bits
        return self.cast_scalar(_SPECIAL.get(data, data) if isinstance(data, str) else data)

    def to_json_scalar(self, data: object, *, zarr_format: _ZarrFormat) -> float | str:
        value = self.cast_scalar(data)
        number = float(value)
        if math.isnan(number):
            return f"0x{int.from_bytes(value.tobytes(), 'little'):0{2 * value.itemsize}x}"
        if math.isinf(number):
            return "Infinity" if number > 0 else "-Infinity"
        return number


@dataclass(frozen=True, kw_only=True)
class BFloat16(_MlFloat, UInt16):  # type: ignore[misc]  # _MlFloat redefines what the integer is
    """bfloat16. The `bytes` codec must declare the order of its two bytes, or TensorStore refuses the array."""

    _zarr_v3_name = "bfloat16"  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True)
class Float8E4M3FN(_MlFloat, UInt8):  # type: ignore[misc]
    _zarr_v3_name = "float8_e4m3fn"  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True)
class Float8E5M2(_MlFloat, UInt8):  # type: ignore[misc]
    _zarr_v3_name = "float8_e5m2"  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True)
class Float8E4M3FNUZ(_MlFloat, UInt8):  # type: ignore[misc]
    _zarr_v3_name = "float8_e4m3fnuz"  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True)
class Float8E5M2FNUZ(_MlFloat, UInt8):  # type: ignore[misc]
    _zarr_v3_name = "float8_e5m2fnuz"  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True)
class Float8E8M0FNU(_MlFloat, UInt8):  # type: ignore[misc]
    """Powers of two. It has no zero."""

    _zarr_v3_name = "float8_e8m0fnu"  # type: ignore[assignment]

    def to_json_scalar(self, data: object, *, zarr_format: _ZarrFormat) -> str:  # type: ignore[override]
        return f"0x{self.cast_scalar(data).tobytes().hex()}"  # TensorStore reads a number as another one


def register() -> None:
    """Make `zarr.open` understand bfloat16 and the float8 formats in this process. Repeated calls do nothing.

    Names that zarr-python already knows are left as they are.
    """
    for data_type in (BFloat16, Float8E4M3FN, Float8E5M2, Float8E4M3FNUZ, Float8E5M2FNUZ, Float8E8M0FNU):
        try:
            data_type_registry.get(data_type._zarr_v3_name)
        except KeyError:
            data_type_registry.register(data_type._zarr_v3_name, data_type)
