"""Every layout trains, saves and resumes to the bit, and goes on from what any other has saved."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest

from ckpt.errors import CheckpointError
from ckpt.ranks.topology import Topology
from recipes.training.training import train
from tests.conf.configs import config
from tests.e2e.runs import SMALL
from tests.support.ranks import run_ranks

LAYOUTS = {
    "single": (1, ["parallel=single"]),
    "ddp 2": (2, ["parallel=ddp"]),
    "ddp 3": (3, ["parallel=ddp"]),
    "ddp 4": (4, ["parallel=ddp"]),
    "accelerate 2": (2, ["parallel=accelerate"]),
    "accelerate 3": (3, ["parallel=accelerate"]),
    "accelerate 4": (4, ["parallel=accelerate"]),
    "fsdp 2": (2, ["parallel=fsdp"]),
    "fsdp 3": (3, ["parallel=fsdp"]),
    "fsdp 4": (4, ["parallel=fsdp"]),
    "hsdp 2": (2, ["parallel=hsdp"]),
    "hsdp 3": (3, ["parallel=hsdp", "parallel.fsdp=3"]),
    "hsdp 4": (4, ["parallel=hsdp"]),
    "tp_fsdp 2": (2, ["parallel=tp_fsdp"]),
    "tp_fsdp 4": (4, ["parallel=tp_fsdp"]),
    "tp_fsdp 1 x 4": (4, ["parallel=tp_fsdp", "parallel.tp=4"]),
    "ddp_tp 2": (2, ["parallel=ddp_tp"]),
    "ddp_tp 4": (4, ["parallel=ddp_tp"]),
    "pipeline 2": (2, ["parallel=pipeline"]),
    "pipeline 3": (3, ["parallel=pipeline"]),
    "pipeline 4": (4, ["parallel=pipeline", "parallel.microbatches=6", "model.size=tiny"]),
    "ddp_pipeline 2": (2, ["parallel=ddp_pipeline"]),
    "ddp_pipeline 3": (3, ["parallel=ddp_pipeline", "parallel.pp=3"]),
    "ddp_pipeline 4": (4, ["parallel=ddp_pipeline"]),
}
"""Number of ranks, and how the layout is chosen. Three ranks fit no layout whose inner axis has two; it is set there. The small
model of these runs has three layers, which are no four stages."""

BACKENDS = {"zarr": ["ckpt=zarr"], "tensorstore": ["ckpt=tensorstore"], "kimi-engine": ["ckpt=kimi-engine"]}
IN_TURN = tuple(BACKENDS)

RELAY = [
    "single", "ddp 3", "fsdp 3", "pipeline 2", "tp_fsdp 4", "ddp_pipeline 4", "hsdp 4", "pipeline 3", "ddp_tp 4",
    "accelerate 2", "single",
]  # fmt: skip


def runs_of(layout: str, *runs: tuple[Path, list[str]]) -> list[dict[str, Any]]:
    """Train several runs, one after another, on one set of ranks; their summaries, on which all ranks agree."""
    num_ranks, chosen = LAYOUTS[layout]
    cfgs = [config(run_dir, *SMALL, *chosen, *overrides, num_ranks=num_ranks) for run_dir, overrides in runs]
    by_rank = run_ranks(num_ranks, _train, cfgs, process_group=True, timeout_s=240.0)
    for summaries in by_rank:
        assert [one["losses"] for one in summaries] == [one["losses"] for one in by_rank[0]]
    summaries: list[dict[str, Any]] = by_rank[0]
    return summaries


def _train(topology: Topology, cfgs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [train(cfg, topology) for cfg in cfgs]


def checkpoint(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"checkpoint-{step:08d}"


def straight_and_resumed(folder: Path, backend: str, tied: bool) -> list[tuple[Path, list[str]]]:
    """A run of three steps, and one that goes on from its second; data dispatched and not, loaded by either strategy, by turns."""
    dispatch = (backend == "zarr") == tied
    chosen = [*BACKENDS[backend], f"strategy={'two-stage' if tied else 'direct'}"]
    common = [*chosen, f"model.tie_embeddings={tied}", f"data.dispatch={dispatch}", "save.every=2", "train.steps=3"]
    straight = folder / f"straight {backend} {tied}"
    return [
        (straight, common),
        (folder / f"on {backend} {tied}", [*common, f"resume={checkpoint(straight, 2)}"]),
    ]


@pytest.mark.parametrize(
    ("layout", "backend", "tied"),
    [
        ("fsdp 3", "zarr", True),
        pytest.param("pipeline 3", "zarr", True, marks=pytest.mark.full),
        pytest.param("accelerate 3", "tensorstore", False, marks=pytest.mark.full),
        pytest.param("hsdp 3", "kimi-engine", True, marks=pytest.mark.full),
    ],
)
def test_a_resumed_run_is_the_straight_one_to_the_bit(tmp_path: Path, layout: str, backend: str, tied: bool) -> None:
    straight, resumed = runs_of(layout, *straight_and_resumed(tmp_path, backend, tied))
    assert resumed["losses"] == straight["losses"][2:]
    assert resumed["state_digest"] == straight["state_digest"]


@pytest.mark.full
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout[-1] == "4"])
def test_two_stages_load_what_direct_loading_does_in_every_layout_and_read_each_byte_once(
    tmp_path: Path, layout: str
) -> None:
    saving = [
        (tmp_path / f"saved by {backend}", [*BACKENDS[backend], "train.steps=1", "save.every=1"])
        for backend in BACKENDS
    ]
    loading = [
        (tmp_path / f"{strategy} {run_dir.name}", [*chosen, f"resume={checkpoint(run_dir, 1)}", f"strategy={strategy}"])
        for run_dir, chosen in saving
        for strategy in ("direct", "two-stage")
    ]
    summaries = runs_of(layout, *saving, *loading)
    loads = summaries[len(saving) :]
    for saved, (direct, two_stage) in zip(summaries, zip(loads[::2], loads[1::2], strict=True), strict=False):
        assert saved["state_digest"] == direct["loaded_digest"] == two_stage["loaded_digest"]
        assert direct["bytes_needed"] == two_stage["bytes_needed"]
        assert two_stage["bytes_read"] <= saved["checkpoints"][0]["bytes"]


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_resumes_to_the_bit_by_every_backend_tied_and_untied(tmp_path: Path, layout: str) -> None:
    cases = list(itertools.product(BACKENDS, (False, True)))
    summaries = runs_of(layout, *(run for case in cases for run in straight_and_resumed(tmp_path, *case)))
    for case, straight, resumed in zip(cases, summaries[::2], summaries[1::2], strict=True):
        assert resumed["losses"] == straight["losses"][2:], case
        assert resumed["state_digest"] == straight["state_digest"], case


@pytest.mark.full
def test_a_relay_through_all_layouts_trains_as_one_rank_would(tmp_path: Path) -> None:
    """Each layout goes on from the one before, by turns with dispatched and own data, saving by turns as zarr, OCDBT and
    safetensors, and loading by turns directly and in two stages.

    What it loads is to the bit what was saved. Its loss is the one of a single rank up to the order of sums, as every
    sample comes once and in its turn; without dropout, for ranks draw different masks.
    """
    common = ["model.dropout=0.0", "model.tie_embeddings=true"]
    alone = runs_of("single", (tmp_path / "alone", [*common, f"train.steps={len(RELAY)}"]))[0]
    before: dict[str, Any] = {"state_digest": None}
    losses = []
    for step, layout in enumerate(RELAY, start=1):
        own = [
            f"train.steps={step}",
            f"data.dispatch={step % 2 == 0}",
            *BACKENDS[IN_TURN[step % 3]],
            f"strategy={'two-stage' if step % 4 else 'direct'}",
        ]
        start = [f"resume={checkpoint(tmp_path / str(step - 1), step - 1)}"] if step > 1 else []
        summary = runs_of(layout, (tmp_path / str(step), [*common, *own, *start]))[0]
        assert (summary["first_step"], summary["loaded_digest"]) == (step, before["state_digest"]), layout
        losses += summary["losses"]
        before = summary
    assert losses == pytest.approx(alone["losses"], rel=1e-3)


def test_stages_that_are_declared_per_rank_load_on_the_same_ranks_only(tmp_path: Path) -> None:
    own = ["components.model.sharing_pattern=per_rank", "components.optimizer.sharing_pattern=per_rank"]
    common = ["model.tie_embeddings=true", "train.steps=1", *own]
    path = checkpoint(tmp_path / "saved", 1)
    resumed = [*common, f"resume={path}"]
    saved, loaded = runs_of("pipeline 2", (tmp_path / "saved", common), (tmp_path / "on", resumed))
    assert loaded["loaded_digest"] == saved["state_digest"]
    num_ranks, chosen = LAYOUTS["pipeline 3"]
    other = config(tmp_path / "other", *SMALL, *chosen, *resumed, num_ranks=num_ranks)
    for says in run_ranks(num_ranks, _refused, other, process_group=True):
        assert "component model is per_rank and was saved by 2 ranks, this run has 3" in says


def _refused(topology: Topology, cfg: dict[str, Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        train(cfg, topology)
    return str(caught.value)


ONE_SIZE = ["model.size=tiny"]  # which has layers enough for every layout


@functools.cache
def _saved(layout: str, parent: Path) -> tuple[Path, str]:
    """The checkpoint of a short run in a layout, and the digest of its state."""
    run_dir = parent / layout.replace(" ", "-")
    tied, backend = "model.tie_embeddings=true", IN_TURN[len(layout) % 3]
    summary = runs_of(layout, (run_dir, [*ONE_SIZE, "train.steps=2", tied, *BACKENDS[backend]]))[0]
    return checkpoint(run_dir, 2), summary["state_digest"]


@pytest.mark.full
@pytest.mark.parametrize("target", LAYOUTS)
def test_each_layout_loads_what_every_layout_saved(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, target: str
) -> None:
    saved = {source: _saved(source, tmp_path_factory.getbasetemp()) for source in LAYOUTS}
    overrides = [*ONE_SIZE, "train.steps=2", "model.tie_embeddings=true"]
    runs = [(tmp_path / f"{at}", [*overrides, f"resume={path}"]) for at, (path, _) in enumerate(saved.values())]
    loaded = {source: one["loaded_digest"] for source, one in zip(saved, runs_of(target, *runs), strict=True)}
    assert loaded == {source: digest for source, (_, digest) in saved.items()}
