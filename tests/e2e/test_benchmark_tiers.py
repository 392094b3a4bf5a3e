"""The benchmark of loads from the memory of hosts, small: where bytes come from, what it refuses, and that no memory stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckpt.errors import ConfigurationError, CorruptCheckpointError
from ckpt.ranks.topology import Topology
from recipes.benchmark.recoveries import CASES, MEASUREMENT, RESTARTED, STORE, compared
from recipes.benchmark.workloads import State
from tests.conf.configs import benchmark_config
from tests.support.ranks import run_ranks


def small(folder: Path, *overrides: str, names: list[str]) -> dict[str, Any]:
    (folder / "memory").mkdir()
    sizes = ["model.size=nano", "launch.nproc_per_node=4", "benchmark.hosts=2", "benchmark.repeats=1", "benchmark.plot=false"]
    keys = [f"benchmark.memory={folder / 'memory'}", f"benchmark.contenders=[{','.join(names)}]"]
    return benchmark_config(folder / "run", "measure=tiers", *sizes, *keys, *overrides)


@pytest.mark.parametrize("names", [["host-lost", STORE], pytest.param([*CASES], marks=pytest.mark.full)], ids=["two", "all"])
def test_each_load_finds_every_bit_and_no_byte_in_storage_but_the_one_from_there(tmp_path: Path, names: list[str]) -> None:
    result = run_ranks(4, _benchmark, small(tmp_path, names=names), process_group=True, timeout_s=120)[0]
    medians, state_bytes = result["medians"], result["state_bytes"]
    assert [*medians] == names
    for name, row in medians.items():
        assert row["here_bytes"] + row["there_bytes"] + row["storage_bytes"] >= state_bytes
        assert (row["storage_bytes"] > 0) == (name == STORE) == ("copy_s" not in row)
        assert set(result["ratios"][name]) == (set() if name == STORE else {"copy_s", "store"})
    assert medians["host-lost"]["there_bytes"] > 0.4 * state_bytes, "the host in the place of the lost one has nothing"
    if "fewer-hosts" in names:
        assert medians["fewer-hosts"]["there_bytes"] == 0, "one host is left, and has everything"
        assert medians[RESTARTED]["there_bytes"] < 0.4 * state_bytes
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["benchmark.json"] and not [*(tmp_path / "memory").iterdir()]
    assert "2 hosts, storage of 400 MiB/s" in MEASUREMENT.title(result)


def test_a_load_of_wrong_bits_ends_the_benchmark_and_frees_the_memory(tmp_path: Path) -> None:
    cfg = small(tmp_path, names=["host-lost"])
    assert run_ranks(4, _refused, cfg, process_group=True) == ["host-lost: what was loaded is not what was saved"] * 4
    assert not [*(tmp_path / "memory").iterdir()]


def test_ratios_are_over_plain_copies_and_over_storage() -> None:
    medians = {RESTARTED: {"load_s": 2.0, "copy_s": 1.0}, STORE: {"load_s": 5.0}}
    assert compared({"medians": medians})["ratios"] == {RESTARTED: {"copy_s": 2.0, "store": 2.5}, STORE: {}}


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["benchmark.hosts=1"], "benchmark.hosts=1: expected at least 2"),
        (["workload=gpt2_ddp", "benchmark.contenders=[store]"], "workload=gpt2_ddp: expected one of gpt2_fsdp"),
    ],
)
def test_a_wrong_key_is_one_sentence(tmp_path: Path, overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        small(tmp_path, *overrides, names=[STORE])


def test_ranks_that_do_not_fill_the_hosts_are_refused(tmp_path: Path) -> None:
    cfg = small(tmp_path, names=[STORE])
    with Topology.alone() as topology, pytest.raises(ConfigurationError, match="1 ranks are not two, four or another even number"):
        MEASUREMENT.run(cfg, topology)


def _benchmark(topology: Topology, cfg: dict[str, Any]) -> dict[str, Any]:
    return MEASUREMENT.run(cfg, topology)


def _refused(topology: Topology, cfg: dict[str, Any]) -> str:
    digests = iter(["as it was saved", "as it was loaded"])
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CorruptCheckpointError) as refused:
        patch.setattr(State, "digest", lambda state: next(digests))
        MEASUREMENT.run(cfg, topology)
    return str(refused.value)
