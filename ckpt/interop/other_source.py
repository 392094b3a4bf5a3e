"""What a checkpoint of another program holds of a component. See `ckpt.loading.parts_of_state`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from ckpt.errors import ConfigurationError
from ckpt.format.places import Place
from ckpt.format.unknown import UnknownObject
from ckpt.interop.safetensors.hub import state_beside
from ckpt.interop.torch_save.archives import MAKES_TENSORS
from ckpt.interop.unpickling import unknown_in, without_unknown
from ckpt.loading.other_checkpoint import OtherCheckpoint
from ckpt.loading.parts_of_state import StateDictSource, list_above
from ckpt.loading.report import some_of
from ckpt.loading.strategy import LoadingStrategy
from ckpt.memory.device import Device
from ckpt.ranks.topology import Topology
from ckpt.state.flatten import Path, flatten, joined_key
from ckpt.state.plain import IN_JSON

_log = logging.getLogger("ckpt")

_OF_WEIGHTS = ("safetensors", "torch.save")
"""Programs whose folders hold the weights of a model."""


class OtherSource(StateDictSource):
    """A checkpoint of another program, open for reading by one rank."""

    leaves_out_unknown = False
    """Leave out objects that are not plain, with a warning, and name them in `left_out`; otherwise they are `unread`."""

    def __init__(
        self, path: Place, checkpoint: OtherCheckpoint, topology: Topology, strategy: LoadingStrategy, device: Device
    ) -> None:
        super().__init__(path, checkpoint, topology, strategy, device)
        self.program = checkpoint.program
        beside = state_beside(path) if checkpoint.program in _OF_WEIGHTS else []
        self.left_out = [f"{name} (it lies beside the weights)" for name in beside]
        if beside and topology.is_lead:
            _log.warning("%s: of this folder the weights alone are read; give the path of what lies beside them: %s", path, some_of(beside))

    def _plain_values(self, key: str, places: Mapping[Path, Path]) -> tuple[dict[Path, Any], set[Path]]:
        """See `StateDictSource._plain_values`. All that is left out is noted, see `unread` and `leaves_out_unknown`."""
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
            if place not in tensors and path not in read and (above := list_above(path)) is not None:
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
