"""The newest version for a rollout that joins a running job, loaded before its first update, and verified.

    trainers' memory (P2P)  or  files of a checkpoint -> receive buffer -> digest of each bucket -> live model, version

The weights are those of one step: from memory, each bucket must have the published digest; from files, a checkpoint is of one step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ckpt.engine.agreed import version_digest
from ckpt.engine.base import WeightVersion
from ckpt.engine.elastic.membership import News
from ckpt.engine.update import Sink
from ckpt.engine.wire.layout import WeightLayout
from ckpt.engine.wire.pool import ReceivedStream
from ckpt.errors import CorruptCheckpointError, MissingStateError
from ckpt.format.dtypes import as_integers

Digest = Callable[[torch.Tensor], str]


def load_from_peers(
    sink: Sink, news: News, layout: WeightLayout, digest: Digest, read: Callable[[Mapping[int, torch.Tensor]], None]
) -> WeightVersion:
    """Load the newest published version from the trainers' memory, if it is still there.

    Args:
        digest: of a bucket (`VersionedEngine.digest_of`).
        read: fills buckets, flat host memory by number.

    Raises:
        CorruptCheckpointError: the bytes are of another version, or of several: the trainers publish the next one already.
    """
    receive_buffer = _room_for(layout)
    buckets = {number: receive_buffer.bucket(number) for number in range(layout.num_buckets)}
    read(buckets)
    changed = [number for number, host in buckets.items() if digest(host) != news.buckets.get(number)]
    if changed:
        raise CorruptCheckpointError(
            f"{len(changed)} of {layout.num_buckets} buckets in the trainers' memory are not those of step {news.step} any more"
        )
    version = WeightVersion(news.step, news.digest)
    sink.load(receive_buffer.weights(), version)
    return version


def load_from_checkpoint(
    sink: Sink, news: News, layout: WeightLayout, digest: Digest, step: int, weights: Mapping[str, torch.Tensor]
) -> WeightVersion:
    """Load the weights of a checkpoint, in the types in which they would have travelled.

    Args:
        digest: of a bucket (`VersionedEngine.digest_of`).
        step: of the checkpoint.
        weights: by name, on the host.

    Returns:
        the version, as the other rollouts have it from the trainers.

    Raises:
        MissingStateError: the checkpoint lacks a weight.
        CorruptCheckpointError: the checkpoint is of the newest published step, and holds other bits.
    """
    receive_buffer = _room_for(layout)
    for name, there in receive_buffer.weights():
        if name in layout.aliases:
            continue
        if name not in weights or weights[name].shape != there.shape:
            raise MissingStateError(
                f"{name} is published as {list(there.shape)}, and is not so in the checkpoint of step {step}"
            )
        _put(weights[name], there)
    digests = {number: digest(receive_buffer.bucket(number)) for number in range(layout.num_buckets)}
    version = WeightVersion(step, version_digest(layout, digests))
    if step == news.step and version.digest != news.digest:
        raise CorruptCheckpointError(
            f"the checkpoint of step {step} has weights with digest {version.digest}, expected {news.digest}, as published"
        )
    sink.load(receive_buffer.weights(), version)
    return version


def _room_for(layout: WeightLayout) -> ReceivedStream:
    receive_buffer = ReceivedStream()
    receive_buffer.make_room(layout)
    for number in range(layout.num_buckets):
        receive_buffer.bucket(number).zero_()  # the padding is part of the digests
    return receive_buffer


def _put(weight: torch.Tensor, there: torch.Tensor) -> None:
    """Copy or cast; without a cast all bits are kept."""
    if weight.dtype == there.dtype:
        weight, there = as_integers(weight), as_integers(there)
    there.copy_(weight)
