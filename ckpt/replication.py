"""Are equal copies really equal? Compared by digest, tensor by tensor, at any depth and in any data type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckpt.dtypes import raw_bytes
from ckpt.errors import ReplicationError
from ckpt.flatten import TensorLeaf
from ckpt.manifest import digest_of
from ckpt.mapping import local_tensor

MAX_NAMED = 5


def tensor_digests(tensors: Mapping[str, TensorLeaf]) -> dict[str, str]:
    """Key -> data type, shape and xxh3-128 of the local bytes. Two ranks hold equal bits exactly if these are equal."""
    found = {}
    for key, leaf in tensors.items():
        host = local_tensor(leaf).cpu().contiguous()
        found[key] = f"{host.dtype} {list(host.shape)} {digest_of(raw_bytes(host).numpy().data)}"
    return found


def require_equal(
    component: str, copies: Sequence[Mapping[str, object] | None], holders: Sequence[Sequence[int]]
) -> None:
    """Refuse copies that differ, naming entries and ranks.

    Args:
        component: its key.
        copies: by rank, what the rank holds by key (values, or digests of them); None where a rank holds nothing.
        holders: the sets of ranks that promised equal copies.

    Raises:
        ReplicationError: some differ.
    """
    for ranks in holders:
        reference = copies[ranks[0]] or {}
        differing: dict[str, list[int]] = {}
        for rank in ranks[1:]:
            other = copies[rank] or {}
            for key in sorted({*reference, *other}):
                if key not in reference or key not in other or reference[key] != other[key]:
                    differing.setdefault(key, []).append(rank)
        if differing:
            named = "; ".join(f"{key} on rank {_ranks(who)}" for key, who in list(differing.items())[:MAX_NAMED])
            more = f" and {len(differing) - MAX_NAMED} more entries" if len(differing) > MAX_NAMED else ""
            raise ReplicationError(
                f"component {component} should be the same on ranks {_ranks(ranks)}, but differs from rank {ranks[0]} in {named}{more}. "
                f"Choose another sharing pattern with components.{component}.sharing_pattern, or keep what differs out of it."
            )


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
