"""Table of what a state dict may hold: values and tensors, kept or refused. docs/kept.md shows it, test_kept.py tries each row."""

from __future__ import annotations

import argparse
import enum
import io
import math
import types
import uuid
import warnings
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterable
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch

import ckpt
from ckpt.format.dtypes import STORABLE
from ckpt.state.flatten import _DICTIONARIES, _SEQUENCES
from ckpt.state.plain import FACTORIES, KINDS, NAMESPACES


class Row(NamedTuple):
    """A row of the page.

    Attributes:
        kind: what the row is about, as Markdown.
        note: its limits; or what to do instead.
        made: makes examples.
        refused: part of the error at the save; "": it is kept.
    """

    kind: str
    note: str
    made: Callable[[], list[Any]]
    refused: str = ""

    def __str__(self) -> str:
        return self.kind.replace("`", "")


class Phase(enum.Enum):
    WARM_UP = "warm-up"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


PLAIN = [
    None, True, 7, -(2**70), 1.5, math.inf, -math.inf, math.nan, -0.0, "text", "\ud800", b"\x00\xff", bytearray(b"ab"), 1 + 2j,
    range(1, 9, 2), (), (1, (2,)), [], [1, [2.0]], {}, {"b": 1, "a": 2}, {3: 1, True: 2, None: 3, (1, "x"): 4}, {"~tag": 1},
    OrderedDict(b=1, a=2), Counter("abracadabra"), Counter({30: 1, 80: 2}), defaultdict(list, b=[1], a=[2]), defaultdict(None, a=1),
    deque([1, 2, 3], 5), deque(["a"]), {1, 2}, frozenset({"x"}), argparse.Namespace(lr=0.1, b=2), types.SimpleNamespace(z=1, a=2),
    io.BytesIO(b"12"), Decimal("1.10"), Fraction(1, 3), uuid.UUID(int=5), Path("runs/one"), PurePosixPath("a/b"),
    PureWindowsPath("c:/x"), datetime(2026, 1, 2, 3, 4, 5, 6), datetime(2026, 1, 2, tzinfo=UTC),
    datetime(2026, 1, 2, tzinfo=timezone(timedelta(hours=-3))), date(2026, 1, 2), time(3, 4, 5), timedelta(1, 2, 3),
    np.arange(6, dtype=np.int16).reshape(2, 3), np.array(["a", "bcd"]), np.array([b"x", b"yz"]),
    np.array(["2026-01-01", "NaT"], dtype="datetime64[D]"), np.float64(1.5), np.int8(3), np.bool_(True), np.str_("text"),
    np.datetime64("2026-01-01T00:00"), np.timedelta64(3, "s"), torch.Size([2, 3]), torch.bfloat16, torch.strided,
    torch.device("cuda", 1), torch.device("cpu"), Phase.WARM_UP, Access.READ | Access.WRITE,
]  # fmt: skip
"""Examples of all plain kinds."""

_NOTES: dict[type[Any], str] = {
    int: "of any size",
    float: "infinities, NaN and -0.0, too",
    str: "lone surrogates, too",
    dict: "in its order; keys of any kind in this table",
    OrderedDict: "in its order, with attributes that were set on it",
    Counter: "in its order",
    defaultdict: "missing values made by `None` or one of " + ", ".join(f"`{name}`" for name in FACTORIES),
    deque: "with its `maxlen`",
    io.BytesIO: "its content",
    datetime: "without a time zone, in UTC, or with a fixed offset",
    time: "as `datetime`",
    np.ndarray: "of numbers, text, bytes, or times; a copy in C order",
}
_MORE_OF_IN_JSON = (type(None), bool, int, float, str, list)


def values() -> list[Row]:
    """Rows of plain values."""
    kinds = [*_MORE_OF_IN_JSON, *(one.type for one in KINDS)]
    rows = [Row(_name(kind), _note(kind), lambda kind=kind: _plain(kind)) for kind in kinds]
    scalars = [value for value in PLAIN if isinstance(value, np.generic)]
    members = [value for value in PLAIN if isinstance(value, enum.Enum)]
    rows.append(Row("scalars of NumPy", "of the kinds that arrays have", lambda: scalars))
    enums = "of an enum at the top level of its module; a load finds it where the module is imported"
    rows.append(Row("members of an `enum.Enum`, combined flags", enums, lambda: members))
    return rows


def containers() -> list[type[Any]]:
    """Containers that may hold tensors, anywhere."""
    return [*_SEQUENCES, *_DICTIONARIES, *NAMESPACES]


def _plain(kind: type[Any]) -> list[Any]:
    return [value for value in PLAIN if type(value) is kind]


def _note(kind: type[Any]) -> str:
    found = [_NOTES.get(kind, ""), "may hold tensors" if kind in containers() and kind is not Counter else ""]
    return "; ".join(part for part in found if part)


def _name(kind: type[Any]) -> str:
    if kind is type(Path()):
        return "`pathlib.Path`"
    return (
        "`None`"
        if kind is type(None)
        else f"`{kind.__module__}.{kind.__qualname__}`".replace("builtins.", "").replace("_io.", "io.")
    )


def tensors() -> list[Row]:
    """Rows of tensors."""
    others = sorted((one for one in vars(torch).values() if isinstance(one, torch.dtype)), key=str)
    others = [one for one in dict.fromkeys(others) if one not in STORABLE and not str(one).startswith("torch.q")]
    empty = [torch.tensor(2.5), torch.ones(0, 3), torch.ones(2, 0, dtype=torch.int8)]
    layouts = "`to_dense()` of it, or its parts"
    return [
        Row(f"dense, of {_names(STORABLE)}", "", lambda: [of_bits(7, dtype) for dtype in STORABLE]),
        Row("without dimensions, or without elements", "", lambda: empty),
        Row(
            "views: slices, transposed, expanded, conjugated, negated",
            "each as a tensor of its own, its dimensions in their order",
            _views,
        ),
        Row("with `requires_grad`; `torch.nn.Parameter`", "as leaves", _with_gradients),
        Row("of a subclass that wraps nothing", "with its attributes, where its module is imported", _of_subclass),
        Row("of a class given to `ckpt.keep_tensor_class`; of torchao", "as the tensors in it", _of_kept_class),
        Row("made under `torch.inference_mode()`", "", _of_inference),
        Row("sparse, in any layout", layouts, _sparse, "layout"),
        Row("of MKL-DNN", layouts, lambda: [torch.ones(3).to_mkldnn()], "layout"),
        Row("nested", "its parts", _nested, "nested|NestedTensor"),
        Row("quantized", "`int_repr()`, scale and zero point", _quantized, "quantized"),
        Row(
            "on the device `meta`",
            "materialize the model first",
            lambda: [torch.empty(3, device="meta")],
            "device meta",
        ),
        Row("lazy", "run the model once first", lambda: [torch.nn.UninitializedParameter()], "not initialized"),
        Row(
            "of a class that wraps other tensors",
            "`ckpt.keep_tensor_class`",
            lambda: [Two(torch.ones(2), torch.ones(2))],
            "Two",
        ),
        Row(
            "zeros without memory, of a gradient",
            "`clone()`",
            lambda: [torch._efficientzerotensor(3)],
            "without memory",
        ),
        Row(
            f"of {_names(others)}",
            "`view(torch.uint8)` of it",
            lambda: [_of_type(one) for one in others],
            "tensors of torch",
        ),
    ]


class Two(torch.Tensor):
    """A sum of two tensors, in the form that torch.compile, FSDP and torchao know."""

    one: torch.Tensor
    other: torch.Tensor

    @staticmethod
    def __new__(cls, one: torch.Tensor, other: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, one.shape, dtype=one.dtype)  # type: ignore[attr-defined]
        made.one, made.other = one, other
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["one", "other"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], about: Any, size: Any, stride: Any) -> Two:
        return cls(inner["one"], inner["other"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].one, args[0].other)
        raise NotImplementedError(function)


@ckpt.keep_tensor_class
class KeptTwo(Two):
    pass


class Named(torch.Tensor):
    label: str


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(str(one).removeprefix("torch.") for one in dtypes)


def of_bits(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Make a tensor of `count` elements; torch converts numbers to some types only."""
    bits = torch.arange(count * dtype.itemsize, dtype=torch.uint8)
    return bits % 2 == 1 if dtype is torch.bool else bits.view(dtype)


def _of_type(dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(8, dtype=torch.uint8).view(dtype)


def _views() -> list[Any]:
    table, number = torch.arange(12.0).reshape(3, 4), torch.tensor([1 + 2j, 3j])
    return [table[1:, ::2], table.T, table[:, :1].expand(3, 2), number.conj(), number.conj().imag, table[1]]


def _with_gradients() -> list[Any]:
    return [
        torch.ones(2, requires_grad=True),
        torch.nn.Parameter(torch.ones(2)),
        torch.nn.Parameter(torch.ones(2), requires_grad=False),
    ]


def _of_subclass() -> list[Any]:
    one = torch.ones(2).as_subclass(Named)
    one.label = "x"
    return [one]


def _of_kept_class() -> list[Any]:
    return [KeptTwo(torch.ones(2), torch.arange(2.0))]


def _of_inference() -> list[Any]:
    with torch.inference_mode():
        return [torch.ones(3)]


def _sparse() -> list[Any]:
    eye = torch.eye(4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of layouts that torch calls beta
        return [
            eye.to_sparse(),
            eye.to_sparse_csr(),
            eye.to_sparse_csc(),
            eye.to_sparse_bsr((2, 2)),
            eye.to_sparse_bsc((2, 2)),
        ]


def _nested() -> list[Any]:
    parts = [torch.ones(2), torch.ones(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as above
        return [torch.nested.nested_tensor(parts, layout=layout) for layout in (torch.strided, torch.jagged)]


def _quantized() -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will give up these
        one = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
        return [one, torch.quantize_per_channel(torch.ones(2, 3), torch.ones(2), torch.zeros(2), 0, torch.qint8)]


class Bytes(bytes):
    pass


class Items(list[Any]):
    pass


class Table(dict[str, Any]):
    pass


Pair = namedtuple("Pair", "a b")
_loop: list[Any] = []
_loop.append(_loop)


def refused() -> list[Row]:
    """Rows of values that are refused, though they look like plain ones."""
    subclasses = [Bytes(b"x"), Items([1]), Items([torch.ones(1)]), Table(a=1), np.ma.array([1])]
    return [
        Row(
            "subclasses of these, such as `numpy.ma.MaskedArray`",
            "the plain type",
            lambda: subclasses,
            "Bytes|Items|Table|MaskedArray",
        ),
        Row("named tuples", "`tuple(...)`, or `_asdict()`", lambda: [Pair(1, 2), Pair(1, torch.ones(1))], "Pair"),
        Row(
            "a `defaultdict` with a function of your own",
            "`dict(...)` of it",
            lambda: [defaultdict(lambda: 1, a=2)],
            "defaultdict",
        ),
        Row("a `Counter` with attributes", "a plain one", _with_attributes, "attributes of its own"),
        Row("arrays of objects, structured arrays", "numbers, text, bytes or times", _odd_arrays, "array of"),
        Row(
            "a tensor in a set, or as a key",
            "a list",
            lambda: [{torch.ones(1)}, {torch.ones(1): 1}],
            "a tensor inside of a set",
        ),
        Row("times of a named time zone", "UTC, or a fixed offset", _of_zones, "time zone"),
        Row("members of an enum inside of a function", "their value", lambda: [_local_enum().A], "enum"),
        Row("what holds itself, or is nested too deeply", "another form", lambda: [_loop, _deep()], "holds itself"),
        Row(
            "mapping proxies, functions, classes, modules, generators, locks, objects of your own",
            "their state, as plain values",
            lambda: [types.MappingProxyType({"a": 1}), len, lambda: 1, dict, types, iter([]), Lock(), object()],
            "mappingproxy|function|type|module|list_iterator|lock|builtins.object",
        ),
        Row("containers of OmegaConf", "`OmegaConf.to_container(...)`", _of_omegaconf, "OmegaConf.to_container"),
    ]


def _with_attributes() -> list[Any]:
    found = Counter("ab")
    found.total_of = "letters"  # type: ignore[attr-defined]
    return [found]


def _odd_arrays() -> list[Any]:
    return [np.array([object()]), np.zeros(2, dtype=[("a", "i4"), ("b", "f8")])]


def _of_zones() -> list[Any]:
    zone = zoneinfo.ZoneInfo("Europe/Paris")
    return [datetime(2026, 1, 1, tzinfo=zone), time(3, tzinfo=zone)]


def _local_enum() -> Any:
    class Here(enum.Enum):
        A = 1

    return Here


def _deep() -> Any:
    value: Any = 1
    for _ in range(5000):
        value = [value]
    return value


def _of_omegaconf() -> list[Any]:
    from omegaconf import OmegaConf

    return [OmegaConf.create({"lr": 0.1}), OmegaConf.create([1, 2])]
