"""What another program's checkpoint holds of a component is the same in the fast way for named tensors as in the one for any state."""

from __future__ import annotations

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ckpt.errors import CorruptCheckpointError, MissingStateError, ShardingError
from ckpt.loading.parts_of_state import _joined_keys, _nested
from ckpt.state.flatten import flatten

steps = (
    st.sampled_from(["a", "b", "a.b", ""])
    | st.integers(0, 1)
    | st.tuples(st.integers(0, 1), st.sampled_from(["list", "tuple"]))
)


@given(st.lists(st.lists(steps, min_size=1, max_size=3).map(tuple), max_size=4, unique=True))
@example([("a",), ("a", "b")])
@example([("a.b",), ("a", "b")])
@example([("a", "x"), ("b",), ("a", "y")])
def test_joined_keys_are_those_of_the_flattened_state(paths: list[tuple[object, ...]]) -> None:
    tensors = {path: torch.empty(0) for path in paths}
    keys = _joined_keys(tensors)  # type: ignore[arg-type]
    if keys is None:
        has_other_steps = not all(isinstance(step, str) for path in paths for step in path)
        assert has_other_steps or _contradict(tensors)
        return
    flat = flatten(_nested(tensors, "it"), "it")  # type: ignore[arg-type]
    assert {key: id(one) for key, one in flat.tensors.items()} == {
        key: id(one) for key, one in zip(keys, tensors.values(), strict=True)
    }
    assert flat.paths == dict(zip(keys, paths, strict=True))


def _contradict(tensors: dict[tuple[object, ...], torch.Tensor]) -> bool:
    """Whether the state cannot be built, or flattened."""
    try:
        flatten(_nested(tensors, "it"), "it")  # type: ignore[arg-type]
    except (ShardingError, CorruptCheckpointError, MissingStateError):
        return True
    return any(path[:end] in tensors for path in tensors for end in range(1, len(path)))
