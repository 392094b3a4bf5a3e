"""An export of ours, with the records of the checkpoint that it was made of: the bytes are the other program's, all else is ours."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from ckpt.format.digests import digest_of
from ckpt.format.export_records import RECORDS_NAME, ExportRecords
from ckpt.format.manifest import SHARDED, STATE, ArrayEntry, CheckpointManifest
from ckpt.format.manifest_parsing import parse_manifest
from ckpt.format.places import PLAIN_NAME
from ckpt.format.strict_json import Refused, refusing
from ckpt.loading.other_checkpoint import OtherCheckpoint, OtherTensor
from ckpt.loading.sources import CheckpointSource, ManifestSource
from ckpt.loading.strategy import LoadingStrategy, Reading, ReadRequest
from ckpt.memory.device import Device
from ckpt.ranks.topology import Topology
from ckpt.state.flatten import joined_key, leaves_apart
from ckpt.state.sharing import StateComponent


def records_of(source: CheckpointSource, names: Mapping[str, str], described_by: str) -> ExportRecords | None:
    """Return the records for an export of a checkpoint; None: another program saved it, or it is a sharded state dict.

    Args:
        names: array name -> name of the tensor in the export.
        described_by: digest of the export's own description.

    Raises:
        CorruptCheckpointError: plain values are missing or damaged.
    """
    if not isinstance(source, ManifestSource) or SHARDED in source.manifest.components:
        return None
    manifest = source.manifest
    plain = {path: data.decode() for path, (_, data) in source.plain_files().items()}
    return ExportRecords(manifest.to_bytes().decode(), source.config_text, plain, dict(names), described_by)


class ExportedSource(ManifestSource):
    """An export, open for reading by one rank. Other programs keep no digests, so its bytes are not checked. See `CheckpointSource`.

    Raises:
        CorruptCheckpointError: the records do not describe the export.
    """

    def __init__(
        self,
        checkpoint: OtherCheckpoint,
        records: ExportRecords,
        topology: Topology,
        strategy: LoadingStrategy,
        device: Device,
    ) -> None:
        where = f"{checkpoint.root}/{RECORDS_NAME}"
        super().__init__(parse_manifest(records.manifest.encode(), where), records.config, topology)
        with refusing(where):
            tensors = _tensors_of(self.manifest, records, checkpoint)
        self._plain = records.plain
        self._checkpoint = OtherCheckpoint(checkpoint.root, tensors, {})
        self._strategy = strategy
        self._device = device

    def entries(self, component: StateComponent, prefix: str) -> Mapping[str, ArrayEntry]:
        found = self.manifest.arrays_of(f"{component.key}/{prefix}".removesuffix("/"))
        return {key: ArrayEntry(entry.dtype, entry.shape, alias_of=entry.alias_of) for key, entry in found.items()}

    def plain_file(self, key: str, prefix: str) -> bytes:
        """See `ManifestSource.plain_file`."""
        return self._plain[f"{key}/{prefix}{PLAIN_NAME}"].encode()

    def prepare(self, requests: Sequence[ReadRequest]) -> Reading:
        return self._strategy.prepare(requests, self._checkpoint, self.topology, self._device, verify=False)


def _hold_those_in_values(checkpoint: OtherCheckpoint, names: Collection[str]) -> None:
    """Read the values with tensors of these names, such as DCP's tuples."""
    starts = {name[:at] for name in names for at, letter in enumerate(name) if letter == "."}
    for path, read in checkpoint.values.items() if starts else ():
        start = f"{STATE}: {joined_key(path)}"
        for inner, leaf in leaves_apart(read(), lambda leaf: isinstance(leaf, torch.Tensor)) if start in starts else ():
            if isinstance(leaf, torch.Tensor):
                checkpoint.hold(f"{start}.{joined_key(inner)}", (*path, *inner), leaf)


def _tensors_of(
    manifest: CheckpointManifest, records: ExportRecords, checkpoint: OtherCheckpoint
) -> dict[str, OtherTensor]:
    """The tensors of an export by the names of the manifest.

    Raises:
        Refused: something that the manifest lists is not in the records or in the export.
    """
    _hold_those_in_values(checkpoint, set(records.names.values()) - checkpoint.tensors.keys())
    tensors = {}
    for name, entry in manifest.arrays.items():
        if entry.alias_of is not None:
            continue
        one = checkpoint.tensors.get(records.names.get(name, ""))
        if one is None or (one.dtype, one.shape) != (entry.dtype, entry.shape):
            raise Refused(f"{name!r:.80} is not in the export with the data type and shape that it had")
        tensors[name] = one
    paths = [path for component in manifest.components.values() for path in component.plain_paths()]
    if lost := [path for path in paths if path not in records.plain]:
        raise Refused(f"it lacks {lost[0]!r:.80}")
    if manifest.training_args_hash is not None and digest_of(records.config.encode()) != manifest.training_args_hash:
        raise Refused("its config is not the one that the manifest names")
    return tensors
