"""A few bytes of a pickle that ask for much memory, or for time without end, are refused before they are read."""

from __future__ import annotations

import io
import pickle
import random
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt.errors import ConfigurationError, CorruptCheckpointError
from ckpt.interop.pickle_cost import TooMuchError, require_bounded
from ckpt.interop.unpickling import unpickle, unpickle_archived, unpickle_inert, unpickle_state_dict
from tests.support.bounded import little_memory
from tests.support.covering import sampled


def _tower(levels: int) -> bytes:
    """Tuples of the one below, twice: 2^levels nodes as a tree."""
    return b"K\x01" + b"".join(b"q" + bytes([n]) + b"h" + bytes([n]) + b"\x86" for n in range(levels))


def _number(value: int, width: int = 4) -> bytes:
    return value.to_bytes(width, "little")


_SET, _FROZEN, _ORDERED = (
    f"c{name}\n".encode() for name in ("builtins\nset", "builtins\nfrozenset", "collections\nOrderedDict")
)
_LONG_LIST = b"](" + b"K\x01" * 50_000 + b"eq\x00"
_LONG_TEXT = b"X" + _number(100_000) + b"x" * 100_000
BOMBS = {
    "a position in the memo": b"\x80\x02Nr" + _number(1 << 31) + b".",
    "a position in the memo, as text": b"Np200000000\n.",
    "a long text": b"X" + _number(1 << 31) + b".",
    "a very long text": b"\x8d" + _number(1 << 40, 8) + b".",
    "many bytes": b"\x8e" + _number(1 << 40, 8) + b".",
    "many bytes that change": b"\x96" + _number(1 << 33, 8) + b".",
    "a long number": b"\x8b" + _number(1 << 30) + b".",
    "a key": b"}" + _tower(60) + b"Ns.",
    "keys": b"}(" + _tower(60) + b"Nu.",
    "keys of a dictionary made at once": b"(" + _tower(60) + b"Nd.",
    "a member of a set": b"\x8f(" + _tower(60) + b"\x90.",
    "a member of a frozen set": b"(" + _tower(60) + b"\x91.",
    "a member of a set by a call": _SET + b"](" + _tower(60) + b"e\x85R.",
    "a member of a frozen set by a call": _FROZEN + b"](" + _tower(60) + b"e\x85R.",
    "an item added later": _SET + b"]q\xfe\x85h\xfe" + _tower(60) + b"a0R.",
    "pairs of a dictionary": _ORDERED + b"](](" + _tower(60) + b"Nee\x85R.",
    "a class": b"(" + _tower(60) + b"imodule\nName\n.",
    "a class, its arguments": b"cmodule\nName\n" + _tower(60) + b"\x85\x81.",
    "frozen sets of frozen sets": b"}" + b"(K\x01\x91" + b"".join(
        b"q" + bytes([n]) + b"0(h" + bytes([n]) + b"K\x01\x86h" + bytes([n]) + b"K\x02\x86\x91" for n in range(60)) + b"Ns.",
    "a key nested deeply": b"}" + b"K\x01" + b"\x85" * 100_000 + b"Ns.",
    "the arguments of many objects": _LONG_LIST + b"cmodule\nName\nq\x01" + b"(h\x00tq\x02" + b"h\x01h\x02R" * 50_000 + b".",
    "a list copied into many sets": _LONG_LIST + _SET + b"q\x01" + b"h\x01h\x00\x85R" * 50_000 + b".",
    "a text copied often": b"c_codecs\nencode\nq\x00" + _LONG_TEXT + b"X\x06\0\0\0latin1\x86q\x01" + b"h\x00h\x01R" * 50_000 + b".",
    "many classes": b"(" + b"".join(b"cm\n%d\n" % n for n in range(300_000)) + b"t.",
    "a list in itself, as an argument": _SET + b"]q\x00h\x00ah\x00\x85R.",
}  # fmt: skip


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_pickle_that_takes_far_more_than_its_bytes_is_refused(bomb: str) -> None:
    for read in (unpickle_inert, unpickle_archived):
        with little_memory(), pytest.raises(CorruptCheckpointError, match="^it cannot be read as a pickle: "):
            read(BOMBS[bomb], "it")
    with pytest.raises(TooMuchError):
        require_bounded(BOMBS[bomb])


def _archive(data: bytes, how: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", how) as archive:
        for name, content in {"x/data.pkl": data, "x/version": b"3\n", "x/byteorder": b"little"}.items():
            archive.writestr(name, content)
    return stream.getvalue()


def _old(data: bytes) -> bytes:
    """A file of torch before 1.6, whose fourth pickle is the value."""
    return b"".join(pickle.dumps(one, 2) for one in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})) + data


FILES: dict[str, Callable[[], bytes]] = {
    "a key": lambda: _archive(BOMBS["a key"]),
    "a member of a set by a call": lambda: _archive(BOMBS["a member of a set by a call"]),
    "a key, of an old file": lambda: _old(BOMBS["a key"]),
    "an old file with a zip behind it": lambda: _old(BOMBS["a key"]) + _archive(pickle.dumps({}, 2)),
    "a compressed archive": lambda: _archive(b"\x80\x02]" + b"]" * (16 << 20), zipfile.ZIP_DEFLATED),
    "two descriptions": lambda: _archive(b"\x80\x02}.").replace(b"x/version", b"/data.pkl"),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("read", [unpickle, unpickle_state_dict])
def test_so_is_one_in_a_file_that_torch_would_read(tmp_path: Path, name: str, read: Callable[[Path], Any]) -> None:
    (tmp_path / "file.pt").write_bytes(FILES[name]())
    with little_memory(), pytest.raises(CorruptCheckpointError, match=r"file\.pt cannot be read"):
        read(tmp_path / "file.pt")


@pytest.mark.parametrize(
    "value", [lambda: torch.ones(1).expand(1 << 40), lambda: [torch.ones(1).expand((1 << 28) + n) for n in range(3)]]
)
def test_tensors_that_repeat_their_elements_without_end_are_refused(tmp_path: Path, value: Callable[[], Any]) -> None:
    torch.save({"w": value()}, tmp_path / "file.pt")
    with pytest.raises(
        ConfigurationError, match=r"file\.pt repeats elements: the tensors of a file of \d+ bytes would have \d{10,}"
    ):
        unpickle(tmp_path / "file.pt")


def _circle() -> Any:
    found: dict[str, Any] = {"list": [1, 2]}
    found["self"] = found
    return found


SOUND: dict[str, Callable[[], Any]] = {
    "a state of random generators": lambda: [random.getstate(), np.random.get_state(), torch.get_rng_state()],
    "many names": lambda: {f"layers.{n}.attention.wq.weight" * 4: (n, [n], {"a": n}) for n in range(5000)},
    "shared": lambda: [((1, 2), "text" * 99)] * 1000,
    "keys of tuples": lambda: {(n, (n, "a")): n for n in range(5000)},
    "sets": lambda: [set(range(9999)), frozenset("abc"), {frozenset({1, 2}), frozenset({3})}],
    "a circle": _circle,
    "counted": lambda: [Counter("abca"), OrderedDict(a=1)],
    "numbers": lambda: [2**70, -1.5, 1j, None, True, b"x" * 300, bytearray(b"abc"), "é" * 300, 10**4000],
    "a large text, often": lambda: dict.fromkeys(range(100), "x" * 1000),
    "tensors": lambda: {f"w{n}": torch.nn.Parameter(torch.ones(2)) for n in range(2000)},
    "arrays": lambda: [np.arange(n) for n in range(500)],
    "nested": lambda: {"a": [{"b": [({"c": []},)] * 50}] * 50},
}


@sampled("protocol", [2, 4, 5, 0, 1, 3], 3)
@pytest.mark.parametrize("name", SOUND)
def test_what_picklers_write_is_read(name: str, protocol: int) -> None:
    require_bounded(pickle.dumps(SOUND[name](), protocol))


def test_a_cut_pickle_is_damage() -> None:
    data = pickle.dumps(SOUND["nested"](), 2)
    for end in range(0, len(data), 3):
        with pytest.raises(CorruptCheckpointError, match="^it cannot be read as a pickle: "):
            unpickle_inert(data[:end], "it")
