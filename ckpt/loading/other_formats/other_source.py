"""What a checkpoint of another program holds of a component. See `ckpt.loading.sources.CheckpointSource`.

The first step of a path names the component: "model", "optimizer". Where there is no "model", tensors outside of any component are it, as
torchtitan saves them. All ranks share every component: the formats know no copies of single ranks.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ckpt.errors import ConfigurationError, CorruptCheckpointError, MissingStateError
from ckpt.format.dtypes import torch_dtype
from ckpt.format.gc_pause import gc_paused
from ckpt.format.manifest import MANIFEST_NAME, STATE, ArrayEntry
from ckpt.format.unpickling import UnknownObject, unknown_in, without_unknown
from ckpt.loading.other_formats.dcp_folders import is_dcp, open_dcp
from ckpt.loading.other_formats.deepspeed_folders import is_deepspeed, open_deepspeed
from ckpt.loading.other_formats.megatron_folders import is_megatron, open_megatron
from ckpt.loading.other_formats.orbax_folders import is_orbax, open_orbax
from ckpt.loading.other_formats.other_checkpoint import OtherCheckpoint, Step
from ckpt.loading.other_formats.safetensors_files import is_safetensors, open_safetensors
from ckpt.loading.other_formats.torch_files import is_torch_file, open_torch_file
from ckpt.loading.report import some_of
from ckpt.loading.sources import CheckpointSource, Rows, require_same_kind
from ckpt.loading.strategy import LoadingStrategy, Reading, ReadRequest
from ckpt.memory.device import Device
from ckpt.ranks.topology import Topology
from ckpt.state.abilities import NamedFromPositions, offers
from ckpt.state.flatten import Leaves, flatten, rows_of
from ckpt.state.sharing import OWN_COPIES, Sharing, SharingPattern, StateComponent

_log = logging.getLogger("ckpt")

MODEL = "model"
_Form = tuple[str, tuple[int, ...]]
"""Data type and shape of a tensor."""
_OPEN: dict[str, tuple[Callable[[Path], bool], Callable[..., OtherCheckpoint]]] = {
    "megatron": (is_megatron, open_megatron),
    "dcp": (is_dcp, open_dcp),
    "safetensors": (is_safetensors, lambda path, *, allow_pickle: open_safetensors(path)),
    "deepspeed": (is_deepspeed, open_deepspeed),
    "orbax": (is_orbax, lambda path, *, allow_pickle: open_orbax(path)),
    "torch": (is_torch_file, open_torch_file),
}


def format_at(path: Path) -> str | None:
    """The format of another program's checkpoint at a path; None: there is one of this package, or none that is known."""
    if (path / MANIFEST_NAME).exists():
        return None
    return next((name for name, (is_one, _) in _OPEN.items() if is_one(path)), None)


def open_other(path: Path, format: str, *, allow_pickle: bool) -> OtherCheckpoint:
    """Open a checkpoint of this format for reading by one rank.

    Raises:
        CheckpointNotFoundError: it holds pickles, and these are not allowed.
        CorruptCheckpointError: what describes it is damaged.
    """
    return _OPEN[format][1](path, allow_pickle=allow_pickle)


class OtherSource(CheckpointSource):
    """A checkpoint of another program, open for reading by one rank."""

    run_id: str | None = None
    history: Mapping[str | None, int] = MappingProxyType({})
    config_text = ""
    metrics: Mapping[str, float | None] = MappingProxyType({})
    metadata: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self, path: Path, checkpoint: OtherCheckpoint, topology: Topology, strategy: LoadingStrategy, device: Device
    ) -> None:
        number = re.search(r"[0-9]+$", (checkpoint.named_by or path).name)
        self.checkpoint_id = (
            number[0] if number else "0"
        )  # the step of "step-100" and "iter_0000100"; weights to begin with have none
        self._checkpoint = checkpoint
        self.topology = topology
        self._strategy = strategy
        self._device = device
        self._found: dict[str, tuple[Leaves, dict[str, str]]] = {}
        self._renamed: dict[str, bool] = {}  # component -> whether `_found` has the names of an object that renames

    def holds(self, key: str) -> bool:
        return key == STATE or key in self._keys

    def component_keys(self) -> Collection[str]:
        return [STATE] if STATE in self._keys else self._keys

    def only_saved(self, declared: Collection[str]) -> list[str]:
        """See `CheckpointSource.only_saved`: those with tensors below their name. Others, such as "args" and "epoch", are notes."""
        if STATE in declared:  # all of it, as one state dict
            return []
        nested = {_name(one.path[0]) for one in self._checkpoint.tensors.values() if len(one.path) > 1}
        return [key for key in self._tensors if key in nested and key not in declared]

    def saved_sharing(self, component: StateComponent) -> Sharing | None:
        """See `CheckpointSource.saved_sharing`: shared by all ranks, however many had saved it."""
        return Sharing(SharingPattern.SHARDED)

    def same_pattern(self, component: StateComponent) -> bool:
        return component.pattern not in OWN_COPIES

    def own_prefix(self, component: StateComponent) -> str:
        require_same_kind(component, SharingPattern.SHARDED)
        return ""

    def moved(self, component: StateComponent) -> str | None:
        return f"saved by {self._checkpoint.program}, which does not say by how many ranks"

    def prefixes(self, component: StateComponent) -> list[str]:
        return [""]

    @gc_paused()
    def entries(self, component: StateComponent, prefix: str) -> Mapping[str, ArrayEntry]:
        _, names = self._leaves(component)
        entries: dict[str, ArrayEntry] = {}
        alike: dict[tuple[str, tuple[int, ...]], ArrayEntry] = {}
        first: dict[Hashable, str] = {}
        tensors = self._checkpoint.tensors
        for key, name in names.items():
            one = tensors[name]
            form = one.dtype, one.shape
            entry = alike.get(form)
            if entry is None:
                entry = alike[form] = ArrayEntry(*form)
            if one.memory is not None and (tied := first.setdefault(one.memory, key)) != key:
                entry = ArrayEntry(*form, alias_of=f"{component.key}/{tied}")
            entries[key] = entry
        return entries

    def rows(self, component: StateComponent, prefix: str) -> Rows:
        leaves, names = self._leaves(component)
        return rows_of(leaves, component.key, paths_of=[key for key in names if leaves.paths[key] != (key,)])

    def contents(self, component: StateComponent, prefix: str) -> Mapping[str, Any]:
        raise AssertionError("there is one copy of each component, so none are compared")

    def check(self, optional: Collection[str]) -> dict[str, dict[str, Any]]:
        """See `CheckpointSource.check`: other programs keep no digests."""
        return {}

    def prepare(self, requests: Sequence[ReadRequest]) -> Reading:
        with gc_paused():
            named = [
                ReadRequest(self._found[key][1][rest], request.label, request.box, request.out)
                for request in requests
                for key, _, rest in [request.name.partition("/")]
            ]
        return self._strategy.prepare(named, self._checkpoint, self.topology, self._device, verify=False)

    @cached_property
    def _keys(self) -> list[str]:
        return list(dict.fromkeys((*self._tensors, *self._values)))

    @cached_property
    def _tensors(self) -> dict[str, dict[tuple[Step, ...], str]]:
        """Component -> path in it -> name of the tensor."""
        found: dict[str, dict[tuple[Step, ...], str]] = {}
        tensors = self._checkpoint.tensors
        if not any(len(one.path) > 1 for one in tensors.values()):
            return {MODEL: {one.path or (MODEL,): name for name, one in tensors.items()}} if tensors else {}
        has_model = any(len(one.path) > 1 and one.path[0] == MODEL for one in tensors.values())
        for name, one in tensors.items():
            steps = one.path if len(one.path) > 1 or has_model else (MODEL, *one.path)
            found.setdefault(_name(steps[0]), {})[steps[1:] or steps] = name
        return found

    @cached_property
    def _values(self) -> dict[str, dict[tuple[Step, ...], Callable[[], Any]]]:
        """Component -> path in it -> function that returns the plain value."""
        found: dict[str, dict[tuple[Step, ...], Callable[[], Any]]] = {}
        for steps, value in self._checkpoint.values.items():
            if steps:  # else it is the whole state, which is empty
                found.setdefault(_name(steps[0]), {})[steps[1:] or steps] = value
        return found

    def _tensors_of(self, key: str) -> dict[tuple[Step, ...], str]:
        """Path -> name of a component's tensors. `ckpt.load` takes all as one state dict, also where a part of it has that name."""
        if key == STATE:
            return {one.path: name for name, one in self._checkpoint.tensors.items()}
        return self._tensors.get(key, {})

    def _leaves(self, component: StateComponent) -> tuple[Leaves, dict[str, str]]:
        """The state of a component, whose tensors have no memory or are left out, and key -> name of the tensor in the checkpoint."""
        key, renames = component.key, offers(component.stateful, NamedFromPositions)
        if key not in self._found or self._renamed[key] != renames:
            tensors, values = self._tensors_of(key), self._plain_values(key)
            forms = self._forms(tensors.values())
            joined = None if values or renames else _joined_keys(tensors)
            if joined is None:
                self._found[key] = self._flattened(component, tensors, values, forms)
            else:  # nothing but named tensors, as most models are
                self._found[key] = (
                    Leaves({}, {}, dict(zip(joined, tensors, strict=True))),
                    dict(zip(joined, tensors.values(), strict=True)),
                )
            self._renamed[key] = renames
        return self._found[key]

    def _forms(self, names: Iterable[str]) -> dict[_Form, torch.Tensor]:
        """A tensor without memory for each data type and shape.

        Raises:
            CorruptCheckpointError: no tensor has such a shape.
        """
        tensors = self._checkpoint.tensors
        some = {(one.dtype, one.shape): name for name in names for one in [tensors[name]]}
        made: dict[_Form, torch.Tensor] = {}
        for (dtype, shape), name in some.items():
            try:
                made[dtype, shape] = torch.empty(shape, dtype=torch_dtype(dtype), device="meta")
            except RuntimeError:  # a side of 0 hides that the others overflow
                raise CorruptCheckpointError(
                    f"{self._checkpoint.root}: no tensor has the shape of {name!r:.80}, {list(shape)!r:.80}"
                ) from None
        return made

    def _flattened(
        self,
        component: StateComponent,
        tensors: Mapping[tuple[Step, ...], str],
        values: Mapping[tuple[Step, ...], Any],
        forms: Mapping[_Form, torch.Tensor],
    ) -> tuple[Leaves, dict[str, str]]:
        """`_leaves` of a state with values, lists or tuples, or of an object that renames."""
        placeholders: dict[int, str] = {}
        leaves: dict[tuple[Step, ...], Any] = {}
        for path, name in tensors.items():
            one = self._checkpoint.tensors[name]
            form = forms[one.dtype, one.shape]
            leaves[path] = form.detach()  # an object of its own, in half of the time of a new one
            placeholders[id(leaves[path])] = name
        leaves |= values
        if leaves.get((component.key,)) == {}:  # the component itself, without any state
            del leaves[component.key,]
        state = _nested(leaves, component.key)
        if offers(component.stateful, NamedFromPositions):
            state = component.stateful.named_from_positions(state)
        flat = flatten(state, component.key)
        names = {}
        for key, leaf in flat.tensors.items():
            if id(leaf) not in placeholders:  # it is in a value
                assert isinstance(leaf, torch.Tensor), "values hold no shards"
                placeholders[id(leaf)] = f"{component.key}: {key}"
                self._checkpoint.hold(placeholders[id(leaf)], (component.key, key), leaf)
            names[key] = placeholders[id(leaf)]
        return flat, names

    def _plain_values(self, key: str) -> dict[tuple[Step, ...], Any]:
        """The values of a component. Of the whole checkpoint, read as one state dict, objects of unknown classes are left out.

        Raises:
            ConfigurationError: the component holds such an object.
        """
        values = self._checkpoint.values if key == STATE else self._values.get(key, {})
        read = {path: value() for path, value in values.items()}
        unknown = {
            ".".join(map(str, (*path, *filter(None, [inside])))): name
            for path, value in read.items()
            for inside, name in unknown_in(value).items()
        }
        if not unknown:
            return read
        named = some_of([f"{where} ({name})" for where, name in unknown.items()])
        if key != STATE:
            raise ConfigurationError(
                f"{self._checkpoint.root} holds objects of classes that are not built: {named}. Leave component {key} out."
            )
        if self.topology.is_lead:
            _log.warning("%s: objects of classes that are not built are left out: %s", self._checkpoint.root, named)
        known = {path: without_unknown(value) for path, value in read.items()}
        return {path: value for path, value in known.items() if not isinstance(value, UnknownObject)}


def _joined_keys(paths: Collection[tuple[Step, ...]]) -> list[str] | None:
    """The joined keys, as `flatten` makes them, of leaves in dictionaries whose keys are texts.

    None: there is another container, a leaf above another one, or two leaves with one key.
    """
    if not {*map(type, chain.from_iterable(paths))} <= {str}:
        return None
    keys = [".".join(path) for path in paths]  # type: ignore[arg-type]  # all steps are texts
    above: set[tuple[Step, ...]] = set()
    for path in paths:
        while path and (path := path[:-1]) not in above:  # where it is, those above it are
            above.add(path)
    return keys if above.isdisjoint(paths) and len(set(keys)) == len(keys) else None


def _nested(leaves: Mapping[tuple[Step, ...], Any], component: str) -> dict[Any, Any]:
    """Build the nested state.

    Raises:
        MissingStateError: the positions of a list are not complete.
    """
    root: dict[Step, Any] = {}
    for path, leaf in leaves.items():
        if not path:  # the state itself, which is empty
            continue
        at = root
        for step in path[:-1]:
            at = at.setdefault(step, {})
        at[path[-1]] = _Leaf(leaf)
    closed = _closed(root, component)
    assert isinstance(closed, dict), "it is no list: its keys are names"
    return closed


@dataclass(frozen=True, slots=True)
class _Leaf:
    """Tells a leaf from a container that is being built: plain values may be dictionaries."""

    value: Any


def _closed(node: Any, where: str) -> Any:
    """Make dictionaries, lists and tuples of dictionaries from steps to what is there."""
    if isinstance(node, _Leaf):
        return node.value
    made = {step: _closed(one, f"{where}.{_name(step)}") for step, one in node.items()}
    positions: list[Any] = [
        step if isinstance(step, int) else step[0] if not isinstance(step, str) and step[1] == "tuple" else None
        for step in made
    ]
    if not made or None in positions:
        return {step if isinstance(step, str | int) else step[0]: one for step, one in made.items()}
    if sorted(positions) != list(range(len(made))):
        raise MissingStateError(f"{where}: of a list there are the elements {sorted(positions)} alone")
    in_order = [one for _, one in sorted(zip(positions, made.values(), strict=True), key=itemgetter(0))]
    return in_order if isinstance(next(iter(made)), int) else tuple(in_order)


def _name(step: Step) -> str:
    return str(step[0] if isinstance(step, tuple) else step)
