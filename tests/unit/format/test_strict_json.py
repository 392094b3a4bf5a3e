"""JSON into types: what one thread may do, several may do at once; keys are counted without parsing."""

from __future__ import annotations

import dataclasses
import enum
import gc
import json
import os
import sys
import threading

from hypothesis import given
from hypothesis import strategies as st

from ckpt.format import strict_json
from ckpt.format.strict_json import num_keys

THREADS, TURNS = 4, 60


class Colour(enum.Enum):
    RED = "red"


def _meet_in_the_first_use_of_a_class(turn: int) -> list[object]:
    inner = dataclasses.make_dataclass(f"Inner{turn}", [("colour", Colour), ("name", str | None, None)])
    fields = [("one", inner), ("more", tuple[inner, ...]), ("colour", Colour), ("ranks", tuple[int, ...], ())]
    outer = dataclasses.make_dataclass(f"Outer{turn}", fields)
    data = b'[{"one": {"colour": "red"}, "more": [{"colour": "red", "name": "a"}], "colour": "red"}]'
    start = threading.Barrier(THREADS)
    found: list[object] = []

    def work(number: int) -> None:
        start.wait()
        kind = list[outer]  # type: ignore[valid-type]
        if number % 2:
            found.append(strict_json.decode(data, kind))
        else:
            found.append(strict_json.read(data, kind, "data"))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_threads_may_meet_in_the_first_use_of_a_class() -> None:
    child = os.fork()
    if child == 0:  # what goes wrong here ends the process by SIGSEGV
        gc.disable()  # a store of torch that an earlier test has left, with its thread, cannot be closed in a fork
        sys.setswitchinterval(1e-6)
        found = [_meet_in_the_first_use_of_a_class(turn) for turn in range(TURNS)]
        os._exit(any(len(one) != THREADS or any(other != one[0] for other in one) for one in found))
    assert os.waitpid(child, 0)[1] == 0


trees = st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


@given(trees, st.booleans())
def test_keys_are_counted_without_parsing(tree: object, ascii_only: bool) -> None:
    def count(node: object) -> int:
        inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        return (len(node) if isinstance(node, dict) else 0) + sum(map(count, inner))

    assert num_keys(json.dumps(tree, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")) == count(tree)
