"""The programs whose checkpoints are read: how a path is found to be of one, its reader, its writer, and its name for people.

A program's modules are imported when a path may be of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ckpt.format.places import Place
from ckpt.interop.unpickling import require_allowed
from ckpt.loading.other_checkpoint import OtherCheckpoint
from ckpt.storage.stored import has_manifest


@dataclass(frozen=True, slots=True)
class Program:
    """A program that writes checkpoints.

    Attributes:
        words: its name, for people.
        room: the package below `ckpt.interop` whose modules `reading` and `writing` read and write them.
        writer: the function that writes them; "": none does.
        pickles: what its checkpoints are and which of their files are pickles, for people; "": none are.
        in_stores: whether they are read in object stores, too.
        is_whole: whether the files of a checkpoint are nothing without the others.
    """

    words: str
    room: str
    writer: str = ""
    pickles: str = ""
    in_stores: bool = False
    is_whole: bool = False

    def is_at(self, path: Place) -> bool:
        """Whether there is a checkpoint of it at a path."""
        return (self.in_stores or isinstance(path, Path)) and bool(self._module("reading").is_at(path))

    def open(self, path: Place, *, allow_pickle: bool) -> OtherCheckpoint:
        """Open a checkpoint of it for reading by one rank.

        Raises:
            CheckpointNotFoundError: it holds pickles, and these are not allowed.
            CorruptCheckpointError: what describes it is damaged.
        """
        self.require_allowed(path, allow_pickle=allow_pickle)
        checkpoint: OtherCheckpoint = self._module("reading").open_at(path)
        checkpoint.program = self.words
        return checkpoint

    def require_allowed(self, path: Place, *, allow_pickle: bool) -> None:
        """Refuse to read pickles that nobody has allowed.

        Raises:
            CheckpointNotFoundError
        """
        if self.pickles:
            require_allowed(allow_pickle, f"{path} is {self.pickles}")

    def write(self, *args: Any, **options: Any) -> Any:
        """Call its writer."""
        return getattr(self._module("writing"), self.writer)(*args, **options)

    def _module(self, name: str) -> Any:
        return import_module(f"ckpt.interop.{self.room}.{name}")


_DCP = "a checkpoint of torch.distributed.checkpoint, whose .metadata is a pickle"
PROGRAMS = {
    "megatron": Program("Megatron-Core", "megatron", pickles=_DCP, is_whole=True),
    "dcp": Program("torch.distributed.checkpoint", "dcp", "export_dcp", _DCP, in_stores=True, is_whole=True),
    "torch-checkpointing": Program(
        "torch_checkpointing",
        "torch_checkpointing",
        pickles="a checkpoint of torch_checkpointing, whose metadata.pkl and .pt files are pickles",
        is_whole=True,
    ),
    "safetensors": Program("safetensors", "safetensors", "export", in_stores=True),
    "deepspeed": Program(
        "DeepSpeed",
        "deepspeed",
        pickles="a universal checkpoint of DeepSpeed, whose files are pickles",
        is_whole=True,
    ),
    "orbax": Program("Orbax", "orbax", is_whole=True),
    "torch": Program(
        "torch.save",
        "torch_save",
        "export_torch",
        "a file of torch.save, whose data.pkl is a pickle",
        in_stores=True,
    ),
}
"""By the name of their format. A path is of the first that takes it for its own."""


def format_at(path: Place) -> str | None:
    """The format of another program's checkpoint at a path; None: there is one of this package, or none that is known."""
    if has_manifest(path):
        return None
    return next((name for name, program in PROGRAMS.items() if program.is_at(path)), None)
