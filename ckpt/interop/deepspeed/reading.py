"""Open universal checkpoints of DeepSpeed: what its `ds_to_universal.py` makes of a ZeRO checkpoint. No code of their pickles runs.

    latest_universal                    name of the folder with the newest one
    <tag>_universal/
        zero/<parameter>/fp32.pt        the master weight, whole; exp_avg.pt and exp_avg_sq.pt beside it are AdamW's moments
        zero/<parameter>/step.pt        the number of steps; ZeRO stage 3 has it in optimizer_state.pt alone
        zero/optimizer_state.pt         options of the groups of parameters
        *mp_rank_*_model_states.pt      buffers, names and shapes of the parameters of each part of the optimizer; of ZeRO stage 3, also
                                        this rank's part of each parameter that is not trained

Its components are "model", with the master weights and the buffers of the module, "optimizer", by names of parameters, and
"lr_scheduler" where there was one. Each file is one of `torch.save`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ckpt.errors import ConfigurationError, CorruptCheckpointError
from ckpt.format.box import flat_boxes
from ckpt.format.dtypes import item_bytes
from ckpt.interop.torch_save.archives import sizes_in
from ckpt.interop.torch_save.reading import Content, content_of
from ckpt.loading.other_checkpoint import FilePiece, OtherCheckpoint, OtherTensor, refusing
from ckpt.state.flatten import Path as StatePath
from ckpt.state.flatten import key_of
from ckpt.storage.checkpoint_files import CheckpointFolder, names_below

LATEST = "latest_universal"
_ZERO = "zero"
_OPTIMIZER = f"{_ZERO}/optimizer_state.pt"
_MODEL_STATES = "_model_states.pt"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_WEIGHT = "fp32"
_PARAM = "param"
_GROUPS = "param_groups"
_OPTIMIZER_STATE = "optimizer_state_dict"
_SCHEDULE = "lr_scheduler"
_MOST_NAME_BYTES = 1024


def is_at(path: Path) -> bool:
    """Whether a folder is a universal checkpoint of DeepSpeed, or names the newest of those in it."""
    return (path / LATEST).is_file() or (path / _OPTIMIZER).is_file()


def open_at(path: Path) -> OtherCheckpoint:
    """Open it. Reads what describes the tensors in each of its files.

    Raises:
        CorruptCheckpointError: a file is damaged, or is missing.
    """
    root = path if (path / _OPTIMIZER).is_file() else path / _latest(path)
    with refusing(root, "DeepSpeed"):
        return _Opening(root).checkpoint()


def _latest(path: Path) -> str:
    with CheckpointFolder(path) as folder:
        name = folder.read(LATEST, _MOST_NAME_BYTES).decode("utf-8", "replace").strip()
    if os.sep in name or "\0" in name or name in ("", os.curdir, os.pardir) or not (path / name / _OPTIMIZER).is_file():
        raise CorruptCheckpointError(f"{path / LATEST} names {name!r}, which is no universal checkpoint in {path}")
    return name


class _Opening:
    """Reads the files of one checkpoint."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._tensors: dict[StatePath, OtherTensor] = {}
        self._values: dict[StatePath, Callable[[], Any]] = {}

    def checkpoint(self) -> OtherCheckpoint:
        files = [name for name in names_below(self._root) if name.endswith(_MODEL_STATES)]
        files.sort(key=lambda one: [int(number) for number in re.findall(r"rank_([0-9]+)", one)])
        ranks = [_content(self._root, name) for name in files]
        if not ranks:
            raise CorruptCheckpointError(f"{self._root} has no file *{_MODEL_STATES}")
        groups = [_groups(state) for state in ranks]
        shapes = {name: shape for of_rank in groups for group in of_rank for name, shape in group.items()}
        tied = {name: source for state in ranks for name, source in (_value(state, "shared_params") or {}).items()}
        buffers = {
            name: state
            for state in reversed(ranks)
            if ("module",) not in state.values  # None: a pipeline's stage
            for name in _value(state, "buffer_names") or ()
        }
        names = {name for name in names_below(self._root / _ZERO) if (self._root / _ZERO / name).is_dir()}
        for name in sorted((names | shapes.keys()) - tied.keys() - buffers.keys()):
            self._parameter(name, shapes.get(name))
        self._untrained(ranks)
        for name, buffer in buffers.items():
            self._add(("model", name), buffer.tensors["module", name])
        for name, source in tied.items():
            self._add(("model", name), self._tensors["model", source])
        self._optimizer(groups)
        schedule = {path: read for path, read in ranks[0].values.items() if path[0] == _SCHEDULE and path[1:]}
        self._values |= schedule
        tensors = {repr(path): tensor for path, tensor in self._tensors.items()}
        step = Path(self._root.name.removesuffix("_universal"))
        return OtherCheckpoint(self._root, tensors, self._values, named_by=step, described_in=_OPTIMIZER)

    def _parameter(self, name: str, shape: tuple[int, ...] | None) -> None:
        """Add a master weight, and its part of the optimizer's state; a weight that was never trained has none."""
        folder = f"{_ZERO}/{name}"
        weight = self._tensor(f"{folder}/{_WEIGHT}.pt", shape)
        self._add(("model", name), weight)
        files = set(names_below(self._root / folder))
        for moment in _MOMENTS:
            if f"{moment}.pt" in files:
                one = self._tensor(f"{folder}/{moment}.pt", shape)
                if one.shape != weight.shape:
                    raise CorruptCheckpointError(
                        f"{self._root / folder}: {moment}.pt holds {list(one.shape)}, and {_WEIGHT}.pt {list(weight.shape)}"
                    )
                self._add(("optimizer", "state", name, moment), one)
        if "step.pt" in files:
            steps = _content(self._root, f"{folder}/step.pt")
            for tensor in steps.tensors.values():
                self._add(("optimizer", "state", name, "step"), tensor)
            for value in steps.values.values():
                self._values["optimizer", "state", name, "step"] = partial(_steps, value, str(self._root / folder))

    def _tensor(self, file: str, shape: tuple[int, ...] | None) -> OtherTensor:
        """The tensor of a file. ZeRO stage 3 has it flat.

        Args:
            shape: what the model's states say; that of a part, where there was tensor parallelism.
        """
        held = _content(self._root, file)
        if () not in held.tensors:
            return held.tensors[_PARAM,]
        flat = held.tensors[()]
        if shape is None or flat.shape != (math.prod(shape),):
            raise CorruptCheckpointError(f"{self._root / file} holds {list(flat.shape)}, for a parameter of {shape}")
        return replace(flat, shape=shape, pieces=partial(_joined, [flat], shape, str(self._root / file)))

    def _untrained(self, ranks: Sequence[Content]) -> None:
        """Add the parameters that are not trained: they are in `zero`, but for stage 3, which has a part of each in each rank's file."""
        shapes = {name: sizes_in(shape) for name, shape in (_value(ranks[0], "frozen_param_shapes") or {}).items()}
        for name, shape in shapes.items():
            if ("model", name) in self._tensors:
                continue
            where = f"{self._root}: {name}, which is not trained,"
            if _value(ranks[0], "mp_world_size") != 1:
                raise ConfigurationError(f"{where} is in parts of tensor parallel ranks, which are not put together")
            parts = [state.tensors["frozen_param_fragments", name] for state in ranks]
            side = -(-math.prod(shape) // len(ranks))
            if {(part.dtype, part.shape) for part in parts} != {(parts[0].dtype, (side,))}:
                sizes = [list(part.shape) for part in parts]
                raise CorruptCheckpointError(f"{where} has parts of the shapes {sizes}, for the shape {list(shape)}")
            self._add(("model", name), replace(parts[0], shape=shape, pieces=partial(_joined, parts, shape, where)))

    def _optimizer(self, groups: list[list[dict[str, tuple[int, ...]]]]) -> None:
        """Add the options of the optimizer's groups, and the steps of ZeRO stage 3."""
        held = _content(self._root, _OPTIMIZER)
        if (_GROUPS,) not in held.values:
            raise ConfigurationError(f"{self._root / _OPTIMIZER}: the options of its groups are no plain values")
        options = held.values[_GROUPS,]()
        if not isinstance(options, list) or any(not _is_positions(option["params"]) for option in options):
            raise CorruptCheckpointError(f"{self._root / _OPTIMIZER}: its groups name no parts of the optimizer")
        for at, name in [(at, name) for of_rank in groups for at, group in enumerate(of_rank) for name in group]:
            path = ("optimizer", "state", name, "step")
            of_part: StatePath = (_OPTIMIZER_STATE, "state", at, "step")
            if path in self._tensors or path in self._values:
                continue
            if of_part in held.tensors:
                self._add(path, replace(held.tensors[of_part], memory=None))
            elif of_part in held.values:
                self._values[path] = partial(_steps, held.values[of_part], str(self._root / _OPTIMIZER))
        self._values["optimizer", _GROUPS] = partial(_with_names, options, groups, str(self._root / _OPTIMIZER))

    def _add(self, path: StatePath, tensor: OtherTensor) -> None:
        self._tensors[path] = replace(tensor, path=path)


def _content(root: Path, file: str) -> Content:
    """The content of a file, by keys and positions, of whatever containers."""
    held = content_of(root, file)
    tensors = {tuple(map(key_of, path)): tensor for path, tensor in held.tensors.items()}
    return replace(held, tensors=tensors, values={tuple(map(key_of, path)): value for path, value in held.values.items()})


def _steps(read: Callable[[], Any], where: str) -> torch.Tensor:
    """Return a number of steps in the form of `torch.optim`. DeepSpeed's own optimizers have a plain one."""
    steps = read()
    if type(steps) is not int or not 0 <= steps < 1 << 63:
        raise CorruptCheckpointError(f"{where}: the number of steps is {steps!r:.80}")
    return torch.tensor(float(steps), dtype=torch.float32, device="cpu")


def _value(held: Content, key: str) -> Any:
    """A plain value of a file; None: it has none."""
    if (key,) in held.values:
        return held.values[key,]()
    return {path[1]: read() for path, read in held.values.items() if path[0] == key and len(path) == 2}


def _groups(held: Content) -> list[dict[str, tuple[int, ...]]]:
    """Name and shape of the parameters of each part of the optimizer: of a group, or in ZeRO stage 3 of some of a group."""
    return [
        {str(name): sizes_in(shape) for name, shape in group.items()} for group in _value(held, "param_shapes") or ()
    ]


def _is_positions(given: Any) -> bool:
    return isinstance(given, list) and all(type(at) is int for at in given)


def _with_names(
    options: Sequence[dict[str, Any]], groups: Sequence[Sequence[Mapping[str, Any]]], where: str
) -> list[dict[str, Any]]:
    """Return the options of each group with the names of its parameters.

    Args:
        options: have the positions of a group's parts as its "params".
        groups: parts of each file of the model's states: of data, tensor or pipeline parallel ranks.

    Raises:
        ConfigurationError: it cannot be told which parameters have which options.
    """
    positions = [at for group in options for at in group["params"]]
    made = []
    for of_rank in groups:
        if sorted(positions) != list(range(len(of_rank))):
            raise ConfigurationError(
                f"{where} has options for the parts {positions} of the optimizer, where {len(of_rank)} have parameters"
            )
    for group in options:
        names = dict.fromkeys(name for of_rank in groups for at in group["params"] for name in of_rank[at])
        made.append({option: value for option, value in group.items() if option != "step"} | {"params": list(names)})
    return made


def _joined(parts: Sequence[OtherTensor], shape: tuple[int, ...], where: str) -> list[FilePiece]:
    """Find the pieces of a tensor that lies flat in one part after the other, with padding at the end."""
    found, start = [], 0
    for part in parts:
        pieces = part.pieces()
        if not isinstance(pieces, list):
            raise CorruptCheckpointError(f"{where} lies in parts that are not flat")
        stop = min(start + math.prod(part.shape), math.prod(shape))
        found += [
            FilePiece(box, pieces[0].file, pieces[0].offset + first * item_bytes(part.dtype))
            for box, first in flat_boxes(shape, start, stop)
        ]
        start = stop
    return found
