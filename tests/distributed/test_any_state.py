"""Any state, under any pattern, saved by any ranks and loaded by any others: what was saved is what is loaded.

Hypothesis makes the states. The ranks are threads, and the thresholds of the plan are lowered, so that tensors of a few elements
are packed, split into chunks, cut by borders and completed by parts as those of gigabytes are.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckpt.saving.saver
from ckpt import StateComponent
from ckpt.dist_checkpointing import ShardedTensor
from ckpt.errors import ReplicationError, ShardingError
from ckpt.format.box import Box, num_chunks, whole
from ckpt.format.digests import digest_of
from ckpt.format.dtypes import item_bytes, torch_dtype, zarr_name
from ckpt.format.manifest import ArrayEntry, CheckpointManifest, Index
from ckpt.planning.plan import plan_save
from ckpt.ranks.topology import Topology
from ckpt.state.flatten import flatten
from ckpt.state.plain import to_json
from ckpt.storage.stored import read_index, read_listed_file, read_manifest
from recipes.benchmark.plan_costs import SyntheticGPT
from tests.support import plain_safetensors
from tests.support.ranks import run_threads
from tests.support.states import ALL_DTYPES, BACKENDS, Held, coordinator, random_bits, same_bits
from tests.support.tilings import held

SHARED = ("global", "replicated")
OWN = ("per_rank", "per_group", "per_node")


@dataclass(frozen=True)
class Sizes:
    """Thresholds of the plan."""

    pack_below_bytes: int
    chunk_min_bytes: int
    chunk_max_bytes: int


@dataclass(frozen=True)
class Tensor:
    """A tensor of a made-up state.

    Attributes:
        saved, wanted: of a sharded one, the box of each rank that saves and of each that loads; None: not even its name.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    seed: int
    saved: tuple[Box | None, ...] = ()
    wanted: tuple[Box | None, ...] = ()


@dataclass(frozen=True)
class Component:
    """A component of a made-up run.

    Attributes:
        copies: its states: one per rank, group or node where each has its own, else one.
    """

    key: str
    pattern: str
    copies: tuple[dict[Any, Any], ...]


@dataclass(frozen=True)
class Example:
    """A whole run: who saves what through which backend, and who loads it.

    Attributes:
        nodes: ranks per host.
        groups: the number of each rank's group.
        into_nothing: load into objects that hold nothing yet, where the pattern allows it.
    """

    saved_by: int
    loaded_by: int
    nodes: tuple[int, ...]
    groups: tuple[int, ...]
    backend: str
    sizes: Sizes
    components: tuple[Component, ...]
    into_nothing: bool


keys = st.integers(-9, 99) | st.text(max_size=4).map(lambda text: text.replace(".", "/"))
plain_values = st.sampled_from(
    [
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=5),
        st.binary(max_size=5),
        st.complex_numbers(),
    ]
).flatmap(lambda kind: kind)  # one strategy, so that a leaf is a tensor as often as it is plain


def _dicts(children: st.SearchStrategy[Any], min_size: int = 0) -> st.SearchStrategy[dict[Any, Any]]:
    entries = st.tuples(keys, children)
    return st.lists(entries, min_size=min_size, max_size=4, unique_by=lambda entry: str(entry[0])).map(dict)


def _nested(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[Any, Any]]:
    """Dictionaries of dictionaries, lists and tuples of leaves and plain values."""
    tree = st.recursive(
        leaves | plain_values,
        lambda inside: _dicts(inside) | st.lists(inside, max_size=3) | st.lists(inside, max_size=3).map(tuple),
        max_leaves=6,
    )
    return _dicts(tree, min_size=1)


small_shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)
large_shapes = st.tuples(st.integers(20, 60), st.integers(5, 60))
tensors = st.builds(
    Tensor,
    st.sampled_from(ALL_DTYPES),
    small_shapes | st.tuples(st.integers(1, 60)) | large_shapes,
    st.integers(0, 1000),
)
to_cut = st.builds(Tensor, st.sampled_from(ALL_DTYPES), large_shapes, st.integers(0, 1000)) | tensors


@st.composite
def examples(draw: st.DrawFn) -> Example:
    saved_by = draw(st.integers(1, 5))
    patterns = draw(st.lists(st.sampled_from([*SHARED, *OWN, *["sharded"] * 5]), min_size=1, max_size=3))
    loaded_by = saved_by if set(patterns) & set(OWN) else draw(st.integers(1, 5))
    nodes = draw(st.sampled_from([(saved_by,), (saved_by - saved_by // 2, saved_by // 2)])) if saved_by > 1 else (1,)
    groups = tuple(draw(st.lists(st.integers(0, 2), min_size=saved_by, max_size=saved_by)))
    num_copies = {"per_rank": saved_by, "per_node": len(nodes), "per_group": len(set(groups))}

    @st.composite
    def sharded(draw: st.DrawFn) -> Tensor:
        tensor = draw(to_cut)
        saved, wanted = (tuple(draw(held(tensor.shape, ranks))) for ranks in (saved_by, loaded_by))
        return Tensor(tensor.dtype, tensor.shape, tensor.seed, saved, wanted)

    components = tuple(
        Component(
            f"c{number}",
            pattern,
            tuple(
                _gapless(draw(_nested(sharded() if pattern == "sharded" else tensors)))
                for _ in range(num_copies.get(pattern, 1))
            ),
        )
        for number, pattern in enumerate(patterns)
    )
    sizes = draw(
        st.sampled_from([Sizes(100, 50, 400), Sizes(0, 1000, 2000), Sizes(64, 2000, 1 << 20), Sizes(64 << 10, 1 << 20, 64 << 20)])
    )  # fmt: skip
    backend = draw(st.sampled_from(BACKENDS))
    return Example(saved_by, loaded_by, nodes, groups, backend, sizes, components, draw(st.booleans()))


def _gapless(tree: Any, *, in_list: bool = False) -> Any:
    """The same tree, but a rank that knows a list knows of all that is in it: it holds an empty piece, or all of a scalar."""
    if isinstance(tree, Tensor) and in_list:
        nothing = Box((0,) * len(tree.shape), (0,) * len(tree.shape))
        saved, wanted = (tuple(nothing if box is None else box for box in boxes) for boxes in (tree.saved, tree.wanted))
        return replace(tree, saved=saved, wanted=wanted)
    if isinstance(tree, dict):
        return {key: _gapless(child, in_list=in_list) for key, child in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)([_gapless(child, in_list=True) for child in tree])
    return tree


GONE = object()
"""Stands where a rank does not even know the name."""


def _state(tree: Any, make: Callable[[Tensor], Any]) -> Any:
    """The tree with real tensors in it, and without the names that this rank does not know."""
    if isinstance(tree, Tensor):
        return make(tree)
    if isinstance(tree, dict):
        made = {key: _state(child, make) for key, child in tree.items()}
        return {key: value for key, value in made.items() if value is not GONE}
    if isinstance(tree, list | tuple):
        return type(tree)([_state(child, make) for child in tree])
    return tree


def _piece(tensor: Tensor, boxes: Sequence[Box | None], rank: int, *, filled: bool) -> Any:
    box = boxes[rank]
    if box is None:
        return GONE
    bits = _own(tensor, filled=filled)
    if box == whole(tensor.shape) and tensor.seed % 2:
        return bits  # a plain tensor is whole, also in a sharded component
    return ShardedTensor.at("", bits[box.slices].clone(), tensor.shape, box.offsets)


def _own(tensor: Tensor, *, filled: bool) -> torch.Tensor:
    return random_bits(tensor.shape, tensor.dtype, tensor.seed if filled else tensor.seed + 1)


def _copy_of(component: Component, topology: Topology, example: Example) -> dict[Any, Any]:
    """The made-up state that this rank has of a component."""
    group = sorted(set(example.groups), key=example.groups.index).index(
        example.groups[topology.rank % example.saved_by]
    )
    number = {"per_rank": topology.rank, "per_node": topology.node_rank, "per_group": group}.get(component.pattern, 0)
    return component.copies[number]


def _components(example: Example, states: Sequence[Held]) -> list[StateComponent]:
    return [
        StateComponent(one.key, state, one.pattern, process_group_name="g" if one.pattern == "per_group" else None)
        for one, state in zip(example.components, states, strict=True)
    ]


def _groups(topology: Topology, example: Example) -> dict[str, list[int]]:
    if topology.world_size != example.saved_by:
        return {}
    mine = example.groups[topology.rank]
    return {"g": [rank for rank, group in enumerate(example.groups) if group == mine]}


def _save(topology: Topology, root: Path, example: Example) -> None:
    states = []
    for one in example.components:
        tree = _copy_of(one, topology, example)
        if one.pattern == "sharded":
            states.append(Held(_state(tree, lambda t: _piece(t, t.saved, topology.rank, filled=True))))
        else:
            is_heard = one.pattern != "global" or topology.is_lead
            states.append(Held(_state(tree, partial(_own, filled=is_heard))))
    coordinator(
        topology,
        root,
        _components(example, states),
        backend=example.backend,
        process_groups=_groups(topology, example),
        pattern_check="off",  # of a global component other ranks than 0 hold something else here, which nobody hears
    ).save_checkpoint(checkpoint_id="1", validate=True)


def _load(topology: Topology, root: Path, example: Example) -> None:
    states, wanted = [], []
    for one in example.components:
        tree = _copy_of(one, topology, example)
        if one.pattern == "sharded":
            states.append(Held(_state(tree, lambda t: _piece(t, t.wanted, topology.rank, filled=False))))
            wanted.append(_state(tree, lambda t: _piece(t, t.wanted, topology.rank, filled=True)))
        else:
            states.append(Held({} if example.into_nothing else _state(tree, partial(_own, filled=False))))
            wanted.append(_state(tree, partial(_own, filled=True)))
    coordinator(
        topology, root, _components(example, states), process_groups=_groups(topology, example)
    ).load_checkpoint()  # fmt: skip
    for one, state, want in zip(example.components, states, wanted, strict=True):
        assert state.loaded is not None
        _require_same(state.loaded, want, one.key)


def _require_same(got: dict[Any, Any], want: dict[Any, Any], what: str) -> None:
    """Equal tensors bit for bit, equal plain values of equal types, at equal places.

    Empty dictionaries may come and go: one rank's {} is another rank's dictionary of tensors.
    """
    found, expected = flatten(got, what), flatten(want, what)
    empty = {key for leaves in (found, expected) for key, value in leaves.plain.items() if value == {}}
    assert {k: path for k, path in found.paths.items() if k not in empty} == {
        k: path for k, path in expected.paths.items() if k not in empty
    }
    assert _typed(found.plain) == _typed(expected.plain)
    for key, tensor in expected.tensors.items():
        other = found.tensors[key]
        if isinstance(tensor, ShardedTensor):
            assert isinstance(other, ShardedTensor)
            assert other.box == tensor.box
            tensor, other = tensor.data, other.data
        assert isinstance(other, torch.Tensor)
        assert same_bits(other, tensor), (what, key)


def _typed(plain: dict[str, Any]) -> dict[str, str]:
    return {key: json.dumps(to_json(value, key)) for key, value in plain.items() if value != {}}


def _require_well_stored(checkpoint: Path, example: Example) -> None:
    """One writer per chunk, every element and every byte once, and no more chunks than sizes and borders call for."""
    manifest = read_manifest(checkpoint)
    indexes = {rank: read_index(checkpoint, manifest, rank) for rank in manifest.index_ranks()}
    listed = Counter(
        (path, number) for index in indexes.values() for path in index.chunks for number in index.chunks[path]
    )
    assert set(listed.values()) <= {1}, "no chunk has two writers"
    for name, entry in manifest.arrays.items():
        assert entry.alias_of is None
        if entry.grid is None:
            _require_covered(name, entry, indexes)
            continue
        numbers = range(math.prod(num_chunks(entry.shape, entry.grid)))
        assert len(numbers) <= _most_chunks(entry, example)
        for number in numbers:
            assert number in indexes[entry.writer_of(number)].chunks[str(entry.path)]
            assert listed.pop((str(entry.path), number)) == 1
    packed = {path for index in indexes.values() for path, length in index.packed.items() if length}
    assert set(listed) == {(path, 0) for path in packed}, "nothing else is stored"
    for key, component in manifest.components.items():
        plain = sum(len(_plain_bytes(checkpoint, manifest, key, prefix)) for prefix in component.plain_in)
        unique = sum(math.prod(entry.shape) * item_bytes(entry.dtype) for entry in manifest.arrays_of(key).values())
        assert component.size_bytes == unique + plain, "what was written is what there is, once"
    if example.backend == "safetensors":
        _require_open_to_others(checkpoint, manifest, example)


def _require_open_to_others(checkpoint: Path, manifest: CheckpointManifest, example: Example) -> None:
    """The safetensors library finds every tensor by its key, and no others, whole or in parts that make it up."""
    own = {one.key for one in example.components if one.pattern in OWN}
    found: dict[Path, dict[str, ArrayEntry]] = {}
    for name, entry in manifest.arrays.items():
        component, _, key = name.partition("/")
        prefix, _, rest = key.partition("/")
        folder, key = (checkpoint / component / prefix, rest) if component in own else (checkpoint / component, key)
        found.setdefault(folder, {})[key] = entry
    assert {file.parent for file in checkpoint.rglob("*.safetensors")} == found.keys()
    for folder, entries in found.items():
        plain_safetensors.names_in(folder)
        assert plain_safetensors.keys_in(folder) == entries.keys()
        for key, entry in entries.items():
            tensor = plain_safetensors.read(folder, key)
            assert (zarr_name(tensor.dtype), tuple(tensor.shape)) == (entry.dtype, entry.shape)


def _plain_bytes(checkpoint: Path, manifest: CheckpointManifest, key: str, prefix: str) -> bytes:
    path = f"{key}/{prefix}plain.json"
    return read_listed_file(checkpoint, manifest, path) if path in manifest.files else (checkpoint / path).read_bytes()


def _require_covered(name: str, entry: ArrayEntry, indexes: dict[int, Index]) -> None:
    times = torch.zeros(entry.shape, dtype=torch.int64)
    for rank in entry.packed_in:
        for piece in indexes[rank].pieces[name]:
            times[piece.box.slices] += 1
    assert bool((times == 1).all()), name
    assert {rank for rank, index in indexes.items() if name in index.pieces} == set(entry.packed_in)


def _most_chunks(entry: ArrayEntry, example: Example) -> float:
    """As many as ranks cut it into, or chunks of the smallest size; and 16 times those of the largest, to follow borders.

    Each dimension may end in one chunk that is clipped to one element, so at worst half of the chunks along it count.
    """
    total = math.prod(entry.shape) * item_bytes(entry.dtype)
    clipped = 2 ** len(entry.shape)
    at_least = max(example.saved_by, clipped * total / example.sizes.chunk_min_bytes)
    return at_least + 16 * clipped * total / example.sizes.chunk_max_bytes


def _survives(example: Example) -> None:
    sizes = example.sizes
    lowered = partial(
        plan_save,
        pack_below_bytes=sizes.pack_below_bytes,
        chunk_min_bytes=sizes.chunk_min_bytes,
        chunk_max_bytes=sizes.chunk_max_bytes,
    )
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        with patch.object(ckpt.saving.saver, "plan_save", lowered):
            run_threads(example.saved_by, _save, root, example, agree_s=30.0, nodes=example.nodes)
        _require_well_stored(root / "checkpoint-1", example)
        nodes = example.nodes if example.loaded_by == example.saved_by else None
        run_threads(example.loaded_by, _load, root, example, agree_s=30.0, nodes=nodes)


any_size = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


@given(examples())
@settings(max_examples=8, suppress_health_check=any_size)
def test_what_was_saved_is_what_is_loaded_and_lies_in_the_checkpoint_once(example: Example) -> None:
    _survives(example)


@pytest.mark.full
@given(examples())
@settings(max_examples=400, suppress_health_check=any_size)
def test_what_was_saved_is_what_is_loaded_of_many_more_states(example: Example) -> None:
    _survives(example)


def _save_nested_differently(topology: Topology, root: Path) -> str:
    state = {"a": {"x": torch.arange(3)}, "n": 1} if topology.rank == 1 else {"a": 5, "n": 1}
    with pytest.raises(ShardingError) as refused:
        coordinator(topology, root, [StateComponent("model", Held(state), "sharded")]).save_checkpoint(
            checkpoint_id="1"
        )
    return str(refused.value)


def test_a_value_in_whose_place_another_rank_has_a_dictionary_is_refused_on_every_rank(tmp_path: Path) -> None:
    (said,) = set(run_threads(3, _save_nested_differently, tmp_path))
    assert "component model: a is 5 on rank 0, and rank 1 has a.x below it" in said
    assert list(tmp_path.glob("checkpoint-*")) == []


def test_a_tensor_that_another_rank_has_a_value_for_is_refused_on_every_rank(tmp_path: Path) -> None:
    (said,) = set(run_threads(3, _save_a_tensor_and_a_value, tmp_path))
    assert (
        "component model: a is a tensor on rank 1 and 5 on rank 0; a plain value of a sharded component must be equal"
        in said
    )
    assert list(tmp_path.glob("checkpoint-*")) == []


def _save_a_tensor_and_a_value(topology: Topology, root: Path) -> str:
    state = {"a": 5} if topology.rank == 0 else {"a": torch.arange(3)}
    with pytest.raises(ReplicationError) as refusal:
        coordinator(topology, root, [StateComponent("model", Held(state), "sharded")]).save_checkpoint(
            checkpoint_id="1"
        )
    return str(refusal.value)


def _gpt(case: SyntheticGPT, rank: int, *, filled: bool) -> dict[str, Held]:
    """The pieces of a made-up GPT and its optimizer that a rank holds; each tensor has bits of its own."""
    states: dict[str, Held] = {"model": Held({}), "optimizer": Held({})}
    for part in case.table(rank).parts:
        for name, at in part.names:
            dtype, shape, box = part.places[at]
            component, _, key = name.partition("/")
            seed = int(digest_of(name.encode())[:8], 16) if filled else 0
            piece = random_bits(shape, torch_dtype(dtype), seed)[box.slices].clone()
            states[component].state[key] = ShardedTensor.at(key, piece, shape, box.offsets)
    return states


def _save_gpt(topology: Topology, root: Path, case: SyntheticGPT) -> None:
    components = [StateComponent(key, held, "sharded") for key, held in _gpt(case, topology.rank, filled=True).items()]
    coordinator(topology, root, components).save_checkpoint(checkpoint_id="1")


def _load_gpt(topology: Topology, root: Path, case: SyntheticGPT) -> None:
    states, wanted = (_gpt(case, topology.rank, filled=filled) for filled in (False, True))
    coordinator(
        topology, root, [StateComponent(key, held, "sharded") for key, held in states.items()]
    ).load_checkpoint()
    for component, want in wanted.items():
        for key, piece in want.state.items():
            assert same_bits(states[component].state[key].data, piece.data), (component, key)


def test_a_gpt_with_a_sharded_optimizer_moves_from_tensor_and_pipeline_ranks_to_others(tmp_path: Path) -> None:
    saved = SyntheticGPT(tp=2, pp=2, dp=2, layers=4, width=40, vocab=70, shard_optimizer=True)
    loaded = replace(saved, tp=1, pp=3, dp=1, shard_optimizer=False)
    with patch.object(
        ckpt.saving.saver, "plan_save", partial(plan_save, pack_below_bytes=4000, chunk_min_bytes=2000)
    ):
        run_threads(saved.world_size, _save_gpt, tmp_path, saved, agree_s=30.0)
    run_threads(loaded.world_size, _load_gpt, tmp_path, loaded, agree_s=30.0)
    manifest = read_manifest(tmp_path / "checkpoint-1")
    elements = sum(math.prod(entry.shape) for entry in manifest.arrays_of("model").values())
    assert elements == saved.num_parameters == loaded.num_parameters
