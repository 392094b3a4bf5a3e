"""The training recipe on every device: each layout resumes to the bit, and what one device saved another goes on from.

The same product code runs on the CPU, on the stand-in for an NPU and on CUDA; the stand-in's copies come late, and what it has let
go of is overwritten. `tests/distributed/test_layouts.py` has all of it for the CPU at large.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from omegaconf import DictConfig

from ckpt.ranks.topology import Topology
from ckpt.storage.stored import read_manifest
from recipes.support.config import checked
from recipes.training.training import train
from tests.conf.configs import composed
from tests.device.devices import ADVERSARY, CUDA, NPU
from tests.e2e.runs import TEXT
from tests.support.covering import rows
from tests.support.ranks import run_ranks

LAYOUTS = {
    "single": 1,
    "ddp": 2,
    "accelerate": 2,
    "fsdp": 2,
    "hsdp": 4,
    "tp_fsdp": 4,
    "ddp_tp": 4,
    "pipeline": 2,
    "ddp_pipeline": 4,
}
"""Layout -> ranks."""

BACKENDS = {
    "zarr": ["ckpt=zarr"],
    "ocdbt": ["ckpt=tensorstore"],
    "file": ["ckpt=tensorstore", "ckpt.kvstore=file"],
    "safetensors": ["ckpt=kimi-engine"],
}
STRATEGIES = {
    "direct": ["strategy=direct"],
    "two-stage by the host": ["strategy=two-stage"],
    "two-stage by the device": ["strategy=two-stage", "strategy.cpu_transfer=false"],
}

SMALL = [
    "model.size=nano", f"data.path={TEXT}", "train.batch_size=2", "train.steps=2", "save.every=1"
]  # fmt: skip


class Run(NamedTuple):
    """One run of the recipe: its folder, and what is chosen by hand."""

    dir: Path
    overrides: list[str]


def runs_on(device: str, layout: str, *runs: Run, hosts: int = 1) -> list[dict[str, Any]]:
    """Train several runs, one after another, on one set of ranks; their summaries, on which all ranks agree."""
    ranks = LAYOUTS[layout]
    nodes = [ranks // hosts] * hosts
    configs = [_composed(run, f"device={device}", f"parallel={layout}") for run in runs]
    by_rank = run_ranks(
        ranks, _train, configs, process_group=True, timeout_s=240, nodes=nodes, device=device, environment=ADVERSARY
    )
    for summaries in by_rank:
        assert [one["losses"] for one in summaries] == [one["losses"] for one in by_rank[0]]
    summaries: list[dict[str, Any]] = by_rank[0]
    return summaries


def _composed(run: Run, *chosen: str) -> DictConfig:
    run.dir.mkdir(parents=True)
    return composed(run.dir, *chosen, *SMALL, *run.overrides)


def _train(topology: Topology, configs: list[DictConfig]) -> list[dict[str, Any]]:
    """Checked here, by one rank for all: the process of the tests loads no device's plugin."""
    plain = [checked(cfg, num_ranks=topology.world_size) if topology.is_lead else None for cfg in configs]
    dist.broadcast_object_list(plain, device=torch.device("cpu"))
    return [train(cfg, topology) for cfg in plain if cfg is not None]


def checkpoint(run: Run, step: int = 1) -> Path:
    return run.dir / "checkpoints" / f"checkpoint-{step:08d}"


def straight_and_resumed(folder: Path, backend: str, strategies: list[str]) -> list[Run]:
    """A run of two steps, and for each strategy one that goes on from its first."""
    straight = Run(folder / "straight", BACKENDS[backend])
    resume = f"resume={checkpoint(straight)}"
    return [
        straight,
        *(Run(folder / name, [*BACKENDS[backend], *STRATEGIES[name], resume, "save.every=2"]) for name in strategies),
    ]


def require_resumed(straight: dict[str, Any], *resumed: dict[str, Any]) -> None:
    for one in resumed:
        assert one["first_step"] == 2
        assert one["losses"] == straight["losses"][1:]
        assert one["state_digest"] == straight["state_digest"]


# Each layout once, with backends, strategies and hosts spread over them; some in `full` alone, for they take long


@pytest.mark.parametrize("device", [NPU, CUDA])
@pytest.mark.parametrize(
    ("layout", "backend", "strategy", "hosts"),
    [
        ("single", "zarr", "direct", 1),
        pytest.param("fsdp", "file", "direct", 1, marks=pytest.mark.full),
        pytest.param("ddp", "zarr", "two-stage by the host", 1, marks=pytest.mark.full),
        pytest.param("accelerate", "ocdbt", "two-stage by the device", 1, marks=pytest.mark.full),
        pytest.param("fsdp", "file", "two-stage by the device", 1, marks=pytest.mark.full),
        pytest.param("hsdp", "zarr", "two-stage by the host", 2, marks=pytest.mark.full),
        pytest.param("tp_fsdp", "ocdbt", "direct", 1, marks=pytest.mark.full),
        pytest.param("ddp_tp", "zarr", "two-stage by the device", 2, marks=pytest.mark.full),
        pytest.param("pipeline", "safetensors", "two-stage by the host", 1, marks=pytest.mark.full),
        pytest.param("ddp_pipeline", "file", "two-stage by the device", 2, marks=pytest.mark.full),
    ],
)
def test_a_resumed_run_is_the_straight_one_to_the_bit(
    tmp_path: Path, device: str, layout: str, backend: str, strategy: str, hosts: int
) -> None:
    require_resumed(*runs_on(device, layout, *straight_and_resumed(tmp_path, backend, [strategy]), hosts=hosts))


def _has_ranks(layout: str = "", hosts: int = 1, *_: object) -> bool:
    return not layout or LAYOUTS[layout] >= hosts


@pytest.mark.full
@pytest.mark.parametrize("device", [NPU, CUDA])  # on the CPU that is tests/distributed/test_layouts.py
@pytest.mark.parametrize(
    ("layout", "hosts", "backend"),
    rows({"layout": [*LAYOUTS], "hosts": [1, 2], "backend": [*BACKENDS]}, 2, is_possible=_has_ranks),
)
def test_every_layout_resumes_to_the_bit_by_every_backend_and_strategy_on_one_host_and_on_two(
    tmp_path: Path, device: str, layout: str, backend: str, hosts: int
) -> None:
    runs = straight_and_resumed(tmp_path, backend, list(STRATEGIES))
    require_resumed(*runs_on(device, layout, *runs, hosts=hosts))


# From one device to another


@pytest.mark.parametrize(
    ("saved_on", "saved_by", "loaded_on", "loaded_by", "strategy"),
    [
        pytest.param("npu", "ddp", "cpu", "ddp", "two-stage by the host", marks=[pytest.mark.npu, pytest.mark.full]),
        pytest.param("npu", "fsdp", "cpu", "ddp", "direct", marks=[pytest.mark.npu, pytest.mark.full]),
        pytest.param("cpu", "ddp", "npu", "fsdp", "two-stage by the device", marks=pytest.mark.npu),
        pytest.param("cuda", "single", "cpu", "single", "direct", marks=pytest.mark.cuda),
        pytest.param("cpu", "ddp", "cuda", "single", "direct", marks=pytest.mark.cuda),
    ],
)
def test_what_one_device_saved_another_goes_on_from_with_equal_state(
    tmp_path: Path, saved_on: str, saved_by: str, loaded_on: str, loaded_by: str, strategy: str
) -> None:
    """Without dropout, whose masks come from generators that the other device does not have. Rounding is the device's own."""
    saved = Run(tmp_path / "saved", ["model.dropout=0"])
    first = Run(tmp_path / "first", ["model.dropout=0", *STRATEGIES[strategy], f"resume={checkpoint(saved, 2)}"])
    on = Run(tmp_path / "on", ["model.dropout=0", *STRATEGIES[strategy], f"resume={checkpoint(saved)}"])
    straight = runs_on(saved_on, saved_by, saved)[0]
    all_of_it, resumed = runs_on(loaded_on, loaded_by, first, on)
    assert (all_of_it["first_step"], all_of_it["losses"]) == (3, [])
    assert all_of_it["loaded_digest"] == all_of_it["state_digest"] == straight["state_digest"]
    assert resumed["losses"] == pytest.approx(straight["losses"][1:], rel=1e-5)


@pytest.mark.full
@pytest.mark.npu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_goes_there_and_back_with_equal_state(tmp_path: Path, layout: str) -> None:
    """Masks are drawn on either device, from generators that follow from seed and step where the saved ones are another device's."""
    legs = [Run(tmp_path / f"{leg}", BACKENDS[backend]) for leg, backend in enumerate(BACKENDS)]
    first = runs_on("npu", layout, legs[0])[0]
    digests = [first["state_digest"]]
    for leg, device in enumerate(("cpu", "npu"), start=1):
        strategy = STRATEGIES["two-stage by the device" if leg == 2 else "direct"]
        overrides = [*legs[leg].overrides, *strategy, f"train.steps={leg + 2}", "save.every=1"]
        before = checkpoint(legs[leg - 1], leg + 1)
        (summary,) = runs_on(device, layout, Run(legs[leg].dir, [*overrides, f"resume={before}"]))
        assert summary["loaded_digest"] == digests[-1], device
        digests.append(summary["state_digest"])
    assert len(set(digests)) == len(digests)


@pytest.mark.npu
def test_a_checkpoint_says_nothing_of_the_device_it_was_saved_on(tmp_path: Path) -> None:
    """C5. The states of a device's generators alone are its own."""
    runs = {device: Run(tmp_path / device, ["~components.rng", "train.steps=1"]) for device in ("cpu", "npu")}
    paths = []
    for device, run in runs.items():
        runs_on(device, "ddp", run)
        paths.append(checkpoint(run))
    manifests = [read_manifest(path) for path in paths]
    assert manifests[0].arrays == manifests[1].arrays
    texts = {str(file): file.read_text().lower() for file in paths[1].rglob("*.json")}
    assert len(texts) > 10
    assert [name for name, text in texts.items() if "npu" in text or "hccl" in text] == []
