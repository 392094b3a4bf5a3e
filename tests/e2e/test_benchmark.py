"""The benchmark of saves and loads, small: its contenders, the comparison of loaded bits, and the files that it leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckpt.errors import ConfigurationError, CorruptCheckpointError
from ckpt.ranks.topology import Topology
from recipes.benchmark import contenders, conversions
from recipes.benchmark.limits import Raw
from recipes.benchmark.saves_and_loads import MEASUREMENT, SECONDS
from tests.conf.configs import benchmark_config
from tests.support.covering import sampled
from tests.support.ranks import run_ranks

EVERYBODY = [
    "raw", "raw-direct", "memcpy", "broadcast", "dcp", "safetensors", "safetensors-one-file", "zarr", "zarr/two-stage", "tensorstore",
    "tensorstore/two-stage", "tensorstore-file", "kimi-engine", "kimi-engine/two-stage", "kimi-engine-disk",
]  # fmt: skip
SAVES_ALONE, LOADS_ALONE = {"raw-direct"}, {"memcpy", "broadcast"}


class Forgetful(Raw):
    """It loads all bytes but one."""

    def load(self, folder: Path) -> None:
        super().load(folder)
        self.writes[-1][1][0] ^= 1


def config(run_dir: Path, *overrides: str, ranks: int, names: list[str]) -> dict[str, Any]:
    size = ["model.size=nano", f"launch.nproc_per_node={ranks}", "benchmark.repeats=1", "benchmark.plot=false"]
    return benchmark_config(run_dir, *size, f"benchmark.contenders=[{','.join(names)}]", *overrides)


def test_everybody_takes_part_loads_the_right_bits_and_is_told_of(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cfg = config(tmp_path, "benchmark.plot=null", ranks=2, names=EVERYBODY)
    result = run_ranks(2, _benchmark, cfg, process_group=True)[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["benchmark.json", "benchmark.png"]
    assert (tmp_path / "benchmark.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "benchmark.json").read_text()) == result
    taking_part = [name for name in EVERYBODY if name not in result["left_out"]]
    assert set(result["left_out"]) <= {"raw-direct"}, "a file system may not take O_DIRECT"
    assert [list(result[key]) for key in ("rounds", "medians", "ranges")] == [taking_part] * 3
    for name, figures in result["medians"].items():
        seconds = {"save_s"} if name in SAVES_ALONE else {"load_warm_s"} if name in LOADS_ALONE else set(SECONDS.values())
        assert seconds == set(figures) & set(SECONDS.values())
        assert all(
            0 < least <= figures[c] <= most for c, (least, most) in result["ranges"][name].items() if c in SECONDS.values()
        )
        for row in result["rounds"][name]:
            assert all(len(row[key]) == 2 for key in row if key.endswith("_of_ranks"))
    peers = {heading.removesuffix(" / ours") for heading in result["ratios"] if heading.endswith(" / ours")}
    assert peers == {"dcp", "safetensors", "safetensors-one-file"}
    unique = result["state_bytes"]
    assert result["loaded_bytes"] == 2 * unique
    read = {name: figures["bytes_read"] for name, figures in result["medians"].items() if "bytes_read" in figures}
    assert set(read) == {name for name in EVERYBODY if name.startswith(("zarr", "tensorstore", "kimi-engine"))}
    for name, num_bytes in read.items():
        copies = 0 if name.partition("/")[0] == "kimi-engine" else 1 if name.endswith("two-stage") else 2
        assert num_bytes == pytest.approx(copies * unique, rel=0.001, abs=0.001 * unique)
    printed = capfd.readouterr().err
    assert "1 rounds of raw, " in printed and "round 1/1 zarr/two-stage: save " in printed
    MEASUREMENT.show(result)
    table = capfd.readouterr().out
    assert all(word in table for word in ("tensorstore/two-stage", "best raw", "direct /", "safetensors-one-file /"))


@pytest.mark.full
@pytest.mark.parametrize("parallel", ["fsdp", "tp_fsdp"])
def test_what_four_ranks_saved_two_load(parallel: str, tmp_path: Path) -> None:
    names = ["raw", "safetensors", "dcp", "zarr"]
    cfg = config(tmp_path, "workload=reshard", f"parallel={parallel}", ranks=4, names=names)
    result = run_ranks(4, _benchmark, cfg, process_group=True, timeout_s=120)[0]
    assert (result["ranks"], result["load_ranks"], result["layout"]) == (4, 2, parallel)
    assert set(result["medians"]) == set(names)
    zarr = result["rounds"]["zarr"][0]
    assert [number is None for number in zarr["load_peak_mib_of_ranks"]] == [False, False, True, True]
    assert None not in zarr["save_peak_mib_of_ranks"]


@sampled("sharing", ["replicated", "sharded"])
def test_small_tensors_are_held_by_all_or_each_by_one(sharing: str, tmp_path: Path) -> None:
    cfg = config(
        tmp_path,
        "workload=small_tensors",
        "benchmark.small_tensors.count=101",
        f"benchmark.small_tensors.sharing={sharing}",
        ranks=2,
        names=["raw", "safetensors-one-file", "dcp", "zarr", "zarr/two-stage"],
    )
    result = run_ranks(2, _benchmark, cfg, process_group=True)[0]
    assert (result["tensors"], result["state_bytes"], result["model"]) == (101, 101 * 4096, None)
    assert result["loaded_bytes"] == 101 * 4096 * (2 if sharing == "replicated" else 1)


@pytest.mark.filterwarnings("ignore")
def test_the_adapter_of_a_fine_tune_is_saved_without_its_base(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    sizes = [f"benchmark.adapters.{name}" for name in ("hidden_size=64", "layers=1", "rank=2")]
    cfg = config(tmp_path, "workload=lora", *sizes, ranks=2, names=["raw", "pretrained", "dcp", "zarr"])
    result = run_ranks(2, _benchmark, cfg, process_group=True, timeout_s=120)[0]
    adapted = sum(2 * (rows + columns) for rows, columns in [(64, 64)] * 4 + [(192, 64)] * 3)
    assert result["state_bytes"] == 3 * 4 * adapted + 4 * 14, "the adapter, its two moments, and the steps"
    medians = result["medians"]
    assert {name for name, row in medians.items() if "load_warm_s" not in row} == {"pretrained"}
    assert result["ratios"]["pretrained / ours"]["zarr"].keys() == {"save_s"}


@pytest.mark.full
def test_through_a_slow_store_bytes_decide(tmp_path: Path) -> None:
    names = ["zarr", "zarr/two-stage"]
    cfg = config(tmp_path, "workload=slow_store", "benchmark.store_mib_s=20", "model.size=tiny", ranks=2, names=names)
    result = run_ranks(2, _benchmark, cfg, process_group=True)[0]
    for name in names:
        figures = result["medians"][name]
        assert set(figures) & set(SECONDS.values()) == {"save_s", "load_warm_s"}
        assert figures["load_warm_s"] >= figures["bytes_read"] / (20 * 2**20)
    direct, two_stage = (result["medians"][name] for name in names)
    assert direct["bytes_read"] == 2 * two_stage["bytes_read"], "each rank for itself, and each byte once"
    assert result["ratios"]["direct / two-stage"]["zarr/two-stage"]["load_warm_s"] == pytest.approx(
        direct["load_warm_s"] / two_stage["load_warm_s"]
    )


def test_a_load_that_misses_one_bit_ends_the_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(contenders.LIMITS, "raw", Forgetful)
    cfg = config(tmp_path, ranks=1, names=["raw"])
    with (
        Topology.alone() as topology,
        pytest.raises(CorruptCheckpointError, match="raw, load_cold: what was loaded is not"),
    ):
        MEASUREMENT.run(cfg, topology)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("workload", ["gpt2_ddp", "gpt2_fsdp"])
def test_torch_checkpointing_loads_the_right_bits(tmp_path: Path, workload: str) -> None:
    pytest.importorskip("torch_checkpointing")
    cfg = config(tmp_path, f"workload={workload}", ranks=2, names=["raw", "torch-checkpointing", "zarr"])
    result = run_ranks(2, _benchmark, cfg, process_group=True)[0]
    assert set(result["medians"]["torch-checkpointing"]) & set(SECONDS.values()) == set(SECONDS.values())
    assert "torch-checkpointing / ours" in result["ratios"]


def test_torch_checkpointing_is_left_out_where_it_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders.importlib.util, "find_spec", lambda name: None)
    cfg = config(tmp_path, ranks=1, names=["raw", "torch-checkpointing"])
    with Topology.alone() as topology:
        assert MEASUREMENT.run(cfg, topology)["left_out"] == {
            "torch-checkpointing": "the package torch_checkpointing is not installed: pip install -e '.[torch-checkpointing]'"
        }


def test_who_cannot_take_part_is_left_out_and_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(contenders, "takes_direct_writes", lambda folder, rank: False)
    cfg = config(tmp_path, ranks=1, names=["raw", "raw-direct", "broadcast", "dcp"])
    with Topology.alone() as topology:
        result = MEASUREMENT.run(cfg, topology)
        assert list(result["medians"]) == ["raw", "dcp"]
        assert result["left_out"] == {
            "raw-direct": "the file system does not take O_DIRECT",
            "broadcast": "one rank has nobody to send to",
        }
        MEASUREMENT.show(result)
        assert capsys.readouterr().out.count("left out: broadcast: one rank has nobody to send to") == 2
        assert [path.name for path in tmp_path.iterdir()] == ["benchmark.json"]
        with pytest.raises(ConfigurationError, match="broadcast cannot take part: one rank has nobody"):
            MEASUREMENT.run(config(tmp_path, ranks=1, names=["broadcast"]), topology)


def test_more_ranks_than_there_are_cannot_load(tmp_path: Path) -> None:
    cfg = config(tmp_path, "benchmark.load_ranks=2", ranks=1, names=["zarr"])
    sentence = "benchmark.load_ranks=2: there are 1 ranks; give launch.nproc_per_node=2"
    with Topology.alone() as topology, pytest.raises(ConfigurationError, match=sentence):
        MEASUREMENT.run(cfg, topology)


def test_a_layout_that_needs_all_ranks_cannot_be_loaded_on_some(tmp_path: Path) -> None:
    cfg = config(tmp_path, "benchmark.load_ranks=1", ranks=2, names=["zarr"])
    assert (
        run_ranks(2, _refused, cfg, process_group=True)
        == [
            "benchmark.load_ranks=1: parallel=ddp cannot be laid out on a part of the 2 ranks; choose parallel=<one of fsdp, hsdp, "
            "tp_fsdp, ddp_tp>, or benchmark.load_ranks=null"
        ]
        * 2
    )


def test_conversions_take_turns_with_a_copy(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    keys = [
        "benchmark.repeats=1",
        "benchmark.mib=4",
        "benchmark.tensor_mib=1",
        "benchmark.to=[kimi-engine,safetensors,dcp]",
    ]
    cfg = benchmark_config(tmp_path, "measure=convert", *keys)
    result = run_ranks(2, _convert, cfg, process_group=True)[0]
    assert [path.name for path in tmp_path.iterdir()] == ["benchmark.json"]
    assert json.loads((tmp_path / "benchmark.json").read_text()) == result
    names = [f"{to}, {ranks}" for to in ("kimi-engine", "safetensors", "dcp") for ranks in ("1 rank", "2 ranks")]
    assert list(result["ratios"]) == ["cp -r", "ckpt copy", *names] and result["ratios"]["cp -r"] == {"convert_s": 1}
    assert all(row["convert_s"] > 0 for row in result["medians"].values())
    assert result["bytes"] > 4 << 20 and result["tensors"] == 4
    conversions.MEASUREMENT.show(result)
    assert "of cp's speed" in capfd.readouterr().out
    with pytest.raises(ConfigurationError, match=r"benchmark.to=\['npz'\]: expected some of zarr, tensorstore, "):
        conversions.MEASUREMENT.checked_keys(cfg["benchmark"] | {"to": ["npz"]})


def _convert(topology: Topology, cfg: dict[str, Any]) -> dict[str, Any]:
    return conversions.MEASUREMENT.run(cfg, topology)


def _benchmark(topology: Topology, cfg: dict[str, Any]) -> dict[str, Any]:
    return MEASUREMENT.run(cfg, topology)


def _refused(topology: Topology, cfg: dict[str, Any]) -> str:
    with pytest.raises(ConfigurationError) as refused:
        MEASUREMENT.run(cfg, topology)
    return str(refused.value)
