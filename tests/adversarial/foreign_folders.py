"""Checkpoints from a stranger in formats of others: old folders of pickled files, and Megatron-Core's folders.

Whatever lies in them: no code of theirs runs, no file outside is touched, and each attempt succeeds or says one sentence. An
attempt is to load (pickles allowed and not), to inspect, to verify and to convert.
"""

from __future__ import annotations

import io
import json
import operator
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ckpt import StateComponent
from ckpt.cli.converting import ConvertKeys, LoadKeys, convert_on_ranks, run_of
from ckpt.cli.reading import InspectKeys, ReadingKeys, show, verify
from ckpt.errors import CheckpointError
from ckpt.ranks.topology import Topology
from tests.adversarial import held_state
from tests.adversarial.driver import Case, Outcome, in_child
from tests.adversarial.foreign import LATE_S, MEMORY_BYTES, why_outside
from tests.adversarial.shim import Orders
from tests.support.states import Held, coordinator

GOLDEN = Path(__file__).parents[1] / "golden" / "megatron" / "dp2"
_HUGE = 10**18


class _Reduces:
    """Pickled as a call."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._call = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


def cases() -> list[Case]:
    """Cases for all of them."""
    old = [Case("foreign_folders:old", {"name": name}) for name in OLD]
    return old + [Case("foreign_folders:megatron", {"name": name}) for name in MEGATRON]


def old(folder: Path, name: str) -> Iterator[Outcome]:
    """Attempts with a folder of pickled files."""
    place = folder / "root" / "checkpoint-1"
    place.mkdir(parents=True)
    in_child(_write_old, OLD[name], place).require_result()
    yield from _attempts(f"an old checkpoint with {name}", folder, place, [*_LOADS, *_OTHERS])


def megatron(folder: Path, name: str) -> Iterator[Outcome]:
    """Attempts with a folder of Megatron-Core."""
    place = folder / "root" / "iter_0000001"
    shutil.copytree(GOLDEN, place)
    in_child(MEGATRON[name], place).require_result()
    yield from _attempts(f"a Megatron folder with {name}", folder, place, [*_OTHERS])


def _attempts(what: str, folder: Path, place: Path, names: list[str]) -> Iterator[Outcome]:
    (folder / "out").mkdir()
    for name in names:
        orders = Orders(folder / "orders", trace=folder / "trace")
        ended = in_child(
            _attempt, name, place, folder / "out", orders=orders, memory_bytes=MEMORY_BYTES, timeout_s=LATE_S
        )
        fell = ended.value if ended.how == "returned" else f"{ended.how}: {ended.value}"
        allowed = [place, folder / "out", Path("/dev/null"), Path("/dev/shm"), Path("/memfd:")]
        yield Outcome(f"crafts: {name}, other formats", f"{what}: {name}", fell or why_outside(orders, allowed))
        (folder / "trace").unlink(missing_ok=True)


def _attempt(name: str, place: Path, out: Path) -> str:
    os.chdir(out)  # where a payload that runs would leave its mark
    try:
        with redirect_stdout(io.StringIO()):
            {**_LOADS, **_OTHERS}[name](place, out)
    except CheckpointError as error:
        if type(error) is CheckpointError or "\n" in str(error):
            return f"nobody foresaw {type(error).__name__}: {error}"
    return "the payload ran" if any(out.rglob("pwned")) else ""


def _load(place: Path, out: Path, *, allow_pickle: bool) -> None:
    made = [StateComponent("model", Held({"w": torch.zeros(4)}), "replicated")]
    with coordinator(Topology.alone(), place.parent, made, pattern_check="off", allow_pickle=allow_pickle) as run:
        run.load_checkpoint(place)


def _convert(place: Path, out: Path, *, allow_pickle: bool) -> None:
    dst = out / f"converted-{allow_pickle}"
    convert_on_ranks(
        run_of(ConvertKeys(src=str(place), dst=str(dst), to="zarr", load=LoadKeys(allow_pickle))),
        Topology.alone(),
    )
    assert held_state.problems_of(dst) == []


_LOADS: dict[str, Callable[[Path, Path], object]] = {
    "load": partial(_load, allow_pickle=False),
    "load, pickles allowed": partial(_load, allow_pickle=True),
}
_OTHERS: dict[str, Callable[[Path, Path], object]] = {
    "inspect": lambda place, out: show(InspectKeys(str(place))),
    "verify": lambda place, out: verify(ReadingKeys(str(place))),
    "convert": partial(_convert, allow_pickle=False),
    "convert, pickles allowed": partial(_convert, allow_pickle=True),
}


# Old folders


def _write_old(make: Callable[[], bytes], place: Path) -> None:
    (place / "model_state.pt").write_bytes(make())


def _saved(value: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


def _zipped(entries: dict[str, bytes], how: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", how) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return stream.getvalue()


def _with_pickle(data: bytes) -> bytes:
    return _zipped({"x/data.pkl": data, "x/version": b"3\n", "x/byteorder": b"little"})


def _calls(function: Callable[..., Any], *args: Any) -> Callable[[], bytes]:
    return lambda: _saved({"w": torch.ones(4), "x": _Reduces(function, *args)})


def _deep() -> bytes:
    return b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."


def _tower() -> bytes:
    """A dictionary whose key is a tuple of one tuple, twice, and so on."""
    return b"\x80\x02}K\x01" + b"".join(bytes((0x71, n, 0x68, n, 0x86)) for n in range(60)) + b"Ns."


_TOUCH = "touch pwned"
OLD: dict[str, Callable[[], bytes]] = {
    "os.system": _calls(os.system, _TOUCH),
    "os.system, no zip": lambda: _saved({"x": _Reduces(os.system, _TOUCH)}, _use_new_zipfile_serialization=False),
    "os.system, a plain pickle": lambda: pickle.dumps({"x": _Reduces(os.system, _TOUCH)}),
    "exec": _calls(exec, f"import os; os.system('{_TOUCH}')"),
    "eval": _calls(eval, f"__import__('os').system('{_TOUCH}')"),
    "attrgetter": _calls(operator.attrgetter("system"), 5),
    "__import__": _calls(__import__, "os"),
    "a pickle inside": _calls(torch.storage._load_from_bytes, _saved(_Reduces(os.system, _TOUCH))),
    "torch.load": _calls(torch.load, "/etc/passwd"),
    "open": _calls(open, "pwned", "w"),
    "a name of the wrong kind": lambda: _with_pickle(b"cos\nsystem\n(V" + _TOUCH.encode() + b"\ntR."),
    "a persistent id of a file": lambda: _with_pickle(b"Vx/../../../../etc/passwd\nQ."),
    "a huge storage": lambda: _saved({"w": torch.ones(4)}).replace(b"K\x04", b"K\xff"),
    "brackets": lambda: _with_pickle(_deep()),
    "a zip bomb": lambda: _zipped({"x/data.pkl": bytes(1 << 30), "x/version": b"3\n"}, zipfile.ZIP_DEFLATED),
    "a key of 2^60 nodes": lambda: _with_pickle(_tower()),
    "a memo of 2^31 values": lambda: _with_pickle(b"\x80\x02Nr\xff\xff\xff\x7f."),
    "a tensor of 2^40 elements": lambda: _saved({"w": torch.ones(1).expand(1 << 40)}),
    "names that lead outside": lambda: _zipped(
        {"../../pwned/data.pkl": pickle.dumps({}), "../../pwned/version": b"3\n"}
    ),
    "nothing": lambda: b"",
    "text": lambda: b"not a checkpoint" * 100,
    "a list": lambda: _saved([1, 2]),
    "half of it": lambda: _saved({"w": torch.ones(4)})[:300],
}


# Megatron-Core's


def _metas(place: Path) -> list[Path]:
    return sorted(path for path in place.glob("*/.zarray") if path.stat().st_size)  # some are empty, as marks


def _lie(change: dict[str, Any], place: Path) -> None:
    for path in _metas(place):
        path.write_text(json.dumps(json.loads(path.read_text()) | change))


def _write(name: str, data: bytes, place: Path) -> None:
    for path in _metas(place) if name == ".zarray" else [place / name]:
        path.write_bytes(data)


def _write_object(place: Path) -> None:
    """An array of pickled objects, as Zarr v2 has them."""
    _lie({"dtype": "|O", "filters": [{"id": "pickle"}], "compressor": None}, place)
    for path in _metas(place):
        for chunk in path.parent.iterdir():
            if not chunk.name.startswith("."):
                chunk.write_bytes(pickle.dumps(_Reduces(os.system, _TOUCH)))


def _link_chunks(to: str, place: Path) -> None:
    for path in _metas(place):
        for chunk in path.parent.iterdir():
            if not chunk.name.startswith("."):
                chunk.unlink()
                chunk.symlink_to(to)


def _make_fifo(name: str, place: Path) -> None:
    (place / name).unlink(missing_ok=True)
    os.mkfifo(place / name)


def _write_common(value: Any, place: Path) -> None:
    torch.save(value, place / "common.pt")


MEGATRON: dict[str, Callable[[Path], object]] = {
    "a payload in common.pt": partial(_write_common, {"x": _Reduces(os.system, _TOUCH)}),
    "a list for common.pt": partial(_write_common, [1]),
    "brackets in common.pt": partial(_write, "common.pt", _with_pickle(_deep())),
    "no common.pt": lambda place: (place / "common.pt").unlink(),
    "a FIFO for common.pt": partial(_make_fifo, "common.pt"),
    "a FIFO for metadata.json": partial(_make_fifo, "metadata.json"),
    "brackets in metadata.json": partial(_write, "metadata.json", b"[" * 100_000),
    "a list for metadata.json": partial(_write, "metadata.json", b"[]"),
    "no UTF-8 in metadata.json": partial(_write, "metadata.json", b"\xff"),
    "no JSON in .zarray": partial(_write, ".zarray", b"{"),
    "brackets in .zarray": partial(_write, ".zarray", b"[" * 100_000),
    "a list in .zarray": partial(_write, ".zarray", b"[]"),
    "a huge shape": partial(_lie, {"shape": [_HUGE, _HUGE]}),
    "a shape below 0": partial(_lie, {"shape": [-1]}),
    "a shape of text": partial(_lie, {"shape": "ab"}),
    "chunks of 0": partial(_lie, {"chunks": [0, 0]}),
    "chunks of another number of dimensions": partial(_lie, {"chunks": [1] * 40}),
    "an unknown type": partial(_lie, {"dtype": "nope"}),
    "a structured type": partial(_lie, {"dtype": [["a", "<f4"]]}),
    "an unknown compressor": partial(_lie, {"compressor": {"id": "nope"}}),
    "a wrong compressor": partial(_lie, {"compressor": {"id": "zlib", "level": 1}}),
    "pickled objects": _write_object,
    "chunks that are links outside": partial(_link_chunks, "/etc/passwd"),
    "chunks that are devices": partial(_link_chunks, "/dev/zero"),
}
