"""The benchmark of weight updates: its command line, its ratios, and a small one from beginning to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt.errors import ConfigurationError, CorruptCheckpointError
from ckpt.ranks.topology import Topology
from recipes.benchmark import weight_updates
from recipes.benchmark.tables import summarized
from recipes.benchmark.update_contenders import CONTENDERS, OURS, PARTS, Contender, Seconds
from recipes.benchmark.weight_updates import MEASUREMENT, compared
from recipes.benchmark.weights import made_of, rows_of
from tests.conf.configs import benchmark_config
from tests.device import devices
from tests.support.ranks import run_ranks

KEYS: dict[str, Any] = {
    "mib": 1,
    "width": 32,
    "dtypes": ["bfloat16"],
    "bucket_mib": 1,
    "repeats": 1,
    "frozen": 0.0,
    "contenders": ["kimi", "raw"],
}
EVERYBODY = [name for kind in ("ours", "the machine", "others") for name in CONTENDERS[kind]]


def config(run_dir: Path, *overrides: str) -> dict[str, Any]:
    """Return the config as the command checks it."""
    return benchmark_config(run_dir, "measure=sync", *overrides)


def small(run_dir: Path, names: list[str], *overrides: str) -> dict[str, Any]:
    return config(
        run_dir,
        "benchmark.mib=3",
        "benchmark.width=64",
        "benchmark.bucket_mib=1",
        "benchmark.repeats=1",
        f"benchmark.contenders=[{','.join(names)}]",
        *overrides,
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_a_word_everybody_takes_part_on_two_trainers_and_two_rollouts(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt.memory.device.Device.require", lambda self: None)
    run = config(tmp_path, f"device={device}")
    assert run["benchmark"]["contenders"] == EVERYBODY
    assert run["roles"] == {"trainer": 2, "rollout": 2}
    assert (run["benchmark"]["mib"], run["benchmark"]["bucket_mib"]) == (512, 64)
    assert run["device"]["type"] == device


@pytest.mark.parametrize(("trainer", "rollout"), [(1, 1), (3, 1), (1, 3)])
def test_as_many_ranks_are_started_as_the_roles_take(trainer: int, rollout: int, tmp_path: Path) -> None:
    run = config(tmp_path, f"roles.trainer={trainer}", f"roles.rollout={rollout}")
    assert run["launch"]["nproc_per_node"] == trainer + rollout


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("roles.rollout=0", "roles.rollout=0: expected at least 1"),
        ("agree.timeout_s=0", "agree.timeout_s=0.0: expected more than 0 seconds"),
        ("+device.pinned_mib=8", "device.pinned_mib is no key any more: coordinator.memory_budget_mib bounds"),
    ],
)
def test_a_run_that_cannot_be_is_one_sentence(override: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        config(tmp_path, override)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"mib": 0}, "benchmark.mib=0: expected at least 1"),
        ({"repeats": 0}, "benchmark.repeats=0: expected at least 1"),
        ({"frozen": 1.1}, "benchmark.frozen=1.1: expected a share from 0 to 1"),
        ({"bucket_gb": 2}, "'bucket_gb'.*the benchmark has benchmark.mib, benchmark.width, "),
        ({"dtypes": []}, r"benchmark.dtypes=\[\]: expected some of bfloat16, "),
        ({"dtypes": ["int8"]}, r"benchmark.dtypes=\['int8'\]: expected some of bfloat16, .*float8_e4m3fn"),
        ({"dtypes": ["bf16"]}, r"benchmark.dtypes=\['bf16'\]: expected some of bfloat16, "),
        ({"contenders": []}, "benchmark.contenders=.*expected some of raw, raw-all, "),
        ({"contenders": ["nccl"]}, "benchmark.contenders=.*expected some of .*, kimi/delta, each once"),
        ({"contenders": ["raw", "raw"]}, "benchmark.contenders=.*each once"),
    ],
)
def test_a_wrong_key_is_one_sentence(wrong: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        MEASUREMENT.checked_keys({**KEYS, **wrong})


def test_weights_are_a_transformers_as_large_as_asked_for_and_change_in_every_byte() -> None:
    rows = rows_of(1 << 20, 32, ["bfloat16", "float8_e4m3fn"])
    weights, same, other = (made_of(rows, torch.device("cpu"), seed) for seed in (0, 0, 1))
    assert 1 << 20 <= weights.num_bytes < (1 << 20) + 4 * 32 * 32 * 2
    assert {tensor.dtype for tensor in weights.tensors.values()} == {
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float32,
        torch.int64,
    }
    assert weights.fingerprint() == same.fingerprint() != other.fingerprint()
    before = {name: tensor.clone() for name, tensor in weights.tensors.items()}
    weights.change()
    for name, tensor in weights.tensors.items():
        assert not torch.any(tensor.reshape(-1).view(torch.uint8) == before[name].reshape(-1).view(torch.uint8)), name
    same.change()
    assert weights.fingerprint() == same.fingerprint()
    before = {name: tensor.clone() for name, tensor in weights.tensors.items()}
    weights.change(0.9)
    pairs = [(one.reshape(-1).view(torch.uint8), weights.tensors[name]) for name, one in before.items()]
    same_bytes = sum(int((one == now.reshape(-1).view(torch.uint8)).sum()) for one, now in pairs)
    assert same_bytes == int(0.9 * weights.num_bytes)
    weights.overwrite()
    other.overwrite()
    assert weights.fingerprint() == other.fingerprint(), "nothing is left of what was there"


def test_ratios_are_made_within_each_round() -> None:
    first = {"kimi": row(10.0, 5.0), "raw": {"transfer_s": 1.0, "update_s": 1.0}, "reference": row(3.0, 9.0)}
    rounds = {
        "kimi": [row(1.0, 2.0), row(2.0, 8.0), row(3.0, 3.0)],
        "raw": [{"transfer_s": s, "update_s": s} for s in (1.0, 8.0, 6.0)],
        "reference": [row(1.0, 9.0), row(1.0, 9.0), row(1.0, 9.0)],
    }
    result = summarized(rounds) | {"first": first, "rounds": rounds, "bytes": 6 * 10**9}
    result |= compared(result)
    assert result["medians"]["kimi"] == {"offload_s": 2.0, "transfer_s": 3.0, "update_s": 6.0}
    assert result["ranges"]["kimi"]["transfer_s"] == [2.0, 8.0]
    assert result["gb_s"]["kimi"] == {"offload_s": 3.0, "transfer_s": 2.0, "update_s": 1.0}
    assert result["ratios"] == {"kimi": {"of_raw": 1.0, "reference": 10 / 6, "offload": 0.2}}


def row(offload_s: float, transfer_s: float) -> Seconds:
    return {"offload_s": offload_s, "transfer_s": transfer_s, "update_s": offload_s + transfer_s}


def test_a_small_one_measures_everybody_and_finds_every_bit_at_every_rollout(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    dtypes = "benchmark.dtypes=[bfloat16,float8_e4m3fn,float32]"
    cfg = small(tmp_path, EVERYBODY, "roles.trainer=2", "roles.rollout=1", dtypes)
    result = run_ranks(3, _benchmark, cfg, process_group=True, timeout_s=60)[0]
    assert json.loads((tmp_path / "benchmark.json").read_text()) == result
    assert [path.name for path in tmp_path.iterdir()] == ["benchmark.json"]
    assert [list(result[key]) for key in ("rounds", "first", "medians", "buckets")] == [EVERYBODY] * 4
    assert (result["trainers"], result["rollouts"], result["bucket_bytes"]) == (2, 1, 1 << 20)
    assert 3 << 20 <= result["bytes"] < 4 << 20
    assert set(result["dtypes"]) == {"bfloat16", "float8_e4m3fn", "float32", "int64"}
    assert result["machine"]["torch"] == torch.__version__ and result["machine"]["cores"]
    for name, medians in result["medians"].items():
        assert 0 < medians["transfer_s"] <= medians["update_s"]
        assert set(PARTS.values()) <= set(medians) or name not in OURS
        assert ("offload_s" in medians) == (name in OURS or name.startswith("reference"))
        assert result["buckets"][name] == (None if name == "per-tensor" else 4)
    assert set(result["ratios"]) == set(OURS)
    assert set(result["ratios"]["kimi"]) == {"of_raw", "of_raw_all", "reference", "tuned", "offload"}
    assert set(result["ratios"]["kimi/delta"]) == {*result["ratios"]["kimi"], "full"}
    assert result["sent_bytes"]["kimi"] == result["sent_bytes"]["kimi/delta"] >= result["bytes"], "everything changes"
    printed = capfd.readouterr().err
    assert "round 1/1 kimi: update " in printed and "; not counted" in printed
    MEASUREMENT.show(result)
    table = capfd.readouterr().out
    assert all(
        word in table for word in ("reference/tuned", "first offload s", "later offloads", "2 trainers, 1 rollout")
    )


def test_of_weights_that_are_frozen_nothing_is_sent(tmp_path: Path) -> None:
    cfg = small(tmp_path, ["kimi", "kimi/delta"], "roles.trainer=1", "roles.rollout=1", "benchmark.frozen=0.9")
    result = run_ranks(2, _benchmark, cfg, process_group=True, timeout_s=60)[0]
    assert result["frozen"] == 0.9 and result["ratios"]["kimi/delta"]["full"] > 0
    assert result["sent_bytes"]["kimi"] >= result["bytes"]
    assert 0.1 * result["bytes"] <= result["sent_bytes"]["kimi/delta"] < 0.2 * result["bytes"]


@pytest.mark.full
@pytest.mark.parametrize(("trainer", "rollout"), [(1, 1), (2, 2), (3, 1), (1, 3)])
def test_other_numbers_of_ranks_find_every_bit_too(trainer: int, rollout: int, tmp_path: Path) -> None:
    cfg = small(tmp_path, EVERYBODY, f"roles.trainer={trainer}", f"roles.rollout={rollout}")
    result = run_ranks(trainer + rollout, _benchmark, cfg, process_group=True, timeout_s=120)[0]
    assert list(result["medians"]) == EVERYBODY


@pytest.mark.full
@pytest.mark.parametrize("device", [devices.NPU, devices.CUDA])
def test_weights_on_a_device_are_found_too(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.memory.device.Device.require", lambda self: None)  # the stand-in is for the ranks alone
    cfg = small(tmp_path, EVERYBODY, f"device={device}")
    result = run_ranks(4, _benchmark, cfg, process_group=True, timeout_s=120, device=device)[0]
    assert list(result["medians"]) == EVERYBODY
    assert result["collectives"] == cfg["device"]["collectives"]


def test_a_rollout_that_holds_other_bits_ends_the_benchmark(tmp_path: Path) -> None:
    cfg = small(tmp_path, ["raw"], "roles.trainer=1", "roles.rollout=1")
    sentence = "raw: rank 1 holds other bits than were sent"
    assert run_ranks(2, _refused, cfg, process_group=True, timeout_s=60) == [sentence] * 2
    assert list(tmp_path.iterdir()) == []


def test_other_ranks_than_the_roles_take_are_refused(tmp_path: Path) -> None:
    cfg = small(tmp_path, ["raw"])
    with Topology.alone() as topology, pytest.raises(ConfigurationError, match="take 4 ranks, but there are 1"):
        MEASUREMENT.run(cfg, topology)


class Idle(Contender):
    """It sends nothing, so rollouts keep overwritten weights."""

    def update(self, step: int) -> Seconds:
        return {"transfer_s": 1.0}

    def close(self) -> None:
        """Nothing is open."""


def _benchmark(topology: Topology, cfg: dict[str, Any]) -> dict[str, Any]:
    return MEASUREMENT.run(cfg, topology)


def _refused(topology: Topology, cfg: dict[str, Any]) -> str:
    weight_updates.contender_of = lambda name, ends: Idle(ends)  # in this process, a rank's own
    with pytest.raises(CorruptCheckpointError) as refused:
        MEASUREMENT.run(cfg, topology)
    return str(refused.value)
