"""The programs whose checkpoints are read: how a path is found to be of one, its reader, its writer, and its name for people.

A program's modules are imported when a path may be of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ckpt.format.manifest import MANIFEST_NAME, STATE
from ckpt.format.manifest_parsing import parse_manifest
from ckpt.format.places import Place
from ckpt.interop.unpickling import require_allowed
from ckpt.loading import programs
from ckpt.loading.loader import Loader, manifest_bytes_at
from ckpt.loading.other_checkpoint import OtherCheckpoint
from ckpt.loading.sources import CheckpointSource
from ckpt.loading.strategy import LoadingStrategy
from ckpt.memory.device import device_of
from ckpt.ranks.topology import Topology
from ckpt.state.sharing import Sharing, SharingPattern
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


class _Programs:
    """See `ckpt.loading.programs.Programs`. What is found is the name of a format, or the files of an old checkpoint."""

    def found_at(self, path: Place, *, allow_pickle: bool) -> Any:
        from ckpt.interop.torch_save.old_folders import old_files

        return old_files(path, allow_pickle=allow_pickle) or format_at(path)

    def opened(self, path: Place, found: Any, loader: Loader) -> CheckpointSource:
        from ckpt.interop.exported import ExportedSource
        from ckpt.interop.other_source import OtherSource
        from ckpt.interop.torch_save.old_folders import OldSource

        if isinstance(found, list):
            assert isinstance(path, Path)
            return OldSource(path, found, loader.topology)
        with loader.topology.phase("open"):
            checkpoint = PROGRAMS[found].open(path, allow_pickle=loader.allow_pickle)
        is_one = [component.key for component in loader.components] == [STATE]
        source = OtherSource(path, checkpoint, loader.topology, loader.strategy, loader.device)
        source.leaves_out_unknown = is_one
        if checkpoint.records is not None:
            with loader.topology.phase("open records"):
                of_export = ExportedSource(checkpoint, checkpoint.records, loader.topology, loader.strategy, loader.device)
            if of_export.holds(STATE) or not is_one:
                return of_export
        return source

    def advice(self, path: Place) -> str | None:
        from ckpt.interop.recognised import recognised

        return recognised(path) if isinstance(path, Path) else None


def register_programs() -> None:
    """Let loads in this process read the checkpoints of other programs."""
    programs.register(_Programs())


def require_checkpoint(path: Place, *, allow_pickle: bool) -> None:
    """Raise unless a folder holds a checkpoint, before there are ranks to load it. Any process.

    Raises:
        CheckpointNotFoundError: it holds none, or an old one, and `allow_pickle` is false.
    """
    register_programs()
    if not programs.programs().found_at(path, allow_pickle=allow_pickle):
        manifest_bytes_at(path)


def components_of(path: Place) -> dict[str, Sharing]:
    """Return the components of a checkpoint, and how each was saved; that of another program is one component. Any process.

    Raises:
        CheckpointNotFoundError: there is none.
        CorruptCheckpointError: its manifest is damaged.
    """
    register_programs()
    if format_at(path):
        return {STATE: Sharing(SharingPattern.SHARDED)}
    saved = parse_manifest(manifest_bytes_at(path), str(path / MANIFEST_NAME)).components
    return {key: Sharing(SharingPattern(component.sharing_pattern), component.group_name) for key, component in saved.items()}


def source_at(
    path: Place, topology: Topology, strategy: LoadingStrategy, *, allow_pickle: bool = False
) -> CheckpointSource:
    """Open a checkpoint of any format for reading on the host. Any process, alone.

    Raises: as `components_of`, and
        CheckpointNotFoundError: it holds pickles, and these are not allowed.
    """
    register_programs()
    return Loader((), topology, strategy, device_of(()), verify=True, allow_pickle=allow_pickle).open(path)
