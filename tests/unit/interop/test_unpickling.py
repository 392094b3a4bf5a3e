"""The one door to pickled files: what comes through, what is stood in for, and that nothing of theirs runs."""

from __future__ import annotations

import argparse
import collections
import enum
import io
import os
import pathlib
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from ckpt.errors import ConfigurationError, CorruptCheckpointError
from ckpt.format.unknown import UnknownObject
from ckpt.interop.unpickling import unknown_in, unpickle
from tests.support.states import global_index
from tests.support.values import same_values

HERE = __name__


class Kind(enum.Enum):
    DECODER = 1


class Held:
    """An object of some class, with state."""

    def __init__(self, **state: Any) -> None:
        self.__dict__.update(state)


class Malicious:
    """Makes something when it is unpickled: through a function that torch blocks, or through one that it only does not know."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


class OwnDict(dict[str, int]):
    pass


class Pair(NamedTuple):
    one: Any
    other: Any


class Lies:
    """A NumPy array that says it is longer than its bytes."""

    def __reduce__(self) -> Any:
        function, args, (version, _, dtype, is_fortran, data) = np.arange(3.0).__reduce__()
        return function, args, (version, (4,), dtype, is_fortran, data)


@pytest.fixture(autouse=True)
def nothing_is_left_allowed() -> Iterator[None]:
    before = torch.serialization.get_safe_globals()
    yield
    assert set(torch.serialization.get_safe_globals()) == set(before)


def saved(tmp_path: Path, value: Any, **options: Any) -> Path:
    torch.save(value, tmp_path / "file.pt", **options)
    return tmp_path / "file.pt"


@pytest.mark.parametrize("in_zip", [True, False])
def test_tensors_plain_values_and_harmless_containers_come_back(tmp_path: Path, in_zip: bool) -> None:
    made = collections.defaultdict(list)
    made["a"].append(1)
    value = {
        "args": argparse.Namespace(lr=0.1, dtype=torch.bfloat16, deep=argparse.Namespace(x=(1, [2]))),
        "simple": types.SimpleNamespace(a=None),
        "extra": io.BytesIO(b"\x00\xff"),
        "bytes": [b"\x80", b""],
        "sets": [{1, 2}, frozenset({"a"})],
        "ordered": collections.OrderedDict(b=1, a=2),
        "counted": collections.Counter("abb"),
        **({"default": made} if in_zip else {}),
        "big": 2**70 + 1,
        "size": torch.Size([2, 3]),
        "path": pathlib.PurePosixPath("/a/b"),
        "device": torch.device("cpu"),
        "complex": 1 - 2j,
        "tensor": global_index((3, 2), torch.bfloat16),
        5: (torch.float32, True, -0.0),
    }
    found = unpickle(saved(tmp_path, value, _use_new_zipfile_serialization=in_zip))
    assert same_values(found, value)
    assert list(found["ordered"]) == ["b", "a"]
    assert type(found["counted"]) is collections.Counter and type(found["ordered"]) is collections.OrderedDict
    assert unknown_in(found) == {}


def test_a_path_comes_back_as_the_path_of_this_system(tmp_path: Path) -> None:
    assert unpickle(saved(tmp_path, [Path("a")])) == [Path("a")]


@pytest.mark.parametrize("name", ["?", "i1", "u2", "<i4", ">i4", "u8", "f2", ">f8", "c8", "c16"])
def test_numbers_and_arrays_of_numpy_come_back_without_numpys_own_functions(tmp_path: Path, name: str) -> None:
    array = np.arange(24).reshape(2, 3, 4).astype(name)
    value = [array, np.asfortranarray(array), array[1, ::2, 1:], array[0, 1, 2], array[:0], np.array(array[0, 0, 1])]
    found = unpickle(saved(tmp_path, value))
    assert same_values(found, value)
    assert all(one.flags.writeable for one in found if isinstance(one, np.ndarray))


def test_the_state_of_a_random_generator_comes_back(tmp_path: Path) -> None:
    generator = np.random.RandomState(3)
    state = generator.get_state()
    first = generator.random_sample(5)
    generator.set_state(unpickle(saved(tmp_path, state)))
    assert generator.random_sample(5).tolist() == first.tolist()


def test_an_object_of_another_class_is_refused_with_the_way_to_it(tmp_path: Path) -> None:
    value = {"args": argparse.Namespace(kind=Kind.DECODER, lr=1.0), "list": [1, (Held(a=1), np.array(["text"]))]}
    with pytest.raises(ConfigurationError) as refused:
        unpickle(saved(tmp_path, value))
    text = str(refused.value)
    assert (
        f"file.pt holds objects of classes that are not built unasked: args.kind: {HERE}.Kind; list[1][0]: {HERE}.Held; "
        in text
    )
    assert "; list[1][1]: numpy._core.multiarray._reconstruct. " in text
    assert "torch.serialization.add_safe_globals([<class>])" in text and 'unknown="keep"' in text


def test_a_refusal_names_a_few_and_counts_the_others(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"\[7\]: [\w.]+Held and 12 more\. Allow"):
        unpickle(saved(tmp_path, [Held(at=at) for at in range(20)]))


def test_unknown_objects_that_are_kept_say_what_they_are_and_the_rest_is_as_it_was(tmp_path: Path) -> None:
    value = {
        "kind": Kind.DECODER,
        "held": Held(a=[np.int32(3)], b=Kind.DECODER),
        "class": Held,
        "function": os.path.join,
        "keys": {Kind.DECODER: 1},
        "set": {Kind.DECODER, 2},
        "tensor": global_index((2, 2)),
    }
    found = unpickle(saved(tmp_path, value), unknown="keep")
    kind, held = found["kind"], found["held"]
    assert isinstance(kind, UnknownObject) and (kind.name, kind.args) == (f"{HERE}.Kind", (1,))
    assert isinstance(held, UnknownObject) and (held.name, held.args) == (f"{HERE}.Held", ())
    assert same_values(held.state["a"], [np.int32(3)]) and held.state["b"] is kind
    assert found["class"].name == f"{HERE}.Held" and found["class"].args is None
    assert repr(kind) == f"<unknown {HERE}.Kind(1)>" and repr(found["class"]) == f"<unknown {HERE}.Held>"
    assert found["keys"] == {kind: 1} and found["set"] == {kind, 2}
    assert same_values(found["tensor"], value["tensor"])
    places = unknown_in(found)
    assert places["kind"] == f"{HERE}.Kind" and places["function"] == "posixpath.join"
    assert set(places) == {"kind", "held", "class", "function"}, "the same enum member elsewhere is the same object"


@pytest.mark.parametrize("unknown", ["refuse", "keep"])
@pytest.mark.parametrize("function", [os.mkdir, open, exec], ids=["blocked", "unknown", "built in"])
def test_code_in_a_pickle_does_not_run(tmp_path: Path, function: Any, unknown: Any) -> None:
    args = {os.mkdir: ["it ran"], open: ["it ran", "w"], exec: ["open('it ran', 'w')"]}[function]
    file = saved(tmp_path, {"w": torch.ones(2), "x": Malicious(function, *args)})
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(tmp_path)
        if unknown == "refuse" or function is os.mkdir:
            with pytest.raises(ConfigurationError, match=r"file\.pt holds .*\b(mkdir|open|exec)\b"):
                unpickle(file, unknown=unknown)
        else:
            made = unpickle(file, unknown=unknown)["x"]
            assert isinstance(made, UnknownObject) and list(made.args or ()) == args
    assert not (tmp_path / "it ran").exists()


def test_a_class_that_the_user_allows_is_built_and_stays_allowed(tmp_path: Path) -> None:
    file = saved(tmp_path, {"kind": Kind.DECODER, "held": Held(other=1), "args": argparse.Namespace(kind=Kind.DECODER)})
    with torch.serialization.safe_globals([Kind, argparse.Namespace]):
        found = unpickle(file, unknown="keep")
        assert {Kind, argparse.Namespace} <= set(torch.serialization.get_safe_globals()), (
            "ours is taken back, not the user's"
        )
    assert found["kind"] is Kind.DECODER is found["args"].kind
    assert unknown_in(found) == {"held": f"{HERE}.Held"}
    with torch.serialization.safe_globals([Kind, Held]):
        assert unpickle(file)["held"].other == 1


def test_an_unknown_object_in_one_that_the_user_allows_is_found(tmp_path: Path) -> None:
    file = saved(tmp_path, [Held(inner=[Kind.DECODER])])
    with torch.serialization.safe_globals([Held]):
        with pytest.raises(ConfigurationError, match=rf"unasked: \[0\]\.inner\[0\]: {HERE}\.Kind\."):
            unpickle(file)
        assert isinstance(unpickle(file, unknown="keep")[0].inner[0], UnknownObject)


def test_an_unknown_object_that_nobody_can_find_is_refused_all_the_same(tmp_path: Path) -> None:
    file = saved(tmp_path, [Pair(1, Kind.DECODER)])
    with (
        torch.serialization.safe_globals([Pair]),
        pytest.raises(ConfigurationError, match=rf"unasked: inside of another object: {HERE}\.Kind\."),
    ):
        unpickle(file)


def test_numpys_own_functions_are_used_where_the_user_allows_all_of_them(tmp_path: Path) -> None:
    array = np.array(["a", "text"])
    file = saved(tmp_path, array)
    with torch.serialization.safe_globals([np._core.multiarray._reconstruct, np.ndarray, np.dtype, np.dtypes.StrDType]):
        assert unpickle(file).tolist() == ["a", "text"]
    with (
        torch.serialization.safe_globals([np._core.multiarray._reconstruct]),
        pytest.raises(ConfigurationError, match="holds numpy.ndarray, which torch's weights-only reader"),
    ):
        unpickle(file)


def test_what_was_shared_is_shared_and_circles_end(tmp_path: Path) -> None:
    inner: dict[str, Any] = {"array": np.arange(3)}
    inner["self"] = inner
    found = unpickle(saved(tmp_path, [inner, inner, inner["array"]]))
    assert found[0] is found[1] is found[0]["self"]
    assert found[0]["array"] is found[2] and found[2].tolist() == [0, 1, 2]


def test_a_dictionary_of_an_unknown_class_cannot_be_stood_in_for(tmp_path: Path) -> None:
    file = saved(tmp_path, {"own": OwnDict(a=1)})
    for unknown in ("refuse", "keep"):
        with pytest.raises(ConfigurationError, match=rf"file\.pt holds {HERE}\.OwnDict, .*there is no stand-in"):
            unpickle(file, unknown=unknown)  # type: ignore[arg-type]


def test_an_older_file_than_a_zip_is_read_but_unknown_objects_refuse_it(tmp_path: Path) -> None:
    file = saved(tmp_path, [np.float32(1.5), Kind.DECODER], _use_new_zipfile_serialization=False)
    with pytest.raises(ConfigurationError, match=rf"holds {HERE}\.Kind"):
        unpickle(file, unknown="keep")
    assert unpickle(saved(tmp_path, [np.float32(1.5)], _use_new_zipfile_serialization=False)) == [np.float32(1.5)]


@pytest.mark.parametrize("damage", ["cut", "other", "empty", "gone", "lies"])
def test_an_unreadable_file_is_damage(tmp_path: Path, damage: str) -> None:
    file = saved(tmp_path, Lies() if damage == "lies" else {"w": torch.ones(9)})
    if damage == "gone":
        file.unlink()
    elif damage != "lies":
        file.write_bytes({"cut": file.read_bytes()[:-200], "other": b"neither zip nor pickle", "empty": b""}[damage])
    with pytest.raises(CorruptCheckpointError, match=r"file\.pt cannot be read"):
        unpickle(file, unknown="keep")


def test_threads_may_read_at_once(tmp_path: Path) -> None:
    file = saved(tmp_path, [argparse.Namespace(kind=Kind.DECODER, at=np.int64(at)) for at in range(50)])
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(unpickle(file, unknown="keep"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8, "one of them failed"
    assert all(len(unknown_in(one)) == 1 and one[49].at == 49 for one in found)
