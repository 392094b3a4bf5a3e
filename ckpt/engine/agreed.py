"""Decisions before an update, made by each rank from the offers of all, so equal on all ranks. Pure.

An offer is a dictionary, see `VersionedEngine._offer`; the offers are ordered by rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpt.engine.wire.layout import WeightLayout
from ckpt.errors import ConfigurationError, ReplicationError
from ckpt.format.digests import digest_of

OPERATION = "the weight update"
"""Name of the operation, before the step is agreed on."""


def to_step(offers: Sequence[Mapping[str, Any]]) -> str:
    """Return the name of the operation, with the step."""
    return f"{OPERATION} to step {next(offer['step'] for offer in offers if offer['step'] is not None)}"


def version_digest(layout: WeightLayout, digests: Mapping[int, str]) -> str:
    """Return the digest of a version from those of its layout and its buckets."""
    return digest_of("\n".join([layout.digest(), *(digests[bucket] for bucket in sorted(digests))]).encode())


def agreed_step(offers: Sequence[Mapping[str, Any]]) -> int:
    """Return the step of an update, which must be equal on all ranks that give one, and higher than the last one."""
    steps = {offer["step"]: rank for rank, offer in reversed([*enumerate(offers)]) if offer["step"] is not None}
    if len(steps) > 1:
        (first, rank), (second, other) = sorted(steps.items(), key=lambda item: item[1])[:2]
        raise ConfigurationError(f"rank {rank} is at step {first} and rank {other} at step {second}")
    step = next(iter(steps))
    held = max((offer["held"] for offer in offers if offer["held"] is not None), default=None)
    if held is not None and step <= held:
        raise ConfigurationError(f"step {step}: expected a step higher than {held}, whose weights have been published")
    return int(step)


def require_one_layout(offers: Sequence[Mapping[str, Any]]) -> None:
    """Check that all trainers send the same weights, given their offers."""
    for rank, offer in enumerate(offers):
        if offer["layout"] != offers[0]["layout"]:
            (num, size), (num_0, size_0) = offer["size"], offers[0]["size"]
            raise ConfigurationError(
                f"trainers yield different weights: {num_0} tensors of {size_0} bytes on rank 0, {num} of {size} bytes on rank "
                f"{rank}, or others, or in another order; each has to yield all of them, in one order"
            )


def agreed_digests(reports: Sequence[Sequence[tuple[int, str]]], layout: WeightLayout) -> dict[int, str]:
    """Return the digest of each bucket. Trainers that hold the same bucket must have equal digests."""
    found: dict[int, tuple[str, int]] = {}
    for rank, rows in enumerate(reports):
        for bucket, digest in rows:
            first, of = found.setdefault(bucket, (digest, rank))
            if first != digest:
                raise ReplicationError(
                    f"trainers {of} and {rank} yield other bits of the same weights, in {layout.described(bucket)}"
                )
    return {bucket: digest for bucket, (digest, _) in found.items()}
