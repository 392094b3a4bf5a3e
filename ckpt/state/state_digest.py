"""Digest of a distributed state: equal for equal values under any sharding, computed without gathering the values."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from ckpt.format.box import Box, whole
from ckpt.format.digests import digest_of
from ckpt.format.dtypes import raw_bytes
from ckpt.planning.plan import Address, Holdings, Table, TablePart, Whereabouts, settled_aliases, table_to_json
from ckpt.ranks.merging import Merged, total
from ckpt.ranks.topology import Topology
from ckpt.state.abilities import tied_names
from ckpt.state.address import address_of, local_tensor
from ckpt.state.collect import DistinctRanks, digest_of_json, exchange_tables
from ckpt.state.flatten import TensorLeaf, flatten
from ckpt.state.sharing import Stateful, find_aliases

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)), (np.uint64(31), np.uint64(1)))
_BLOCK_ELEMENTS = 1 << 14


def state_digest(statefuls: Mapping[str, Stateful], topology: Topology) -> str:
    """Return 32 hex digits that depend on every bit of every tensor, and on nothing else. Collective.

    For each tensor: hash(name, dtype, global shape), and for each of its elements hash(that, index of the element in the global tensor,
    bits of the element), under two seeds; all are added up modulo 2^64. Each element counts once, on whichever ranks it is held, and tied
    tensors count once, under their first name. Plain values do not count. Of each rank two numbers travel.
    Checkpoints of adapters hold that of their base: it stays what it is.

    Args:
        statefuls: component name -> object, such as the model and the optimizer.

    Raises:
        ShardingError: two tensors are tied on some ranks only.
        ShapeMismatchError: ranks disagree about the shape or the data type of a tensor.
    """
    tensors: dict[str, TensorLeaf] = {}
    tied: dict[str, str] = {}
    for component, stateful in statefuls.items():
        leaves = flatten(stateful.state_dict(), component).tensors
        aliases = find_aliases(leaves, tied_names(stateful))
        tensors |= {f"{component}.{key}": leaf for key, leaf in leaves.items() if key not in aliases}
        tied |= {f"{component}.{alias}": f"{component}.{first}" for alias, first in aliases.items()}
    found = {name: address_of(leaf, name) for name, leaf in tensors.items()}
    table = Table((TablePart.of(found.values()),), tuple(tied.items()))
    with topology.phase("digest addresses") as phase:
        phase.to_lead = digest_of_json(table_to_json(table))
        phase.answer = lambda: DistinctRanks.of(phase.gathered)
    tables, table_of_rank = exchange_tables(table, DistinctRanks(*phase.from_lead), topology)
    with topology.phase("digest") as phase:
        holdings = Holdings(tables, table_of_rank)
        aliases = settled_aliases(tables, table_of_rank, holdings)
        share = _share(found, holdings, topology.rank)
        phase.merge = _added(((tensors[name], found[name], is_first) for name, is_first in share if name not in aliases), topology)
    return _in_hex(phase.merged)


def digest_of_boxes(boxes: Iterable[tuple[Address, torch.Tensor]], topology: Topology) -> str:
    """Return the `state_digest` of tensors of which each rank has some boxes, and all together each element once. Collective.

    Args:
        boxes: with names that begin with a component and a dot; each is valid until the next.
    """
    with topology.phase("digest") as phase:
        phase.merge = _added(((tensor, address, not any(address.box.offsets)) for address, tensor in boxes), topology)
    return _in_hex(phase.merged)


def _added(boxes: Iterable[tuple[TensorLeaf, Address, bool]], topology: Topology) -> dict[str, Merged]:
    sums = [0, 0]
    for leaf, address, is_first in boxes:
        added = _sums(leaf, address, topology, counts=is_first)
        sums = [number + other for number, other in zip(sums, added, strict=True)]
    return {"sums": total(sums)}


def _in_hex(merged: Mapping[str, Any]) -> str:
    return "".join(f"{number % 2**64:016x}" for number in merged["sums"])


def _share(found: Mapping[str, Address], holdings: Holdings, rank: int) -> Iterator[tuple[str, bool]]:
    """Yield the tensors whose boxes this rank is to hash, and whether it is the first box of the tensor.

    The boxes that equal ranks hold are dealt to these, largest first to the least loaded.
    """
    held: dict[tuple[int, ...], list[tuple[int, str, bool]]] = defaultdict(list)
    looked_up: dict[Whereabouts, tuple[Box, dict[Box, tuple[int, ...]]]] = {}
    for name, address in found.items():
        at = holdings.where[name]
        if at not in looked_up:
            boxes = holdings.look_up(name)[2]
            looked_up[at] = min(boxes, key=lambda box: box.offsets, default=address.box), boxes
        first, boxes = looked_up[at]
        box = whole(address.global_shape) if 0 in address.global_shape else address.box
        if box in boxes:
            held[boxes[box]].append((box.num_elements, name, box == first))
    for ranks, boxes_there in held.items():
        load = [(0, position) for position in range(len(ranks))]
        for num_elements, name, is_first in sorted(boxes_there, key=lambda one: (-one[0], one[1])):
            least, position = load[0]
            heapq.heapreplace(load, (least + num_elements, position))
            if ranks[position] == rank:
                yield name, is_first


def _sums(leaf: TensorLeaf, address: Address, topology: Topology, *, counts: bool) -> list[int]:
    """Return the two sums over this rank's box, in blocks that fit the CPU cache.

    Args:
        counts: add the hash of the tensor itself.
    """
    bits = _element_bits(local_tensor(leaf))
    line = digest_of(f"{address.name} {address.dtype} {list(address.global_shape)}".encode())
    seeds = [np.uint64(int(line[at : at + 16], 16)) for at in (0, 16)]
    sums = [seed if counts else np.uint64(0) for seed in seeds]
    words = bits.size // max(address.box.num_elements, 1)
    with np.errstate(over="ignore"):
        for start in range(0, bits.size, _BLOCK_ELEMENTS):
            block = bits[start : start + _BLOCK_ELEMENTS]
            keyed = _global_index(np.arange(start, start + block.size, dtype=np.uint64), address, words)
            keyed += np.uint64(1)
            keyed *= _STEP
            keyed += block
            for at, seed in enumerate(seeds):
                sums[at] += _mix(keyed ^ seed).sum(dtype=np.uint64)
            topology.progress()
    return [int(total) for total in sums]


def _mix(z: np.ndarray) -> np.ndarray:
    """Apply the finaliser of splitmix64 (Steele, Lea, Flood 2014) to each element, in place."""
    shifted = np.empty_like(z)
    for shift, factor in _MIX:
        np.right_shift(z, shift, out=shifted)
        z ^= shifted
        z *= factor
    return z


def _element_bits(local: torch.Tensor) -> np.ndarray:
    """Return the elements as unsigned integers, row-major; two per complex128, real before imaginary."""
    host = local.cpu().contiguous()
    width = min(host.element_size(), 8)
    array: np.ndarray = raw_bytes(host).numpy().view(f"<u{width}")
    return array


def _global_index(local: np.ndarray, address: Address, words: int) -> np.ndarray:
    """Convert row-major indices in the box to row-major indices in the global tensor."""
    shape, words64 = address.global_shape, np.uint64(words)
    if address.box.shape[1:] == shape[1:]:  # rows of it, or all
        local += np.uint64(math.prod(shape[1:]) * (address.box.offsets or (0,))[0]) * words64
        return local
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
