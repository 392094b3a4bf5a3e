"""Take a state dict as the components that a run finds in it: one that `ckpt.save` has saved alone, or another program has written.

The first step of a path names the component: "model", "optimizer". Where there is no "model", tensors outside of any component are it, as
torchtitan saves them. All ranks share every component: the formats know no copies of single ranks.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence, Set
from functools import cached_property
from itertools import chain
from pathlib import Path as FilePath
from typing import Any, Self

import torch

from ckpt.errors import CorruptCheckpointError, MissingStateError
from ckpt.format.dtypes import torch_dtype
from ckpt.format.gc_pause import gc_paused
from ckpt.format.manifest import STATE, ArrayEntry
from ckpt.format.places import Place
from ckpt.loading.direct import DirectLoad
from ckpt.loading.other_checkpoint import OtherCheckpoint, OtherTensor, given
from ckpt.loading.sources import CheckpointSource, ManifestSource, Rows, require_same_kind
from ckpt.loading.strategy import LoadingStrategy, Reading, ReadRequest
from ckpt.memory.device import Device, device_of
from ckpt.ranks.topology import Topology
from ckpt.state.abilities import NamedFromPositions, offers
from ckpt.state.flatten import (
    Leaves,
    Path,
    PathPart,
    flatten,
    is_attribute,
    is_position,
    joined_key,
    key_of,
    plain_and_paths,
    rows_of,
    unflatten,
    without_kind,
)
from ckpt.state.sharing import OWN_COPIES, Sharing, SharingPattern, StateComponent
from ckpt.state.statefuls import Given

MODEL = "model"
_ORDERED = ("OrderedDict",)
_Form = tuple[str, tuple[int, ...]]
"""Data type and shape of a tensor."""


class StateDictSource(CheckpointSource):
    """A state dict, open for reading by one rank as the components that it holds. See `CheckpointSource`."""


    def __init__(
        self, path: Place, checkpoint: OtherCheckpoint, topology: Topology, strategy: LoadingStrategy, device: Device
    ) -> None:
        number = re.search(r"[0-9]+$", (checkpoint.named_by or path).name)
        self.checkpoint_id = (
            number[0] if number else "0"
        )  # the step of "step-100" and "iter_0000100"; weights to begin with have none
        self._checkpoint = checkpoint
        self.has_order = checkpoint.has_order
        self.topology = topology
        self._strategy = strategy
        self._device = device
        self._found: dict[str, tuple[Leaves, dict[str, str]]] = {}
        self._unread: dict[str, dict[str, str]] = {}
        self._renamed: dict[str, bool] = {}  # component -> whether `_found` has the names of an object that renames

    def holds(self, key: str) -> bool:
        return key == STATE or key in self._keys

    def component_keys(self) -> Collection[str]:
        return [STATE] if STATE in self._keys else self._keys

    def only_saved(self, declared: Collection[str]) -> list[str]:
        """See `CheckpointSource.only_saved`: those with tensors below their name. Others, such as "args" and "epoch", are notes."""
        if STATE in declared:  # all of it, as one state dict
            return []
        nested = dict.fromkeys(_name(path[0]) for path in self._tensor_paths if len(path) > 1)
        return [key for key in nested if key not in declared]

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
        follow_from_names = not leaves.plain and all(leaves.paths[key] == (key,) for key in names)
        return {} if follow_from_names else rows_of(leaves, component.key, paths_of=names)

    def unread(self, component: StateComponent, prefix: str) -> Mapping[str, str]:
        self._leaves(component)
        return self._unread[component.key]

    def prepare(self, requests: Sequence[ReadRequest]) -> Reading:
        named = self._named(requests)
        return self._strategy.prepare(named, self._checkpoint, self.topology, self._device, verify=False)

    @gc_paused()
    def _named(self, requests: Iterable[ReadRequest], above: str = "") -> list[ReadRequest]:
        """The same requests by the names of tensors in the checkpoint."""
        return [
            ReadRequest(f"{above}{self._found[key][1][rest]}", request.label, request.box, request.out)
            for request in requests
            for key, _, rest in [request.name.partition("/")]
        ]

    @cached_property
    def _keys(self) -> list[str]:
        """The components, those with tensors first."""
        return sorted(self._components, key=lambda key: self._tensor_paths.isdisjoint(self._components[key].values()))

    @cached_property
    def _names_by_path(self) -> dict[Path, str]:
        return {tensor.path: name for name, tensor in self._checkpoint.tensors.items()}

    @cached_property
    def _tensor_paths(self) -> Set[Path]:
        """Those of tensors that cannot be read, too."""
        return {**self._names_by_path, **self._checkpoint.unread}.keys()

    @cached_property
    def _components(self) -> dict[str, dict[Path, Path]]:
        """Component -> path in it -> path in the whole, in order. An entry that is no container is a component itself."""
        paths, tensors = self._checkpoint.paths, self._tensor_paths
        has_model = any(_name(path[0]) == MODEL and (len(path) > 1 or path not in tensors) for path in paths if path)
        weights = [] if has_model else [path for path in tensors if len(path) < 2]
        found: dict[str, dict[Path, Path]] = {}
        for path in paths:
            if is_attribute(path[:1]) or (len(path) < 2 and path in tensors and not has_model):
                if weights:
                    found.setdefault(MODEL, {})[path] = path
            elif path:  # else it is the whole state, which is empty
                found.setdefault(_name(path[0]), {})[path[1:]] = path
        return found

    def _places(self, key: str) -> Mapping[Path, Path]:
        """Path in a component -> path in the whole. `ckpt.load` takes all as one state dict, also where a part of it has that name."""
        return {path: path for path in self._checkpoint.paths} if key == STATE else self._components.get(key, {})

    def _leaves(self, component: StateComponent) -> tuple[Leaves, dict[str, str]]:
        """The state of a component, whose tensors have no memory or are left out, and key -> name of the tensor in the checkpoint."""
        key, renames = component.key, offers(component.stateful, NamedFromPositions)
        if key not in self._found or self._renamed[key] != renames:
            places, by_path = self._places(key), self._names_by_path
            values, lists = self._plain_values(key, places)
            if lists:
                places = {path: place for path, place in places.items() if list_above(path) not in lists}
                values = {path: value for path, value in values.items() if path in places}
            tensors = {path: by_path[place] for path, place in places.items() if place in by_path}
            forms = self._forms(tensors.values())
            joined = None if values or renames else _joined_keys(tensors)
            if joined is None:
                self._found[key] = self._flattened(component, places, tensors, values, forms)
            else:  # nothing but named tensors, as most models are
                self._found[key] = (
                    Leaves({}, {}, {key: self._with_kind(*tensor) for key, tensor in zip(joined, tensors.items(), strict=True)}),
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
        some = {(entry.dtype, entry.shape): name for name in names for entry in [tensors[name]]}
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
        paths: Iterable[Path],
        tensors: Mapping[Path, str],
        values: Mapping[Path, Any],
        forms: Mapping[_Form, torch.Tensor],
    ) -> tuple[Leaves, dict[str, str]]:
        """`_leaves` of a state with values, other containers than dictionaries, or of an object that renames."""
        placeholders: dict[int, str] = {}
        leaves: dict[Path, Any] = {}
        for path in paths:
            if path in tensors:
                one = self._checkpoint.tensors[tensors[path]]
                form = forms[one.dtype, one.shape]
                leaves[path] = form.detach()  # an object of its own, in half of the time of a new one
                placeholders[id(leaves[path])] = tensors[path]
            elif path in values:
                leaves[path] = values[path]
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
            flat.paths[key] = self._with_kind(without_kind(flat.paths[key]), names[key])  # a form has no kind of its own
        return flat, names

    def _with_kind(self, path: Path, name: str) -> Path:
        kind = self._checkpoint.tensors[name].kind
        return path if kind is None else (*path, kind)

    def _plain_values(self, key: str, places: Mapping[Path, Path]) -> tuple[dict[Path, Any], set[Path]]:
        """The values of a component, and the paths of lists, tuples and deques that are left out whole: a part of them cannot be read.

        Args:
            places: path in the component -> path in the whole, of tensors too.
        """
        self._unread[key] = {}
        values = self._checkpoint.values
        return {path: values[place]() for path, place in places.items() if place in values}, set()


class PartsOfState(StateDictSource):
    """A state dict of ours that was saved alone. Digests, and what the checkpoint says of its run, are those of the whole."""

    def __init__(self, whole: ManifestSource) -> None:
        self._whole = whole
        key = StateComponent(STATE, Given(), SharingPattern.REPLICATED)
        entries = whole.entries(key, "")
        plain, paths = plain_and_paths(whole.rows(key, ""), STATE, entries)
        tensors = {
            name: OtherTensor(
                without_kind(paths.get(name, (name,))), entry.dtype, entry.shape, _never, entry.alias_of or f"{STATE}/{name}"
            )
            for name, entry in entries.items()
        }
        values = {paths[name]: given(value) for name, value in plain.items()}
        in_order = [*map(without_kind, paths.values()), *((name,) for name in entries if name not in paths)]
        checkpoint = OtherCheckpoint(FilePath(), tensors, values, paths=in_order)
        checkpoint.program = "ckpt.save"
        super().__init__(FilePath(), checkpoint, whole.topology, DirectLoad(), device_of(()))
        self.checkpoint_id, self.run_id, self.history = whole.checkpoint_id, whole.run_id, whole.history
        self.config_text, self.metrics, self.metadata = whole.config_text, whole.metrics, whole.metadata

    def by_this_rank(self) -> Self:
        """See `CheckpointSource.by_this_rank`."""
        other = super().by_this_rank()
        other._whole = self._whole.by_this_rank()
        return other

    def check(self, optional: Collection[str]) -> dict[str, dict[str, Any]]:
        """See `CheckpointSource.check`. Damage is not of one component: it is an error."""
        return self._whole.check(())

    def prepare(self, requests: Sequence[ReadRequest]) -> Reading:
        return self._whole.prepare(self._named(requests, above=f"{STATE}/"))


def by_component_of(source: CheckpointSource) -> CheckpointSource:
    """Return a source of components: that of a state dict which was saved alone, as a run finds them in it; any other as it is."""
    is_one = isinstance(source, ManifestSource) and list(source.component_keys()) == [STATE]
    return PartsOfState(source) if is_one else source  # type: ignore[arg-type]


def list_above(path: Path) -> Path | None:
    """The path of the outermost list, tuple or deque that a path leads into."""
    return next((path[:at] for at, step in enumerate(path) if is_position(step)), None)


def _joined_keys(paths: Collection[Path]) -> list[str] | None:
    """The joined keys, as `flatten` makes them, of leaves in dictionaries whose keys are texts.

    None: there is another container, a leaf above another one, or two leaves with one key.
    """
    steps = chain.from_iterable(paths)
    if not all(
        type(step) is str or (type(step) is tuple and step[1:] == _ORDERED and type(step[0]) is str) for step in steps
    ):
        return None
    keys = [joined_key(path) for path in paths]
    above: set[Path] = set()
    for path in paths:
        while path and (path := path[:-1]) not in above:  # where it is, those above it are
            above.add(path)
    return keys if above.isdisjoint(paths) and len(set(keys)) == len(keys) else None


def _nested(leaves: Mapping[Path, Any], component: str) -> Any:
    """Build the nested state.

    Raises:
        MissingStateError: the positions of a list are not complete.
        CorruptCheckpointError: paths contradict each other.
    """
    lists: dict[Path, set[int]] = {}
    for path in leaves:
        for at, step in enumerate(path):
            if type(step) is tuple and step[1] == "list":
                lists.setdefault(path[:at], set()).add(int(step[0]))
    for path, positions in lists.items():
        if len(positions) != max(positions) + 1 or min(positions) < 0:
            where = ".".join(filter(None, (component, joined_key(path))))
            raise MissingStateError(f"{where}: of a list there are the elements {sorted(positions)} alone")
    numbered = {str(at): path for at, path in enumerate(leaves)}
    if numbered.get("0") == ():  # the whole, which is no container, or empty
        return leaves[()]
    return unflatten({at: leaves[path] for at, path in numbered.items()}, numbered, f"a path of {component}")


def _name(step: PathPart) -> str:
    """Return the component that a first step leads to. Keys that are no text name none that a program can have."""
    key = key_of(step)
    return key if type(key) is str else repr([step])


def _never() -> Any:
    raise AssertionError("the whole reads its tensors")
