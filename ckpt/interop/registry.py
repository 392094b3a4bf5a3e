"""Opens a checkpoint of any format, and registers the programs for loads, which do not know them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckpt.format.manifest import MANIFEST_NAME, STATE
from ckpt.format.manifest_parsing import parse_manifest
from ckpt.format.places import Place
from ckpt.interop.programs import PROGRAMS, format_at
from ckpt.loading import other_checkpoint
from ckpt.loading.loader import Loader, manifest_bytes_at
from ckpt.loading.other_checkpoint import Opening
from ckpt.loading.sources import CheckpointSource
from ckpt.loading.strategy import LoadingStrategy
from ckpt.memory.device import device_of
from ckpt.ranks.topology import Topology
from ckpt.state.sharing import Sharing, SharingPattern


class _Programs:
    """See `ckpt.loading.other_checkpoint.Programs`. What is found is the name of a format, or the files of an old checkpoint."""

    def found_at(self, path: Place, *, allow_pickle: bool) -> Any:
        from ckpt.interop.torch_save.old_folders import old_files

        return old_files(path, allow_pickle=allow_pickle) or format_at(path)

    def opened(self, path: Place, found: Any, topology: Topology, opening: Opening) -> CheckpointSource:
        from ckpt.interop.exported import ExportedSource
        from ckpt.interop.other_source import OtherSource
        from ckpt.interop.torch_save.old_folders import OldSource

        if isinstance(found, list):
            assert isinstance(path, Path)
            return OldSource(path, found, topology)
        with topology.phase("open"):
            checkpoint = PROGRAMS[found].open(path, allow_pickle=opening.allow_pickle)
        source = OtherSource(path, checkpoint, topology, opening.strategy, opening.device)
        source.leaves_out_unknown = opening.is_state_alone
        if checkpoint.records is not None:
            with topology.phase("open records"):
                of_export = ExportedSource(checkpoint, checkpoint.records, topology, opening.strategy, opening.device)
            if of_export.holds(STATE) or not opening.is_state_alone:
                return of_export
        return source

    def advice(self, path: Place) -> str | None:
        from ckpt.interop.recognised import recognised

        return recognised(path) if isinstance(path, Path) else None


def register_programs() -> None:
    """Let loads in this process read the checkpoints of other programs."""
    other_checkpoint.register(_Programs())


def require_checkpoint(path: Place, *, allow_pickle: bool) -> None:
    """Raise unless a folder holds a checkpoint, before there are ranks to load it. Any process.

    Raises:
        CheckpointNotFoundError: it holds none, or an old one, and `allow_pickle` is false.
    """
    register_programs()
    if not other_checkpoint.programs().found_at(path, allow_pickle=allow_pickle):
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
