"""The benchmark of copies: refusals before anything is copied, groups of small tensors as in a save, and its table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt.errors import ConfigurationError
from ckpt.ranks.topology import Topology
from ckpt.saving.writing import PACKED_BYTES
from recipes.benchmark import device_copies
from recipes.benchmark.device_copies import MEASUREMENT
from tests.conf.configs import benchmark_config

KEYS = {"repeats": 1, "mib": 1}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"mib": 0}, r"benchmark\.mib=0: expected at least 1"),
        ({"repeats": "x"}, r"the benchmark has benchmark\.repeats, benchmark\.mib"),
        ({"gib": 1}, r"'gib'.*the benchmark has benchmark\.repeats, benchmark\.mib"),
    ],
)
def test_keys_that_are_not_the_benchmarks_are_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        MEASUREMENT.checked_keys({**KEYS, **wrong})


def test_a_host_has_no_copies_to_measure(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="device=cpu has no copies to measure"):
        MEASUREMENT.run(benchmark_config(tmp_path, "measure=device"), Topology.alone())
    assert list(tmp_path.iterdir()) == []


def test_small_tensors_are_copied_together_as_far_as_a_pack_goes_and_large_ones_alone() -> None:
    sizes = [PACKED_BYTES + 1, 5, PACKED_BYTES - 5, 1, 2, PACKED_BYTES - 2, 7]
    tensors = [torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes]
    groups = device_copies._packed(tensors)
    assert [[one.numel() for one in group] for group in groups] == [
        [PACKED_BYTES + 1],
        [5, PACKED_BYTES - 5],
        [1, 2],
        [PACKED_BYTES - 2],
        [7],
    ]


def test_every_name_stands_whole_in_a_table_of_wide_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    row = {
        "tensors": 1_000_000,
        "bytes": 4 << 40,
        "gb_s": {"save": 1234.5, "plain save": 1234.5, "load": 1234.5, "plain load": 1234.5},
        "ratios": {"save": 1234.5, "load": 1234.5},
    }
    names = ("large tensors", "tensors of 4 KiB", "transposed")
    machine = {"accelerator": "an NPU", "cores": 8}
    MEASUREMENT.show(
        {"machine": machine, "device": "npu", "ranks": 8, "rounds": {}, "medians": {}, "states": dict.fromkeys(names, row)}
    )
    printed = capsys.readouterr().out
    assert all(name in printed for name in names)
