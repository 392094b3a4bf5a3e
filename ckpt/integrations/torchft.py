"""torchft: a replica group that comes back gets the state of a healthy one from host memory, every byte checked, and nothing pickled.

    manager = torchft.Manager(..., checkpoint_transport=KeeperTransport())

The interface is `torchft.checkpointing.CheckpointTransport` of torchft 0.2. The group that sends copies its state to the memory of its
host, as a checkpoint, and trains on; a small process there serves it (`ckpt.storage.keeper`). Of a DTensor a rank sends its own part, to
the same rank of the other group, with the facts of which that one makes a DTensor again: all groups have equal meshes.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from contextlib import closing, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from ckpt.api.state_dicts import load, save
from ckpt.backends.base import Backend
from ckpt.errors import CheckpointNotFoundError, ConfigurationError, private_name
from ckpt.format.dtypes import is_dtensor
from ckpt.format.places import ObjectPath
from ckpt.loading.strategy import LoadingStrategy
from ckpt.ranks.addresses import own_address
from ckpt.ranks.topology import Topology
from ckpt.ranks.waiting import poll_until
from ckpt.saving.tiers import SHARED_MEMORY
from ckpt.state.address import local_tensor
from ckpt.state.flatten import Leaves, flatten, unflatten
from ckpt.storage.files import Same, remove
from ckpt.storage.keeper.client import OwnKeeper, Peer, Where, make_folder, own_keeper
from ckpt.storage.keeper.hosts import SCHEME, HostsStore
from ckpt.storage.objects.store import given_store

_AGAIN_S = 0.05
_STATE, _PARTS = "state", "parts"
"""Keys of what is saved: the state, with the parts of DTensors in their places, and the facts of each of these."""
_NEEDED_TO = "send DTensors by KeeperTransport"


class KeeperTransport:
    """Sends a state dict to replica groups that come back, and receives one. One for each rank of a replica group.

    Args:
        path: a file system of memory on this host.
        format, load: as of `ckpt.save` and `ckpt.load`.
    """

    def __init__(
        self,
        *,
        path: str | os.PathLike[str] = SHARED_MEMORY,
        format: Backend | str = "zarr",
        load: LoadingStrategy | str = "direct",
    ) -> None:
        self._format = format
        self._load = load
        self._folder = Path(path) / f"ckpt-{os.geteuid()}" / f"torchft-{secrets.token_hex(8)}"
        self._keeper = self._started()
        self._sent: tuple[Path, Same] | None = None
        self._is_step_over = False

    def metadata(self) -> str:
        """What another group's transport needs to receive from this one. It holds a secret of this job."""
        if not self._keeper.is_there():  # somebody has killed it
            self._keeper.leave(has_ended=False)
            self._keeper = self._started()
        return json.dumps(self._keeper.where)

    def send_checkpoint(self, dst_ranks: Sequence[int], step: int, state_dict: Any, timeout: timedelta) -> None:
        """Copy the state of a step to memory, where those who need it find it. Returns when it may change again.

        Raises:
            ConfigurationError: the state holds a value that is neither a tensor nor plain.
            StorageError: there is not enough memory.
        """
        self._forget()
        self._is_step_over = False
        folder = self._folder / f"step-{step}"
        leaves = flatten({_STATE: state_dict}, "the state")
        parts = {key: _facts_of(tensor) for key, tensor in leaves.tensors.items() if is_dtensor(tensor)}
        leaves.tensors |= {key: local_tensor(leaves.tensors[key]) for key in parts}
        save({**_nested(leaves), _PARTS: parts}, folder, format=self._format, topology=Topology.alone())
        self._sent = folder, Same.of(folder)

    def disallow_checkpoint(self) -> None:
        """Free the memory at the end of the step after: all groups of the step have the state by then. Until that others may still read."""
        if self._is_step_over:
            self._forget()
        self._is_step_over = True

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """Return the state of a step of another group, on the host. Waits until it is there.

        Raises:
            ConfigurationError: the metadata is of another transport.
            CheckpointNotFoundError: it did not come within the time.
            CorruptCheckpointError: what came is not what was sent.
            OSError: the other group's host cannot be reached.
        """
        try:
            host, port, secret = json.loads(metadata)
        except (ValueError, TypeError) as error:
            raise ConfigurationError(
                f"rank {src_rank} sends its state otherwise than by KeeperTransport: give all replica groups the same transport"
            ) from error
        peer = Peer(Where(host, port, secret), silence_s=timeout.total_seconds())
        place = ObjectPath(SCHEME, f"torchft-{secrets.token_hex(8)}")
        with closing(peer):
            sizes = _awaited(peer, f"step-{step}", timeout)
            store = HostsStore(self._folder, 1, {0: peer}, {path: (size, [0]) for path, size in sizes.items()})
            with closing(store), given_store(place, store):
                loaded = load(place / f"step-{step}", load=self._load, topology=Topology.alone())
        parts = loaded.pop(_PARTS)
        leaves = flatten(loaded, "the state")
        leaves.tensors |= {key: _made_of(facts, leaves.tensors[key]) for key, facts in parts.items()}
        return _nested(leaves)[_STATE]

    def shutdown(self, wait: bool = True) -> None:
        """Free the memory."""
        self._forget()
        self._keeper.leave(has_ended=True)

    def _started(self) -> OwnKeeper:
        make_folder(self._folder, is_private=True)
        return own_keeper(self._folder, own_address(), keep_s=1.0, removes=True)

    def _forget(self) -> None:
        sent, self._sent = self._sent, None
        if sent is not None:
            remove(*sent)


def _nested(leaves: Leaves) -> Any:
    return unflatten(leaves.tensors | leaves.plain, leaves.paths)


def _facts_of(tensor: Any) -> dict[str, Any]:
    """What makes a DTensor of this rank's part of it, on another group's rank of the same number."""
    _layouts()  # or this torch has meshes of another kind
    mesh = tensor.device_mesh
    return {
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "placements": [[type(each).__name__, _arguments_of(each)] for each in tensor.placements],
        "device": mesh.device_type,
        "dims": mesh.mesh_dim_names,
        "axes": [[axis.shape, axis.stride] for axis in mesh._layout],
        "ranks": mesh._rank_map.tolist(),
    }


def _arguments_of(placement: Any) -> dict[str, Any]:
    return {name: getattr(placement, name) for name in ("dim", "split_factor", "reduce_op") if hasattr(placement, name)}


def _made_of(facts: dict[str, Any], part: Any) -> Any:
    """The DTensor of a part. Its mesh equals this group's own, and has no process groups: nothing is sent to make it."""
    from torch.distributed import tensor
    from torch.distributed.device_mesh import DeviceMesh

    axis_of, layout_of = _layouts()
    kinds = {
        "Shard": tensor.Shard,
        "Replicate": tensor.Replicate,
        "Partial": tensor.Partial,
        "_StridedShard": private_name("torch.distributed.tensor.placement_types", "_StridedShard", _NEEDED_TO),
    }
    meta_of = private_name("torch.distributed.tensor._dtensor_spec", "TensorMeta", _NEEDED_TO)
    spec_of = private_name("torch.distributed.tensor._dtensor_spec", "DTensorSpec", _NEEDED_TO)
    mesh = DeviceMesh(
        facts["device"],
        mesh_dim_names=facts["dims"],
        _layout=layout_of([axis_of(*axis) for axis in facts["axes"]]),
        _rank_map=torch.tensor(facts["ranks"], dtype=torch.int, device="cpu"),
        _init_backend=False,
    )
    placements = tuple(kinds[kind](**arguments) for kind, arguments in facts["placements"])
    whole = meta_of(torch.Size(facts["shape"]), tuple(facts["stride"]), part.dtype)
    dtensor: Any = tensor.DTensor
    return dtensor(part, spec_of(mesh, placements, whole), requires_grad=False)


def _layouts() -> tuple[Any, Any]:
    """The types of torch that say how the ranks of a mesh lie: of one dimension, and of all."""
    return (
        private_name("torch.distributed._mesh_layout", "_FlatLayout", _NEEDED_TO),
        private_name("torch.distributed._mesh_layout", "_MeshLayout", _NEEDED_TO),
    )


def _awaited(peer: Peer, name: str, timeout: timedelta) -> dict[str, int]:
    """Path -> bytes of the files of a checkpoint, once it is there."""

    def ask() -> dict[str, int] | None:
        with suppress(FileNotFoundError):
            return peer.sizes(name)
        return None

    def failure() -> Exception:
        return CheckpointNotFoundError(f"timed out: {name} was not sent within {timeout.total_seconds():g} s")

    return poll_until(ask, nap=lambda _: _AGAIN_S, timeout_s=timeout.total_seconds(), failure=failure)
