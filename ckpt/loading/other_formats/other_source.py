"""What a checkpoint of another program holds of a component. See `ckpt.loading.sources.CheckpointSource`.

The first step of a path names the component: "model", "optimizer". Where there is no "model", tensors outside of any component are it, as
torchtitan saves them. All ranks share every component: the formats know no copies of single ranks.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence, Set
from functools import cached_property
from itertools import chain
from pathlib import Path as FilePath
from types import MappingProxyType
from typing import Any

import torch

from ckpt.errors import ConfigurationError, CorruptCheckpointError, MissingStateError
from ckpt.format.dtypes import torch_dtype
from ckpt.format.gc_pause import gc_paused
from ckpt.format.manifest import STATE, ArrayEntry
from ckpt.format.places import Place
from ckpt.format.unpickling import UnknownObject, unknown_in, without_unknown
from ckpt.loading.other_formats.dcp_folders import is_dcp, open_dcp
from ckpt.loading.other_formats.deepspeed_folders import is_deepspeed, open_deepspeed
from ckpt.loading.other_formats.hub_folders import state_beside
from ckpt.loading.other_formats.megatron_folders import is_megatron, open_megatron
from ckpt.loading.other_formats.orbax_folders import is_orbax, open_orbax
from ckpt.loading.other_formats.other_checkpoint import OtherCheckpoint
from ckpt.loading.other_formats.safetensors_files import is_safetensors, open_safetensors
from ckpt.loading.other_formats.torch_archives import MAKES_TENSORS
from ckpt.loading.other_formats.torch_files import is_torch_file, open_torch_file
from ckpt.loading.report import some_of
from ckpt.loading.sources import CheckpointSource, Rows, require_same_kind
from ckpt.loading.strategy import LoadingStrategy, Reading, ReadRequest
from ckpt.memory.device import Device
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
    rows_of,
    unflatten,
    without_kind,
)
from ckpt.state.plain import IN_JSON
from ckpt.state.sharing import OWN_COPIES, Sharing, SharingPattern, StateComponent
from ckpt.storage.stored import has_manifest

_log = logging.getLogger("ckpt")

MODEL = "model"
_OF_WEIGHTS = ("safetensors", "torch.save")
"""Programs whose folders hold the weights of a model."""
_ORDERED = ("OrderedDict",)
_Form = tuple[str, tuple[int, ...]]
"""Data type and shape of a tensor."""
_OPEN: dict[str, tuple[Callable[[Any], bool], Callable[..., OtherCheckpoint]]] = {
    "megatron": (is_megatron, open_megatron),
    "dcp": (is_dcp, open_dcp),
    "safetensors": (is_safetensors, lambda path, *, allow_pickle: open_safetensors(path)),
    "deepspeed": (is_deepspeed, open_deepspeed),
    "orbax": (is_orbax, lambda path, *, allow_pickle: open_orbax(path)),
    "torch": (is_torch_file, open_torch_file),
}


_IN_STORES = ("dcp", "safetensors", "torch")


def format_at(path: Place) -> str | None:
    """The format of another program's checkpoint at a path; None: there is one of this package, or none that is known.

    In object stores those of `_IN_STORES` are known.
    """
    if has_manifest(path):
        return None
    known = _OPEN if isinstance(path, FilePath) else _IN_STORES
    return next((name for name in known if _OPEN[name][0](path)), None)


def open_other(path: Place, format: str, *, allow_pickle: bool) -> OtherCheckpoint:
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
    leaves_out_unknown = False
    """Leave out objects that are not plain, with a warning, and name them in `left_out`; otherwise they are `unread`."""

    def __init__(
        self, path: Place, checkpoint: OtherCheckpoint, topology: Topology, strategy: LoadingStrategy, device: Device
    ) -> None:
        number = re.search(r"[0-9]+$", (checkpoint.named_by or path).name)
        self.checkpoint_id = (
            number[0] if number else "0"
        )  # the step of "step-100" and "iter_0000100"; weights to begin with have none
        self._checkpoint = checkpoint
        beside = state_beside(path) if checkpoint.program in _OF_WEIGHTS else []
        self.left_out = [f"{name} (it lies beside the weights)" for name in beside]
        if beside and topology.is_lead:
            _log.warning("%s: of this folder the weights alone are read; give the path of what lies beside them: %s", path, some_of(beside))
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

    def contents(self, component: StateComponent, prefix: str) -> Mapping[str, Any]:
        raise AssertionError("there is one copy of each component, so none are compared")

    def check(self, optional: Collection[str]) -> dict[str, dict[str, Any]]:
        """See `CheckpointSource.check`: other programs keep no digests."""
        return {}

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
                places = {path: place for path, place in places.items() if _list_above(path) not in lists}
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

        All that is left out is noted, see `unread` and `leaves_out_unknown`.

        Args:
            places: path in the component -> path in the whole, of tensors too.
        """
        tensors, unread = self._names_by_path, self._checkpoint.unread
        read: dict[Path, Any] = {}
        odd: dict[str, str] = {}
        objects: dict[str, str] = {}
        lists: set[Path] = set()
        for path, place in places.items():
            noted = odd
            if place in unread:
                odd[joined_key(path)] = unread[place]
            elif place not in tensors:
                found, left_out = _known_part(self._checkpoint.values[place])
                if not isinstance(found, UnknownObject):
                    read[path] = found
                for inside, why in left_out.items():
                    noted = odd if why.startswith(MAKES_TENSORS) else objects
                    noted[".".join(filter(None, (joined_key(path), inside)))] = why
            if place not in tensors and path not in read and (above := _list_above(path)) is not None:
                noted[joined_key(above)] = "a part of it is left out"
                lists.add(above)
        self._unread[key] = odd if self.leaves_out_unknown else odd | objects
        if self.leaves_out_unknown and objects:
            named = [f"{where} ({why})" for where, why in objects.items()]
            self.left_out += named
            if self.topology.is_lead:
                _log.warning(
                    "%s: what is neither a tensor nor plain is left out: %s", self._checkpoint.root, some_of(named)
                )
        return read, lists


def _known_part(value: Callable[[], Any]) -> tuple[Any, dict[str, str]]:
    """Read a value; return what of it is plain or a tensor, or an `UnknownObject`, and path in it -> why that is left out."""
    found = value()
    unknown = {inside: f"{name} is not built" for inside, name in unknown_in(found).items()}
    if unknown:
        found = without_unknown(found)
    if type(found) not in IN_JSON and not isinstance(found, UnknownObject):
        try:
            flatten({"value": found}, "")
        except ConfigurationError:
            kind = type(found)
            return UnknownObject(), {"": f"{kind.__module__}.{kind.__qualname__} is not plain, or holds what is not"}
    return found, unknown


def _list_above(path: Path) -> Path | None:
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
