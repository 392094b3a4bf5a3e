"""Digest of a distributed state: equal for equal values under any sharding, computed without gathering the values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import torch

from ckpt.format.box import Box
from ckpt.format.dtypes import raw_bytes
from ckpt.format.manifest import digest_of
from ckpt.planning.plan import half_tied
from ckpt.planning.tables import Address
from ckpt.ranks.topology import Topology
from ckpt.state.abilities import tied_names
from ckpt.state.address import address_of, local_tensor
from ckpt.state.flatten import TensorLeaf, flatten
from ckpt.state.sharing import Stateful, find_aliases

_SEEDS = (np.uint64(0), np.uint64(0x5851F42D4C957F2D))
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_BLOCK_ELEMENTS = 1 << 16


def state_digest(statefuls: Mapping[str, Stateful], topology: Topology) -> str:
    """Return 32 hex digits that depend on every bit of every tensor, and on nothing else. Collective.

    For each tensor: two sums modulo 2^64, under two seeds, of hash(index of the element in the global tensor, bits of the
    element); each element counts once, on whichever ranks it is held. Then xxh3-128 of the sorted (name, dtype, global shape,
    sums). Tied tensors count once, under their first name. Plain values do not count.

    Args:
        statefuls: component name -> object, such as the model and the optimizer.

    Raises:
        ShardingError: two tensors are tied on some ranks only.
    """
    tensors: dict[str, TensorLeaf] = {}
    tied: dict[str, str] = {}
    for component, stateful in statefuls.items():
        leaves = flatten(stateful.state_dict(), component).tensors
        aliases = find_aliases(leaves, tied_names(stateful))
        tensors |= {f"{component}.{key}": leaf for key, leaf in leaves.items() if key not in aliases}
        tied |= {f"{component}.{alias}": f"{component}.{first}" for alias, first in aliases.items()}
    found = {name: address_of(leaf, name) for name, leaf in tensors.items()}
    with topology.phase("digest addresses") as phase:
        phase.payload = [[[name, a.box.offsets, a.box.shape] for name, a in found.items()], tied]
    holders: dict[tuple[str, Box], list[int]] = defaultdict(list)
    for rank, (rows, _) in enumerate(phase.payloads):
        for name, offsets, shape in rows:
            holders[name, Box(tuple(offsets), tuple(shape))].append(rank)
    tied_on = {
        alias: (first, rank)
        for rank, (_, ties) in reversed([*enumerate(phase.payloads)])
        for alias, first in ties.items()
    }
    mine = _share(holders, topology.rank)
    with topology.phase("digest") as phase:
        _require_no_half_ties(holders, tied_on)
        phase.payload = [
            [name, a.dtype, list(a.global_shape), *_sums(tensors[name], a, topology)]
            for name, a in found.items()
            if name in mine
            and name not in tied_on  # a tied name here is an empty piece: it has no memory to be found by
        ]
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for rows in phase.payloads:
        for name, dtype, shape, *sums in rows:
            line = f"{name} {dtype} {shape}"
            totals[line] = [(total + part) % 2**64 for total, part in zip(totals[line], sums, strict=True)]
    return digest_of("\n".join(f"{line} {a:016x} {b:016x}" for line, (a, b) in sorted(totals.items())).encode())


def _require_no_half_ties(holders: Mapping[tuple[str, Box], list[int]], tied_on: Mapping[str, tuple[str, int]]) -> None:
    for (name, box), ranks in holders.items():
        if name in tied_on and box.num_elements:
            raise half_tied(name, *tied_on[name], ranks[0])


def _share(holders: Mapping[tuple[str, Box], list[int]], rank: int) -> set[str]:
    """Assign every box to one of its holders, largest first to the least loaded; return the names of this rank's."""
    load: dict[int, int] = defaultdict(int)
    mine = set()
    for (name, box), ranks in sorted(
        holders.items(), key=lambda entry: (-entry[0][1].num_elements, entry[0][0], entry[1])
    ):
        owner = min(ranks, key=lambda r: (load[r], r))
        load[owner] += box.num_elements
        if owner == rank:
            mine.add(name)
    return mine


def _sums(leaf: TensorLeaf, address: Address, topology: Topology) -> tuple[int, int]:
    """Return the two sums over this rank's box, in blocks that fit the CPU cache."""
    bits = _element_bits(local_tensor(leaf))
    sums = [np.uint64(0), np.uint64(0)]
    words = bits.size // max(address.box.num_elements, 1)
    with np.errstate(over="ignore"):
        for start in range(0, bits.size, _BLOCK_ELEMENTS):
            block = bits[start : start + _BLOCK_ELEMENTS].astype(np.uint64)
            index = _global_index(np.arange(start, start + block.size, dtype=np.uint64), address, words)
            keyed = block + (index + np.uint64(1)) * _STEP
            for at, seed in enumerate(_SEEDS):
                sums[at] += _mix(keyed ^ seed).sum(dtype=np.uint64)
            topology.progress()
    return int(sums[0]), int(sums[1])


def _mix(z: np.ndarray) -> np.ndarray:
    """Apply the finaliser of splitmix64 (Steele, Lea, Flood 2014) to each element."""
    z = (z ^ (z >> np.uint64(30))) * _MIX[0]
    z = (z ^ (z >> np.uint64(27))) * _MIX[1]
    mixed: np.ndarray = z ^ (z >> np.uint64(31))
    return mixed


def _element_bits(local: torch.Tensor) -> np.ndarray:
    """Return the elements as unsigned integers, row-major; two per complex128, real before imaginary."""
    host = local.cpu().contiguous()
    width = min(host.element_size(), 8)
    array: np.ndarray = raw_bytes(host).numpy().view(f"<u{width}")
    return array


def _global_index(local: np.ndarray, address: Address, words: int) -> np.ndarray:
    """Convert row-major indices in the box to row-major indices in the global tensor."""
    if address.box.shape == address.global_shape:
        return local
    words64 = np.uint64(words)
    rest, part = local // words64, local % words64
    index = np.zeros_like(local)
    stride = 1
    for offset, side, whole_side in zip(
        reversed(address.box.offsets), reversed(address.box.shape), reversed(address.global_shape), strict=True
    ):
        index += (rest % np.uint64(side) + np.uint64(offset)) * np.uint64(stride)
        rest //= np.uint64(side)
        stride *= whole_side
    return index * words64 + part
