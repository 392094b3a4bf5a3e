"""Match the tensors and plain values of a component with its saved ones: pure functions, on one rank and over all ranks.

`strict` decides what counts as a mismatch, `required` what a mismatch does: a required component stops the load, an optional
one is left out whole. Keys that do not match are *only in the checkpoint*, *only wanted*, or do not *fit*.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import torch

from ckpt.errors import (
    Argument,
    CheckpointError,
    MissingStateError,
    ShapeMismatchError,
    WorldSizeError,
    describe,
    leave_out,
    rebuild,
)
from ckpt.format.box import Box, whole
from ckpt.format.dtypes import are_castable, torch_dtype, zarr_name
from ckpt.format.gc_pause import gc_paused
from ckpt.format.manifest import ArrayEntry
from ckpt.format.places import PLAIN_NAME
from ckpt.loading.report import ComponentReport, Misfits, Status
from ckpt.loading.strategy import CAST, Cast, Components, ReadRequest, batches_of, bytes_of
from ckpt.memory.device import empty_beside
from ckpt.planning.plan import runs_of
from ckpt.state.abilities import Elastic, Forgetful, Prepared, PreparedFrom, offers, takes_a_part, tied_names
from ckpt.state.address import local_tensor, place_of
from ckpt.state.flatten import Leaves, Path, flatten, is_attribute, plain_and_paths, rerooted, root_container, unflatten
from ckpt.state.replication import is_piece
from ckpt.state.sharing import SharingPattern, StateComponent, find_aliases
from ckpt.state.tensor_classes import empty_tensor, is_kind_step, is_wrapper_step

MISMATCHES = (MissingStateError, WorldSizeError, ShapeMismatchError)
"""Errors that `strict=False` forgives: the checkpoint is sound, and this run asks for something else."""


@dataclass(slots=True)
class SavedCopy:
    """One copy of a component, as a checkpoint holds it.

    Attributes:
        start: beginning of the names of its arrays, `<component>/<prefix>`.
        entries: key -> array; `alias_of` holds a whole name.
        plain: joined key -> plain value.
        paths: joined key -> path in the nested state dict, where the checkpoint knows it.
        unread: joined key -> why it cannot be loaded.
    """

    start: str
    entries: Mapping[str, ArrayEntry]
    plain: dict[str, Any]
    paths: dict[str, Path]
    unread: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        start: str,
        entries: Mapping[str, ArrayEntry],
        rows: Mapping[str, Sequence[Any]],
        unread: Mapping[str, str] | None = None,
    ) -> SavedCopy:
        """Take rows as a plain.json holds them: joined key -> [path, value], or [path] of a tensor.

        Raises:
            CorruptCheckpointError: a value is none that was saved, or a tensor is not there.
        """
        if unread:
            entries = {key: entry for key, entry in entries.items() if key not in unread}
            rows = {key: row for key, row in rows.items() if key not in unread}
        return cls(start, entries, *plain_and_paths(rows, f"{start}{PLAIN_NAME}", entries), unread or {})

    @property
    def nested_plain(self) -> dict[Any, Any]:
        """The plain values, nested as `state_dict` gave them."""
        nested: dict[Any, Any] = unflatten(self.plain, self.paths)
        return nested

    def name_of(self, key: str) -> str:
        """The name of the array that holds a key's bytes; never an alias."""
        return self.entries[key].alias_of or self.start + key


@dataclass(slots=True)
class Match:
    """One component on one rank, compared with its saved copy; nothing has been read into it.

    Attributes:
        trouble: the error for which the whole component cannot be loaded here; None: there is none.
        fits: this rank may go on with its copy; False only where the object decides (`elastic`).
        leaves: of the object's own state dict, with the tensors to fill.
        requests: the boxes to read, and the memory for them.
        casts: the same, of tensors that are converted to another data type.
        new: tensors that the object does not hold, made because it takes whatever was saved.
        plain: joined key -> saved value, and under `strict=False` own values that were not saved.
        saved_keys: keys of the tensors of the saved copy, in its order.
        restored, wanted: elements on this rank; a plain value counts as one.
        copies: given to `load_changed` instead of all this, if the ranks have changed; see `match_changed`.
        twins: tensors that the object has as one, and that were saved apart. To be compared before anything is read.
    """

    component: StateComponent
    trouble: CheckpointError | None = None
    fits: bool = True
    leaves: Leaves = field(default_factory=lambda: Leaves({}, {}, {}))
    requests: list[ReadRequest] = field(default_factory=list)
    casts: list[Cast] = field(default_factory=list)
    new: dict[str, torch.Tensor] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)
    misfits: Misfits = field(default_factory=Misfits)
    saved_keys: Sequence[str] = ()
    restored: int = 0
    wanted: int = 0
    copies: list[Loaded] | None = None
    twins: list[Twins] = field(default_factory=list)

    @property
    def key(self) -> str:
        return self.component.key

    @property
    def outs(self) -> list[torch.Tensor]:
        """The memory to fill: of `requests`, then of `casts`."""
        return [request.out for request in (*self.requests, *(cast.request for cast in self.casts))]

    @property
    def num_bytes(self) -> int:
        """The bytes to read."""
        return bytes_of(self.requests) + sum(conversion.num_bytes for conversion in self.casts)

    def to_json(self) -> dict[str, Any]:
        """The part that other ranks need for `settle`; small where everything matches."""
        row: dict[str, Any] = {"count": [self.restored, self.wanted]}
        if self.trouble is not None:
            row["trouble"] = describe(self.trouble)
        if not self.fits:
            row["fits"] = False
        if self.casts:
            row["batches"] = len(batches_of(self.casts)) if self.component.required else 0
            row["converted"] = sorted({f"{zarr_name(cast.dtype)} to {zarr_name(cast.request.out.dtype)}" for cast in self.casts})
        if self.misfits:
            # Of a sharded component each rank leaves most keys to the others: it tells those that it claims.
            is_sharded = self.component.pattern is SharingPattern.SHARDED
            if is_sharded and self.misfits.only_saved:
                row["claimed"] = _runs_without(self.misfits.only_saved, self.saved_keys)
            only_saved = () if is_sharded else self.misfits.only_saved
            row["misfits"] = [only_saved, self.misfits.only_wanted, dict(self.misfits.unfit)]
        return row

    def forget_prepared(self) -> None:
        """Let the object forget what it prepared for this load."""
        if offers(self.component.stateful, Forgetful):
            self.component.stateful.forget_prepared()

    def apply(self) -> None:
        """Give the object its state: its own tensors, filled, and the saved plain values; or the copies of other ranks."""
        if self.copies is not None:
            cast(Elastic, self.component.stateful).load_changed([copy.nested() for copy in self.copies])
            return
        self.component.stateful.load_state_dict(self.nested())

    def nested(self) -> Any:
        """What an object is given, nested as it was saved: its own tensors, new ones, and the saved plain values."""
        return unflatten({**self.leaves.tensors, **self.new, **self.plain}, self.leaves.paths)


class Twins(NamedTuple):
    """Two saved tensors that an object has as one. They must be equal.

    Attributes:
        key, first: joined keys; `first` is loaded.
        names: of the two in the checkpoint.
        box: this rank's part.
    """

    key: str
    first: str
    names: tuple[str, str]
    dtype: str
    box: Box


@dataclass(slots=True)
class Loaded:
    """A copy of another rank: its plain values, and new tensors that a read fills."""

    plain: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    paths: dict[str, Path]

    def nested(self) -> dict[Any, Any]:
        nested: dict[Any, Any] = unflatten({**self.tensors, **self.plain}, self.paths)
        return nested


@torch.inference_mode(False)  # what is made here is trained on
@gc_paused()
def match(
    component: StateComponent, saved: SavedCopy, *, strict: bool, cast: Components = False, asks: bool = True
) -> Match:
    """Find the box to read for each tensor of a component, and the keys of either side that are left over.

    Args:
        cast: see `CheckpointCoordinator.load_checkpoint`.
        asks: an object that takes whatever was saved is asked for its tensors, to fill them. Some objects are changed by that: loaders
            of data start their workers, or begin anew.

    Raises:
        ShapeMismatchError: a tensor does not fit what was saved, and the load is strict.
    """
    is_prepared = takes_a_part(component.stateful)
    is_named = not isinstance(cast, bool) and component.key in cast
    if offers(component.stateful, PreparedFrom):
        component.stateful.prepare_from(saved.entries, saved.plain, saved.paths, cast=is_named)
    elif offers(component.stateful, Prepared):
        component.stateful.prepare_to_load(
            {key: entry for key, entry in saved.entries.items() if entry.alias_of is None}
        )
    takes_all = not is_prepared and component.pattern is not SharingPattern.SHARDED
    one = Match(component, saved_keys=tuple(saved.entries))
    if asks or not takes_all:
        one.leaves = flatten(component.stateful.state_dict(), component.key)
    own_paths = one.leaves.paths
    found = _Found()
    if takes_all:
        _leave_what_changed(one.leaves, saved, strict=strict)
    found.unfit |= saved.unread
    tied = find_aliases(one.leaves.tensors, {})
    _match_tensors(one, saved, tied, found, strict, cast=cast is True or is_named)
    _match_plain(one, saved, found, keep_own=not is_prepared and not strict)
    unclaimed = [k for k, entry in saved.entries.items() if k not in one.leaves.tensors and entry.alias_of is None]
    if takes_all:
        unclaimed += [k for k in tied if k in saved.entries and saved.entries[k].alias_of is None]
        one.twins.clear()
        one.new = _new_tensors(one.requests, component.key, unclaimed, saved)
    else:
        found.only_saved += unclaimed
    # In the order of the save.
    one.leaves.paths = saved.paths | {key: (key,) for key in one.new if key not in saved.paths}
    like = next(iter(one.leaves.paths.values()), ())
    one.leaves.paths |= {key: rerooted(path, like) for key, path in own_paths.items() if key not in one.leaves.paths}
    if takes_all:
        _add_aliases(one, saved)
    if any(is_wrapper_step(str(part[1])) for path in saved.paths.values() for part in path if type(part) is tuple):
        one.nested()  # while it can be refused
    one.misfits = Misfits(tuple(found.only_saved), tuple(found.only_wanted), found.unfit)
    one.restored = sum([out.numel() for out in one.outs]) + sum(key in saved.plain for key in one.plain)
    one.wanted = one.restored + found.elements_not_restored
    return one


def _leave_what_changed(leaves: Leaves, saved: SavedCopy, *, strict: bool) -> None:
    """Remove the leaves of an object that takes whatever was saved, if they were not saved or do not fit: it gets new ones, or none.

    Args:
        strict: otherwise entries of the state dict itself stay that were not saved at all: the object may rely on them.
    """
    known = {key.partition(".")[0] for key in (*saved.plain, *saved.entries)}
    root = root_container(next(iter(saved.paths.values()), ("",)))
    strict = strict or not known or any(root_container(path) != root for path in leaves.paths.values())
    for key, leaf in list(leaves.tensors.items()):
        entry = saved.entries.get(key)
        if entry is not None:
            dtype, shape, _ = place_of(leaf, key)
            is_result = isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None  # it may not be copied, say
            if is_piece(leaf) or ((entry.dtype, entry.shape) == (dtype, shape) and not is_result):
                continue
        elif not strict and key.partition(".")[0] not in known:
            continue
        del leaves.tensors[key]
    for key in list(leaves.plain):
        if key not in saved.plain and (strict or key.partition(".")[0] in known):
            del leaves.plain[key]


def _add_aliases(one: Match, saved: SavedCopy) -> None:
    """Give an object that takes whatever was saved its tied tensors under all of their names."""
    for key, entry in saved.entries.items():
        if entry.alias_of is None or key in one.leaves.tensors:
            continue
        first = entry.alias_of.removeprefix(saved.start)
        tensor = one.new.get(first, one.leaves.tensors.get(first))
        if isinstance(tensor, torch.Tensor):
            one.new[key] = tensor
            one.leaves.paths.setdefault(key, (key,))


@torch.inference_mode(False)
def match_changed(component: StateComponent, copies: Sequence[SavedCopy]) -> Match:
    """Make new tensors for all of `copies`, for an object that makes its state from those of other ranks."""
    one = Match(component, fits=False, copies=[])
    assert one.copies is not None
    for saved in copies:
        tensors = _new_tensors(one.requests, component.key, saved.entries, saved)
        paths = {key: (key,) for key in tensors} | saved.paths
        one.copies.append(Loaded(dict(saved.plain), tensors, paths))
        one.restored += sum(tensor.numel() for tensor in tensors.values()) + len(saved.plain)
    one.wanted = one.restored
    return one


def beside_own_memory(one: Match) -> list[ReadRequest]:
    """The requests of a component, but into new memory wherever they would fill the object's own.

    The new memory is on the same device, or on the host, where the device has no room for it.
    """
    made = {id(tensor) for tensor in one.new.values()}
    return [
        request
        if one.copies is not None or id(request.out) in made
        else replace(request, out=empty_beside(request.out))
        for request in one.requests
    ] + [replace(request, out=empty_beside(request.out, dtype)) for request, dtype in one.casts]


def settle(
    component: StateComponent, of_ranks: Sequence[Mapping[str, Any]], saved_keys: Sequence[str], *, strict: bool
) -> ComponentReport:
    """Decide whether a component is loaded, from the matches of all ranks (`Match.to_json`); equal on all ranks.

    Args:
        saved_keys: those of any rank's match.

    Raises:
        MissingStateError: a required component does not match, and the load is strict, or nothing of it does.
    """
    key = component.key
    for rank, of_rank in enumerate(of_ranks):
        if "trouble" in of_rank:
            return report_of_trouble(key, rank, rebuild(of_rank["trouble"]), len(of_ranks))
    if not all(of_rank.get("fits", True) for of_rank in of_ranks):
        return ComponentReport(key, Status.RESTORED, changed=True)
    misfits = _joined_misfits(component, of_ranks, saved_keys)
    restored, wanted = (sum(of_rank["count"][i] for of_rank in of_ranks) for i in (0, 1))
    converted = tuple(sorted({name for of_rank in of_ranks for name in of_rank.get("converted", ())}))
    if not misfits:
        return ComponentReport(key, Status.RESTORED, "", restored, wanted, converted=converted)
    nothing = restored == 0
    if not strict and not nothing:
        return ComponentReport(key, Status.PARTLY, "", restored, wanted, misfits, converted=converted)
    what = f"nothing of it matches: {misfits}" if nothing and not strict else str(misfits)
    if not component.required:
        return ComponentReport(key, Status.SKIPPED, what, 0, wanted, misfits)
    way_out = (leave_out(key),) if nothing else ("with ", Argument("load.strict", False), " to leave these out, which keep their values")
    message = f"component {key}: {what}. Load into the model it was saved from, or "
    raise MissingStateError(message, *way_out, ".", arguments=[CAST], component=key)


def report_of_trouble(key: str, rank: int, error: CheckpointError, world_size: int) -> ComponentReport:
    """The report of a component that cannot be loaded, from the error of one rank."""
    status = Status.SKIPPED if isinstance(error, MISMATCHES) else Status.FAILED
    where = f" (rank {rank})" if world_size > 1 and status is Status.FAILED else ""
    return ComponentReport(key, status, f"{error}{where}", arguments=tuple(argument.to_json() for argument in error.arguments))


@dataclass(slots=True)
class _Found:
    """The mismatches of one component on this rank, while they are found."""

    only_saved: list[str] = field(default_factory=list)
    only_wanted: list[str] = field(default_factory=list)
    unfit: dict[str, str] = field(default_factory=dict)
    elements_not_restored: int = 0


@torch.no_grad()  # for `local_tensor`
def _match_tensors(
    one: Match, saved: SavedCopy, tied: Mapping[str, str], found: _Found, strict: bool, *, cast: bool
) -> None:
    declared = tied_names(one.component.stateful)
    several = {key: [first, key] for key, first in declared.items()}  # the first one first: all ranks load the same
    for alias, first in tied.items():
        several.setdefault(first, [first]).append(alias)
    for key, leaf in one.leaves.tensors.items():
        if key in tied:
            continue
        if key not in several and (entry := saved.entries.get(key)) is not None:  # a fast path, for many small tensors
            name = saved.name_of(key)
            dtype, shape, box = place_of(leaf, name)
            if entry.dtype == dtype and entry.shape == shape:
                one.requests.append(ReadRequest(name, f"{one.key}: {key}", box, local_tensor(leaf)))
                continue
        all_names = several.get(key, (key,))
        saved_as = [name for name in all_names if name in saved.entries]
        if not saved_as:
            found.elements_not_restored += local_tensor(leaf).numel()
            if any(name in saved.plain for name in all_names):
                found.unfit[key] = "found a plain value, expected a tensor"
            elif key not in found.unfit:
                found.only_wanted.append(key)
            continue
        name = saved.name_of(saved_as[0])
        dtype, shape, box = place_of(leaf, name)
        form = saved.entries[saved_as[0]].dtype, saved.entries[saved_as[0]].shape
        for at in saved_as:
            entry = saved.entries[at]
            label = f"{one.key}: {key if at == saved_as[0] else at}"
            differs = (entry.dtype, entry.shape) != (dtype, shape)
            castable = differs and entry.shape == shape and are_castable(torch_dtype(entry.dtype), torch_dtype(dtype))
            if at != saved_as[0] and (entry.dtype, entry.shape) == form:
                if saved.name_of(at) != name and saved_as[0] not in found.unfit:
                    one.twins.append(Twins(at, saved_as[0], (saved.name_of(at), name), entry.dtype, box))
            elif at == saved_as[0] and not differs:
                one.requests.append(ReadRequest(name, label, box, local_tensor(leaf)))
            elif at == saved_as[0] and castable and cast:
                one.casts.append(Cast(ReadRequest(name, label, box, local_tensor(leaf)), torch_dtype(entry.dtype)))
            elif strict:
                raise _unfit(label, dtype, shape, entry, one.key, castable=castable)
            else:
                advice = f": give {CAST}" if castable else ""
                found.unfit[at] = f"found {_form(entry.dtype, entry.shape)}, expected {_form(dtype, shape)}{advice}"
        if saved_as[0] in found.unfit:
            found.elements_not_restored += local_tensor(leaf).numel()


def _match_plain(one: Match, saved: SavedCopy, found: _Found, *, keep_own: bool) -> None:
    """Give the object all saved plain values, also those that it does not have; note its own that were not saved."""
    one.plain = {
        key: value
        for key, value in saved.plain.items()
        if key not in one.leaves.tensors and not _inside_a_tensor(key, one.leaves)
    }
    missing = {key: value for key, value in one.leaves.plain.items() if key not in saved.plain}
    known = {way for key in (*saved.plain, *saved.entries) for way in _ways(key)} if missing else set()
    for key, value in missing.items():
        # A dictionary on one side may be a single value, such as None or {}, on the other: no key is missing then.
        if key in known or key in found.unfit or any(way in saved.plain for way in _ways(key)):
            continue
        if is_attribute(one.leaves.paths[key]):
            continue
        found.only_wanted.append(key)
        found.elements_not_restored += 1
        if keep_own:
            one.plain[key] = value


def _new_tensors(
    requests: list[ReadRequest], component: str, keys: Iterable[str], saved: SavedCopy
) -> dict[str, torch.Tensor]:
    """Make the tensors of these keys, and the requests that fill them."""
    made: dict[str, torch.Tensor] = {}
    alike: dict[int, torch.Tensor] = {}
    for key in keys:
        entry = saved.entries[key]
        path = saved.paths.get(key, ())
        first = alike.get(id(entry))
        if path and is_kind_step(path[-1]):
            tensor = empty_tensor(entry, path)
        elif first is None:
            tensor = alike[id(entry)] = empty_tensor(entry)
        else:  # in half of the time
            tensor = torch.empty_like(first)
        made[key] = tensor
        requests.append(
            ReadRequest(entry.alias_of or saved.start + key, f"{component}: {key}", whole(entry.shape), tensor)
        )
    return made


def _joined_misfits(
    component: StateComponent, of_ranks: Sequence[Mapping[str, Any]], saved_keys: Sequence[str]
) -> Misfits:
    """The misfits of all ranks. A saved key of a SHARDED component is left over only if no rank claims it."""
    misfits = [of_rank.get("misfits", ((), (), {})) for of_rank in of_ranks]
    if component.pattern is SharingPattern.SHARDED:
        only_saved = _claimed_by_none([of_rank.get("claimed") for of_rank in of_ranks], saved_keys)
    else:
        only_saved = {key for misfit in misfits for key in misfit[0]}
    unfit: dict[str, str] = {}
    for misfit in misfits:
        unfit |= misfit[2]
    return Misfits(tuple(sorted(only_saved)), tuple(dict.fromkeys(key for misfit in misfits for key in misfit[1])), unfit)


def _runs_without(left: Collection[str], keys: Sequence[str]) -> list[tuple[int, int]]:
    """The keys that are not among `left`, as runs of their positions: (first, how many)."""
    return [(first, count) for is_left, first, count in runs_of(map(set(left).__contains__, keys)) if not is_left]


def _claimed_by_none(claimed: Sequence[Sequence[tuple[int, int]] | None], keys: Sequence[str]) -> set[str]:
    """The keys that are in no rank's runs; None among them: that rank claims all keys."""
    open_ones = bytearray(b"\1" * len(keys))
    for runs in claimed:
        if runs is None:
            return set()
        for first, count in runs:
            open_ones[first : first + count] = bytes(count)
    return {key for key, is_open in zip(keys, open_ones, strict=True) if is_open}


def _unfit(
    label: str, dtype: str, shape: tuple[int, ...], saved: ArrayEntry, component: str, *, castable: bool
) -> ShapeMismatchError:
    """The error for a tensor whose shape or data type is not the saved one."""
    found, wanted = saved.dtype, dtype
    advice: tuple[str, ...] = ("the data type it was saved in.",)
    if castable:
        advice = "the data type it was saved in, or with ", CAST, f", which converts it to {dtype}."
    if saved.shape != shape:
        found, wanted = f"global shape {list(saved.shape)}", f"{list(shape)}"
        advice = "the model it was saved from, or ", leave_out(component), "."
    message = f"{label}: the checkpoint holds {found}, this run asks for {wanted}. Restore with "
    return ShapeMismatchError(message, *advice, component=component)


def _form(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {list(shape)}"


def _inside_a_tensor(key: str, leaves: Leaves) -> bool:
    """Whether a saved key leads into a tensor of this object."""
    return any(way in leaves.tensors for way in _ways(key) if way != key)


def _ways(key: str) -> Iterator[str]:
    """Yield a joined key and all keys above it: `a.b.c`, `a.b`, `a`."""
    yield key
    while "." in key:
        key = key.rpartition(".")[0]
        yield key
