"""The benchmark of background saves: its command line, its figures of the ranks' times, and a small one from beginning to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt.errors import ConfigurationError, CorruptCheckpointError
from ckpt.ranks.topology import Topology
from recipes.benchmark import background_saves
from recipes.benchmark.background_contenders import DCP, NOTHING, OURS, Saving, settings_of
from recipes.benchmark.background_saves import COLUMNS, MEASUREMENT, compared, figures_of
from recipes.benchmark.tables import summarized
from recipes.benchmark.training_step import _in_turns
from tests.conf.configs import benchmark_config
from tests.support.ranks import run_ranks

KEYS: dict[str, Any] = {
    "workload": "gpt2_fsdp",
    "repeats": 1,
    "contenders": ["none", "dcp-thread", "thread-overlap/capped"],
    "step_s": 0.01,
    "steps": 2,
    "stepped_mib": 1,
    "writer_cores": 1,
    "writer_mib_s": None,
    "memory": "/dev/shm",
    "plot": None,
}


def config(run_dir: Path, *overrides: str) -> dict[str, Any]:
    """Return the config as the command checks it."""
    return benchmark_config(run_dir, "measure=background", *overrides)


@pytest.mark.parametrize(
    ("workload", "layout"),
    [("gpt2_fsdp", "FullySharded"), ("gpt2_ddp", "DataParallel"), ("gpt2_tp_fsdp", "TensorThenFullySharded")],
)
def test_every_workload_that_all_ranks_train_composes_with_the_benchmarks_own_contenders(
    workload: str, layout: str, tmp_path: Path
) -> None:
    run = config(tmp_path, f"workload={workload}")
    assert run["parallel"]["_target_"].endswith(f".{layout}")
    assert (run["model"]["size"], run["launch"]["nproc_per_node"], run["optimizer"]["fused"]) == ("gpt2", 4, True)
    keys = run["benchmark"]
    assert (keys["workload"], keys["repeats"], keys["step_s"]) == (workload, 5, 0.25)
    assert {NOTHING, *DCP, "sync", "thread", "thread-overlap", "thread-overlap/capped"} <= set(keys["contenders"])


def test_without_a_word_it_is_gpt2_fully_sharded(tmp_path: Path) -> None:
    assert config(tmp_path)["benchmark"]["workload"] == "gpt2_fsdp"


def test_the_words_of_a_contender_are_the_settings_of_its_saves() -> None:
    caps = {"writer_cores": 1, "writer_mib_s": 50}
    assert not settings_of("sync", caps).is_async
    for name in OURS:
        settings = settings_of(name, caps)
        assert settings.is_async == (name != "sync")
        assert settings.overlap == ("overlap" in name)
        capped = (1, 50) if name.endswith("/capped") else (None, None)
        assert (settings.writer_cores, settings.writer_mib_s) == capped


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"repeats": 0}, "benchmark.repeats=0: expected at least 1"),
        ({"steps": 0}, "benchmark.steps=0: expected at least 1"),
        ({"writer_mib_s": 0}, "benchmark.writer_mib_s=0: expected at least 1"),
        ({"step_s": 0.0}, "benchmark.step_s=0.0: expected more than 0 seconds"),
        ({"load_ranks": 2}, "the benchmark has benchmark.workload, benchmark.repeats, "),
        ({"workload": "gpt2_large"}, "workload=gpt2_large: expected one of gpt2_fsdp, gpt2_ddp, "),
        ({"contenders": []}, "benchmark.contenders=.*expected some of none, dcp-thread, "),
        ({"contenders": ["zarr"]}, "benchmark.contenders=.*expected some of none, .*, thread-overlap/capped, "),
        ({"contenders": ["sync", "sync"]}, "benchmark.contenders=.*each once"),
        ({"writer_cores": None}, "thread-overlap/capped has no cap: give benchmark.writer_cores=<cores> or"),
    ],
)
def test_a_wrong_key_is_one_sentence(wrong: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        MEASUREMENT.checked_keys({**KEYS, **wrong})


def test_parameters_are_dealt_out_into_as_few_like_parts_as_one_step_may_change() -> None:
    parameters = [torch.zeros(n) for n in (100, 10, 60, 40, 30)]
    assert [len(turn) for turn in _in_turns(parameters, 1 << 20)] == [5]
    turns = _in_turns(parameters, 4 * 130)
    assert sorted(sum(one.numel() for one in turn) for turn in turns) == [110, 130]
    assert {id(one) for turn in turns for one in turn} == {id(one) for one in parameters}


def told(
    call_s: float, waits: list[float], ends: list[float], durable_s: float | None, finish_s: float
) -> dict[str, Any]:
    """A rank's times of steps that took a second before the save, in the mean."""
    begins = [call_s, *ends[:-1]]
    return {
        "call_s": call_s,
        "finish_s": finish_s,
        "durable_s": durable_s,
        "peak_mib": 10.0 * call_s,
        "first_stall_s": 2 * call_s,
        "before_s": [0.5, 2.0, 0.5],
        "beside": [[begin, end, wait] for begin, end, wait in zip(begins, ends, waits, strict=True)],
    }


def test_stall_is_that_of_one_rank_and_the_rest_of_the_steps_time_is_slow_down() -> None:
    """Rank 0 stands still for 2 s in the call; rank 1 for 1 s there and 0.5 s before its optimizer."""
    ranks = [
        told(2.0, [0.0, 0.0, 0.0], [3.5, 5.0, 6.0], durable_s=5.2, finish_s=0.25),
        told(1.0, [0.5, 0.0, 0.0], [3.4, 5.0, 6.0], durable_s=4.0, finish_s=0.0),
    ]
    figures = figures_of(ranks)
    assert (figures["call_s"], figures["wait_s"], figures["finish_s"]) == (2.0, 0.5, 0.25)
    assert (figures["first_stall_s"], figures["stall_s"]) == (4.0, 2.25)
    assert figures["durable_s"] == 5.2
    assert figures["slow_down"] == pytest.approx((5.0 - 2.0) / 2), "the third step was not beside the save all the time"
    assert figures["lost_s"] == pytest.approx(6.0 - 3 + 0.25)
    assert figures["peak_mib_of_ranks"] == [20.0, 10.0]


def test_a_save_that_ends_within_the_first_step_is_held_against_that_step() -> None:
    figures = figures_of([told(0.5, [0.0, 0.0], [1.7, 2.7], durable_s=1.0, finish_s=0.0)])
    assert figures["slow_down"] == pytest.approx(1.2)


def test_a_save_that_leaves_no_step_to_be_disturbed_has_no_slow_down_and_no_save_has_all_steps() -> None:
    synchronous = figures_of([told(4.0, [0.0], [5.0], durable_s=4.1, finish_s=0.0)])
    assert "slow_down" not in synchronous
    assert (synchronous["stall_s"], synchronous["lost_s"]) == (4.0, 4.0)
    nothing = figures_of([told(0.0, [0.0] * 5, [1.0, 2.0, 3.0, 4.4, 5.0], durable_s=None, finish_s=0.0)])
    assert nothing["slow_down"] == pytest.approx(1.1) and "durable_s" not in nothing


def test_steps_with_a_save_after_each_are_told_by_the_slowest_rank_and_beside_the_steps_before() -> None:
    ranks = [told(0.5, [0.0], [1.5], durable_s=0.7, finish_s=0.0) | {"each_s": each, "each_stall_s": each / 4} for each in (1.5, 2.0)]
    figures = figures_of(ranks)
    assert (figures["each_times"], figures["each_stall_s"]) == (2.0, 0.5)


def test_ratios_are_ours_over_theirs() -> None:
    rows = dict.fromkeys(COLUMNS.values(), 2.0) | {"stall_s": 1.0}
    half = {name: value / 2 for name, value in rows.items()}
    result = summarized({"none": [{"stall_s": 0.0, "lost_s": 0.0}], "dcp-thread": [rows], "sync": [half, half, rows]})
    assert result["medians"]["sync"] == half
    assert result["ranges"]["sync"]["stall_s"] == [0.5, 1.0]
    assert compared(result)["ratios"] == {"sync": {"dcp-thread": dict.fromkeys(COLUMNS.values(), 0.5)}}


@pytest.mark.full
def test_a_small_one_measures_everybody_and_finds_every_bit_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    each = ["none", "dcp-thread/memory", "thread-overlap/memory"]
    names = [*each, "dcp-thread-overlap", "sync", "thread", "thread-overlap/capped"]
    cfg = small(tmp_path / "run", names, f"benchmark.memory={memory}")
    result = run_ranks(2, _benchmark, cfg, process_group=True, timeout_s=120)[0]
    run_dir = tmp_path / "run"
    assert sorted(path.name for path in run_dir.iterdir()) == ["benchmark.json", "benchmark.png"] and not [*memory.iterdir()]
    assert (run_dir / "benchmark.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((run_dir / "benchmark.json").read_text()) == result
    assert [list(result[key]) for key in ("rounds", "medians", "ranges")] == [names] * 3
    for name, figures in result["medians"].items():
        assert {"stall_s", "call_s", "wait_s", "finish_s", "lost_s", "step_s", "steps", "peak_mib"} <= set(figures)
        assert {"each_times", "each_stall_s"} & set(figures) == ({"each_times", "each_stall_s"} if name in each else set())
        assert ("durable_s" in figures) == (name != "none")
        assert figures["stall_s"] >= figures["call_s"]
        assert len(result["rounds"][name][0]["peak_mib_of_ranks"]) == 2
    assert "slow_down" in result["medians"]["none"] and "slow_down" not in result["medians"]["sync"]
    written = {name: figures["written_bytes"] for name, figures in result["medians"].items()}
    assert written.pop("none") == 0
    assert all(result["state_bytes"] < num_bytes < 1.2 * result["state_bytes"] for num_bytes in written.values())
    assert result["medians"]["sync"]["durable_s"] <= result["medians"]["sync"]["stall_s"]
    assert set(result["ratios"]) == {name for name in names if name in OURS}
    assert set(result["ratios"]["thread"]) == {"dcp-thread/memory", "dcp-thread-overlap"}
    printed = capfd.readouterr().err
    assert "1 rounds of none, " in printed and "round 1/1 thread: first stall " in printed
    MEASUREMENT.show(result)
    table = capfd.readouterr().out
    assert all(word in table for word in ("thread-overlap/capped", "ours / theirs", "durable s"))


@pytest.mark.full
def test_all_contenders_find_every_bit_again_in_the_data_parallel_state(tmp_path: Path) -> None:
    names = [NOTHING, *DCP, *OURS]
    cfg = small(tmp_path, names, "workload=gpt2_ddp")
    environment = {"MASTER_ADDR": "127.0.0.1"}
    result = run_ranks(2, _benchmark, cfg, process_group=True, timeout_s=300, environment=environment)[0]
    assert list(result["medians"]) == names


@pytest.mark.full
def test_bytes_that_training_reached_end_the_benchmark(tmp_path: Path) -> None:
    cfg = small(tmp_path, ["sync"])
    sentence = "sync: what was loaded is not what the state was when the save was called"
    assert run_ranks(2, _refused, cfg, process_group=True, timeout_s=60) == [sentence] * 2
    assert list(tmp_path.iterdir()) == []


def test_one_rank_trains_with_nobody(tmp_path: Path) -> None:
    with Topology.alone() as topology, pytest.raises(ConfigurationError, match="launch.nproc_per_node=2 or more"):
        MEASUREMENT.run(small(tmp_path, ["none"]), topology)


class Late(Saving):
    """It keeps the state itself in place of a copy, so what it loads is what the steps made of it."""

    def __init__(self, workload: Any) -> None:
        super().__init__(1)
        self._places = workload.saved.places
        self._copies: list[torch.Tensor] = []

    def finish(self) -> None:
        self._copies = [tensor.clone() for tensor in self._places.values()]

    def load(self, path: Path) -> None:
        for tensor, copy in zip(self._places.values(), self._copies, strict=True):
            tensor.copy_(copy)


def small(run_dir: Path, names: list[str], *overrides: str) -> dict[str, Any]:
    return config(
        run_dir,
        "model.size=tiny",
        "launch.nproc_per_node=2",
        "benchmark.repeats=1",
        "benchmark.step_s=0.01",
        "benchmark.steps=2",
        "benchmark.stepped_mib=2",
        f"benchmark.contenders=[{','.join(names)}]",
        *overrides,
    )


def _benchmark(topology: Topology, cfg: dict[str, Any]) -> dict[str, Any]:
    return MEASUREMENT.run(cfg, topology)


def _refused(topology: Topology, cfg: dict[str, Any]) -> str:
    background_saves.saving_of = lambda name, cfg, workload, folder: Late(workload)  # in this process, a rank's own
    with pytest.raises(CorruptCheckpointError) as refused:
        MEASUREMENT.run(cfg, topology)
    return str(refused.value)
