"""A chunk that its codec refuses is damage like any other, also if its digests were made anew: a load falls back, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import StateComponent
from ckpt.backends.zarr import ZarrBackend
from ckpt.errors import CorruptCheckpointError
from ckpt.interop.comparing import compare
from ckpt.interop.registry import source_at
from ckpt.loading.direct import DirectLoad
from ckpt.loading.strategy import LoadingStrategy
from ckpt.ranks.topology import Topology
from recipes.support.ranks import bug_beneath
from tests.support.covering import sampled
from tests.support.crafts import edit_file
from tests.support.ranks import run_ranks
from tests.support.states import Held, coordinator, spreading

CODECS: dict[str, list[dict[str, Any]]] = {
    "gzip": [{"name": "gzip", "configuration": {"level": 1}}],
    "zstd": [{"name": "zstd", "configuration": {"level": 3, "checksum": True}}],
    "blosc": [
        {
            "name": "blosc",
            "configuration": {"cname": "lz4", "clevel": 5, "shuffle": "shuffle", "typesize": 4, "blocksize": 0},
        }
    ],
    "crc32c": [{"name": "crc32c"}],
    "gzip, crc32c": [{"name": "gzip", "configuration": {"level": 1}}, {"name": "crc32c"}],
    "zlib": [{"name": "numcodecs.zlib", "configuration": {"level": 1}}],
    "bz2": [{"name": "numcodecs.bz2", "configuration": {"level": 1}}],
    "lzma": [{"name": "numcodecs.lzma", "configuration": {}}],
    "lz4": [{"name": "numcodecs.lz4", "configuration": {"acceleration": 1}}],
}
DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "other bytes": lambda data: bytes(len(data)),
    "a changed middle": lambda data: data[:40] + bytes(byte ^ 0xFF for byte in data[40:80]) + data[80:],
    "shorter": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
}
STRATEGIES: dict[str, Callable[[], LoadingStrategy]] = {"direct": DirectLoad, "two-stage": spreading}
pytestmark = pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3")


def save_two(root: Path, codec: str, topology: Topology) -> None:
    parts = [StateComponent("model", Held({"w": torch.arange(40_000.0)}), "replicated")]
    with coordinator(topology, root, parts, backend=ZarrBackend(compressors=CODECS[codec])) as made:
        for number in (1, 2):
            parts[0].stateful.state["w"][0] = number
            made.save_checkpoint(checkpoint_id=str(number))


def damage(folder: Path, how: str) -> None:
    file = max((one for one in folder.glob("model/w/c/*")), key=lambda one: one.stat().st_size)
    edit_file(folder, str(file.relative_to(folder)), DAMAGE[how])


def load_newest(topology: Topology, root: Path, codec: str, strategy: str) -> None:
    parts = [StateComponent("model", Held({"w": torch.zeros(40_000)}), "replicated")]
    backend = ZarrBackend(compressors=CODECS[codec])
    with coordinator(topology, root, parts, backend=backend, strategy=STRATEGIES[strategy]()) as made:
        made.load_checkpoint()
        assert made.last_load is not None and made.last_load.fell_back_from == (str(root / "checkpoint-2"),)
        assert parts[0].stateful.loaded["w"][0] == 1
        with pytest.raises(CorruptCheckpointError) as caught:
            made.load_checkpoint(root / "checkpoint-2")
        assert bug_beneath(caught.value) is None


@sampled("strategy", STRATEGIES)
@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("codec", CODECS)
def test_a_load_falls_back_from_a_chunk_that_does_not_decode(
    tmp_path: Path, codec: str, how: str, strategy: str
) -> None:
    save_two(tmp_path, codec, Topology.alone())
    damage(tmp_path / "checkpoint-2", how)
    load_newest(Topology.alone(), tmp_path, codec, strategy)
    one = source_at(tmp_path / "checkpoint-1", Topology.alone(), DirectLoad(), allow_pickle=False)
    with pytest.raises(CorruptCheckpointError):
        list(compare(one, source_at(tmp_path / "checkpoint-2", Topology.alone(), DirectLoad(), allow_pickle=False)))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_ranks_fall_back_from_it(tmp_path: Path, strategy: str) -> None:
    save_two(tmp_path, "gzip", Topology.alone())
    damage(tmp_path / "checkpoint-2", "a changed middle")
    run_ranks(2, load_newest, tmp_path, "gzip", strategy)
