"""The components in a state dict that was saved alone, for a run that has some: found by the rules for other programs' checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from ckpt.format.manifest import STATE
from ckpt.loading.direct import DirectLoad
from ckpt.loading.other_formats.other_checkpoint import OtherCheckpoint, OtherTensor
from ckpt.loading.other_formats.other_source import OtherSource
from ckpt.loading.sources import CheckpointSource, ManifestSource
from ckpt.loading.strategy import Reading, ReadRequest
from ckpt.memory.device import device_of
from ckpt.state.flatten import Path as StatePath
from ckpt.state.flatten import plain_and_paths, without_kind
from ckpt.state.sharing import SharingPattern, StateComponent
from ckpt.state.statefuls import Given


class PartsOfState(OtherSource):
    """See the module. Digests, and what the checkpoint says of its run, are those of the whole. See `CheckpointSource`."""

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
        values = {paths[name]: partial(_itself, value) for name, value in plain.items()}
        in_order = [*map(without_kind, paths.values()), *((name,) for name in entries if name not in paths)]
        checkpoint = OtherCheckpoint(Path(), "ckpt.save", tensors, values, paths=in_order)
        super().__init__(Path(), checkpoint, whole.topology, DirectLoad(), device_of(()))
        self.checkpoint_id, self.run_id, self.history = whole.checkpoint_id, whole.run_id, whole.history
        self.config_text, self.metrics, self.metadata = whole.config_text, whole.metrics, whole.metadata

    def _plain_values(
        self, key: str, places: Mapping[StatePath, StatePath]
    ) -> tuple[dict[StatePath, Any], set[StatePath]]:
        self._unread[key] = {}
        values = self._checkpoint.values
        return {path: values[place]() for path, place in places.items() if place in values}, set()

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


def _never() -> Any:
    raise AssertionError("the whole reads its tensors")


def _itself(value: Any) -> Any:
    return value
