"""Open universal checkpoints of DeepSpeed: what its `ds_to_universal.py` makes of a ZeRO checkpoint. No code of their pickles runs.

    latest_universal                    name of the folder with the newest one
    <tag>_universal/
        zero/<parameter>/fp32.pt        the master weight, whole; exp_avg.pt and exp_avg_sq.pt beside it are AdamW's moments
        zero/<parameter>/step.pt        the number of steps; ZeRO stage 3 has it in optimizer_state.pt alone
        zero/optimizer_state.pt         options of the groups of parameters
        *mp_rank_*_model_states.pt      the module's state as it was trained in, names and shapes of the parameters of each group

Its components are "model", with the master weights and the buffers of the module, "optimizer", by names of parameters, and
"lr_scheduler" where there was one. Each file is one of `torch.save`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ckpt.errors import CheckpointError, CheckpointNotFoundError, ConfigurationError, CorruptCheckpointError
from ckpt.format.box import Box, whole
from ckpt.format.checkpoint_files import CheckpointFolder
from ckpt.loading.other_formats.other_checkpoint import OtherCheckpoint, OtherTensor, Piece, Step
from ckpt.loading.other_formats.torch_archives import sizes_in
from ckpt.loading.other_formats.torch_files import Content, content_of

LATEST = "latest_universal"
_ZERO = "zero"
_OPTIMIZER = f"{_ZERO}/optimizer_state.pt"
_MODEL_STATES = "_model_states.pt"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_WEIGHT = "fp32"
_PARAM = "param"
_GROUPS = "param_groups"
_SCHEDULE = "lr_scheduler"
_MOST_NAME_BYTES = 1024


def is_deepspeed(path: Path) -> bool:
    """Whether a folder is a universal checkpoint of DeepSpeed, or names the newest of those in it."""
    return (path / LATEST).is_file() or (path / _OPTIMIZER).is_file()


def open_deepspeed(path: Path, *, allow_pickle: bool) -> OtherCheckpoint:
    """Open it. Reads what describes the tensors in each of its files.

    Raises:
        CheckpointNotFoundError: pickles are not allowed.
        CorruptCheckpointError: a file is damaged, or is missing.
    """
    if not allow_pickle:
        raise CheckpointNotFoundError(
            f"{path} is a universal checkpoint of DeepSpeed, whose files are pickles. To read them, without running any code in them, "
            "load with allow_pickle=True."
        )
    root = path if (path / _OPTIMIZER).is_file() else path / _latest(path)
    try:
        return _Opening(root).checkpoint()
    except CheckpointError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise CorruptCheckpointError(f"{root} is not what DeepSpeed writes: {error!r}") from None


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
        self._tensors: dict[tuple[Step, ...], OtherTensor] = {}
        self._values: dict[tuple[Step, ...], Callable[[], Any]] = {}

    def checkpoint(self) -> OtherCheckpoint:
        ranks = [content_of(self._root, one) for one in sorted(os.listdir(self._root)) if one.endswith(_MODEL_STATES)]
        if not ranks:
            raise CorruptCheckpointError(f"{self._root} has no file *{_MODEL_STATES}")
        groups = [_groups(one) for one in ranks]
        shapes = {name: shape for of_rank in groups for group in of_rank for name, shape in group.items()}
        tied = {name: source for one in ranks for name, source in (_value(one, "shared_params") or {}).items()}
        buffers = {name: one for one in reversed(ranks) for name in _value(one, "buffer_names") or ()}
        names = {one for one in os.listdir(self._root / _ZERO) if (self._root / _ZERO / one).is_dir()}
        for name in sorted((names | shapes.keys()) - tied.keys() - buffers.keys()):
            self._parameter(name, shapes.get(name))
        for name, one in buffers.items():
            self._add(("model", name), one.tensors["module", name])
        for name, source in tied.items():
            self._add(("model", name), self._tensors["model", source])
        self._optimizer(groups)
        schedule = {path: read for path, read in ranks[0].values.items() if path[0] == _SCHEDULE and path[1:]}
        self._values |= schedule
        tensors = {repr(path): one for path, one in self._tensors.items()}
        return OtherCheckpoint(self._root, "DeepSpeed", tensors, self._values)

    def _parameter(self, name: str, shape: tuple[int, ...] | None) -> None:
        """Add a master weight, and its part of the optimizer's state; a weight that was never trained has none."""
        folder = f"{_ZERO}/{name}"
        weight = self._tensor(f"{folder}/{_WEIGHT}.pt", shape)
        self._add(("model", name), weight)
        files = set(os.listdir(self._root / folder))
        for moment in _MOMENTS:
            if f"{moment}.pt" in files:
                one = self._tensor(f"{folder}/{moment}.pt", shape)
                if one.shape != weight.shape:
                    raise CorruptCheckpointError(
                        f"{self._root / folder}: {moment}.pt holds {list(one.shape)}, and {_WEIGHT}.pt {list(weight.shape)}"
                    )
                self._add(("optimizer", "state", name, moment), one)
        if "step.pt" in files:
            steps = content_of(self._root, f"{folder}/step.pt")
            for one in steps.tensors.values():
                self._add(("optimizer", "state", name, "step"), one)
            for value in steps.values.values():
                self._values["optimizer", "state", name, "step"] = value

    def _tensor(self, file: str, shape: tuple[int, ...] | None) -> OtherTensor:
        """The tensor of a file. ZeRO stage 3 has it flat.

        Args:
            shape: what the model's states say; that of a part, where there was tensor parallelism.
        """
        held = content_of(self._root, file)
        if () not in held.tensors:
            return held.tensors[_PARAM,]
        flat = held.tensors[()]
        if shape is None or flat.shape != (math.prod(shape),):
            raise CorruptCheckpointError(f"{self._root / file} holds {list(flat.shape)}, for a parameter of {shape}")
        return replace(flat, shape=shape, pieces=partial(_reshaped, flat, whole(shape), str(self._root / file)))

    def _optimizer(self, groups: list[list[dict[str, tuple[int, ...]]]]) -> None:
        """Add the options of the optimizer's groups, and the steps of ZeRO stage 3."""
        held = content_of(self._root, _OPTIMIZER)
        if (_GROUPS,) not in held.values:
            raise ConfigurationError(f"{self._root / _OPTIMIZER}: the options of its groups are no plain values")
        options = [
            {option: value for option, value in one.items() if option not in ("params", "step")}
            for one in held.values[_GROUPS,]()
        ]
        steps = [
            one for path, one in held.tensors.items() if len(path) == 4 and path[1] == "state" and path[3] == "step"
        ]
        for path in [one for one in self._tensors if one[0] == "optimizer" and one[-1] == _MOMENTS[0]]:
            at = (*path[:-1], "step")
            if steps and at not in self._tensors and at not in self._values:
                self._add(at, replace(steps[0], memory=None))
        self._values["optimizer", _GROUPS] = partial(_with_names, options, groups, str(self._root / _OPTIMIZER))

    def _add(self, path: tuple[Step, ...], tensor: OtherTensor) -> None:
        self._tensors[path] = replace(tensor, path=path)


def _value(held: Content, key: str) -> Any:
    """A plain value of a file; None: it has none."""
    if (key,) in held.values:
        return held.values[key,]()
    return {path[1]: read() for path, read in held.values.items() if path[0] == key and len(path) == 2}


def _groups(held: Content) -> list[dict[str, tuple[int, ...]]]:
    """Name and shape of the parameters of each group."""
    return [
        {str(name): sizes_in(shape) for name, shape in group.items()} for group in _value(held, "param_shapes") or ()
    ]


def _with_names(
    options: Sequence[dict[str, Any]], groups: Sequence[Sequence[Mapping[str, Any]]], where: str
) -> list[dict[str, Any]]:
    """Return the options of each group with the names of its parameters.

    Args:
        groups: those of each file of the model's states: of tensor or pipeline parallel ranks.

    Raises:
        ConfigurationError: it cannot be told which parameters have which options.
    """
    made = []
    for of_rank in groups:
        if len(of_rank) != len(options) and any(one != options[0] for one in options):
            raise ConfigurationError(
                f"{where} has {len(options)} groups with other options, for {len(of_rank)} groups of parameters"
            )
        made += [{**options[min(at, len(options) - 1)], "params": list(names)} for at, names in enumerate(of_rank)]
    seen: set[str] = set()
    for group in made:
        group["params"] = [name for name in group["params"] if name not in seen]
        seen |= set(group["params"])
    return [group for group in made if group["params"]]


def _reshaped(flat: OtherTensor, box: Box, where: str) -> list[Piece]:
    pieces = flat.pieces()
    if not isinstance(pieces, list):
        raise CorruptCheckpointError(f"{where} holds no flat tensor")
    return [Piece(box, one.file, one.offset) for one in pieces]
