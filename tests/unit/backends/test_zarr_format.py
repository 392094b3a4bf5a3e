"""Names and documents of Zarr v3, which need no library to be right."""

from __future__ import annotations

import pytest

from ckpt.backends.zarr import array_document, chunk_key, with_groups_above
from ckpt.format.records import ArraySpec


@pytest.mark.parametrize(
    ("shape", "grid", "number", "key"),
    [
        ((), (), 0, "c"),
        ((7,), (2,), 3, "c/3"),
        ((5, 7), (2, 3), 0, "c/0/0"),
        ((5, 7), (2, 3), 5, "c/1/2"),
        ((2, 2, 24), (1, 2, 2), 17, "c/1/0/5"),
    ],
)
def test_a_chunk_s_key_is_its_place_in_the_grid(
    shape: tuple[int, ...], grid: tuple[int, ...], number: int, key: str
) -> None:
    assert chunk_key(ArraySpec("w", "int8", shape, grid), number) == key


def test_groups_bring_those_that_they_lie_in_outermost_first() -> None:
    assert with_groups_above([]) == [""]
    assert with_groups_above(["model", "model/rank-00000", "rng"]) == ["", "model", "model/rank-00000", "rng"]
    assert with_groups_above(["model/rank-00000", "rng"]) == ["", "model", "model/rank-00000", "rng"]


@pytest.mark.parametrize(
    ("dtype", "zero"), [("bool", "False"), ("int64", "0"), ("bfloat16", "0.0"), ("complex64", "[0.0, 0.0]")]
)
def test_the_fill_value_is_zero_as_the_type_writes_it(dtype: str, zero: str) -> None:
    assert str(array_document(ArraySpec("w", dtype, (1,), (1,)))["fill_value"]) == zero


def test_elements_of_several_bytes_declare_their_order() -> None:
    codec = {"name": "bytes", "configuration": {"endian": "little"}}
    assert array_document(ArraySpec("w", "bfloat16", (1,), (1,)))["codecs"] == [codec]
    assert array_document(ArraySpec("w", "float8_e5m2", (1,), (1,)))["codecs"] == [{"name": "bytes"}]
