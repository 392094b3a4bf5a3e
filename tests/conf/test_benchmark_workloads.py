"""The benchmark's command line: every workload composes into a run that can start, and a mistake is one sentence."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from ckpt.errors import ConfigurationError
from recipes.benchmark.contenders import BACKENDS, LIMITS, OURS, PEERS
from recipes.benchmark.saves_and_loads import MEASUREMENT
from tests.conf.configs import benchmark_config
from tests.conf.test_choices import WORKLOADS

KEYS = {
    "workload": "mine",
    "repeats": 1,
    "contenders": ["raw", "zarr/two-stage"],
    "load_ranks": None,
    "store_mib_s": None,
    "small_tensors": None,
    "adapters": None,
    "plot": None,
}
LAYOUTS = {"gpt2_fsdp": "fsdp", "lora": "fsdp", "reshard": "fsdp", "gpt2_tp_fsdp": "tp_fsdp"}


@pytest.mark.parametrize("workload", sorted(WORKLOADS))
def test_every_workload_composes_and_binds(workload: str, tmp_path: Path) -> None:
    run = benchmark_config(tmp_path, f"workload={workload}")
    keys = run["benchmark"]
    assert keys["workload"] == workload and keys["repeats"] == 5
    layout = {"fsdp": "FullySharded", "tp_fsdp": "TensorThenFullySharded", None: "DataParallel"}[LAYOUTS.get(workload)]
    assert run["parallel"]["_target_"].endswith(f".{layout}")
    pattern = "sharded" if workload in LAYOUTS else "replicated"
    assert run["components"]["model"]["sharing_pattern"] == pattern
    assert any(name in OURS for name in keys["contenders"])
    assert all(name in (*PEERS, *LIMITS) for name in keys["contenders"] if name not in OURS)


def test_without_a_word_it_is_gpt2_data_parallel_on_four_ranks_beside_all_others(tmp_path: Path) -> None:
    run = benchmark_config(tmp_path)
    keys = run["benchmark"]
    assert keys["workload"] == "gpt2_ddp"
    assert (run["model"]["size"], run["launch"]["nproc_per_node"]) == ("gpt2", 4)
    backends = ("zarr", "tensorstore", "kimi-engine", "kimi-engine-disk")
    own = {name for backend in backends for name in (backend, f"{backend}/two-stage")}
    assert {*PEERS, *LIMITS, *own} - {"pretrained"} == set(keys["contenders"])


def test_what_the_command_line_says_wins_over_the_workload(tmp_path: Path) -> None:
    run = benchmark_config(
        tmp_path, "workload=gpt2_fsdp", "parallel=hsdp", "benchmark.contenders=[raw,zarr]", "model.size=tiny"
    )
    assert run["parallel"]["_target_"].endswith("HybridSharded") and run["model"]["size"] == "tiny"
    assert run["benchmark"]["contenders"] == ["raw", "zarr"]


def test_a_name_of_ours_is_a_backend_and_maybe_a_strategy() -> None:
    assert OURS["zarr"] == OURS["zarr/direct"] == ("zarr", "direct")
    assert OURS["tensorstore-file/two-stage"] == ("tensorstore-file", "two-stage")
    assert not {*PEERS, *LIMITS, "zarr/", "/two-stage", "zarr/both", "dcp/two-stage"} & set(OURS)
    assert set(BACKENDS) <= set(OURS)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"repeats": 0}, "benchmark.repeats=0: expected at least 1"),
        ({"repeat": 1}, "the benchmark has benchmark.workload, benchmark.repeats, "),
        ({"contenders": []}, "benchmark.contenders=.*expected some of raw, "),
        ({"contenders": ["dpc"]}, "benchmark.contenders=.*, zarr/two-stage, "),
        ({"contenders": ["zarr", "zarr"]}, "benchmark.contenders=.*each once"),
        ({"load_ranks": 0}, "benchmark.load_ranks=0: expected at least 1"),
        ({"store_mib_s": 0.0}, "benchmark.store_mib_s=0.0: expected more than 0, or null"),
        ({"store_mib_s": 9.0}, "benchmark.store_mib_s=9.0 slows the reads of our loads alone: leave raw out of"),
        ({"small_tensors": {"count": 0, "elements": 1, "sharing": "sharded"}}, "benchmark.small_tensors.count=0: "),
        ({"small_tensors": {"count": 1, "elements": 1, "sharing": "some"}}, "benchmark.small_tensors.sharing=some: "),
        ({"adapters": {"hidden_size": 0, "layers": 1, "rank": 1}}, "benchmark.adapters.hidden_size=0: "),
        ({"small_tensors": {"count": 1}}, "the benchmark has benchmark.workload, "),
    ],
)
def test_a_wrong_key_is_one_sentence(wrong: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        MEASUREMENT.checked_keys({**KEYS, **wrong})


def test_a_plot_that_cannot_be_drawn_is_refused_before_the_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MEASUREMENT.checked_keys({**KEYS, "plot": True})["plot"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigurationError, match=r"matplotlib, which is not installed: pip install -e '\.\[benchmark\]'; or"
    ):
        MEASUREMENT.checked_keys({**KEYS, "plot": True})
    assert MEASUREMENT.checked_keys({**KEYS, "plot": False})["plot"] is False
