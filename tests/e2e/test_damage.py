"""Any damage to any file of a checkpoint: verify names it, a load refuses it, resume=latest skips it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ckpt.catalog.verify import verify_checkpoint
from ckpt.errors import CheckpointError
from ckpt.ranks.topology import Topology
from recipes.training.training import train
from tests.e2e.conftest import STEPS, Run
from tests.e2e.runs import checkpoint, committed, root_of, run

DAMAGES = ("flipped", "truncated", "removed")
MANIFEST = "checkpoint_manifest.json"
SAMPLES = {
    "straight": [
        (MANIFEST, "flipped"),
        (MANIFEST, "truncated"),
        (MANIFEST, "removed"),
        ("index-00001.json", "flipped"),
        ("config.yaml", "removed"),
        ("rng/rank-00001/plain.json", "flipped"),
        ("optimizer/plain.json", "truncated"),
        ("model/zarr.json", "removed"),
        ("model/wte.weight/zarr.json", "flipped"),
        ("model/wte.weight/c/0/0", "flipped"),
        ("model/h.2.mlp.c_proj.weight/c/0/0", "removed"),
        ("optimizer/packed-float32-00000/c/0", "truncated"),
    ],
    "in_ocdbt": [
        ("index-00000.json", "removed"),
        ("arrays.ocdbt/manifest.ocdbt", "flipped"),
        ("arrays.ocdbt/d/*", "flipped"),
        ("arrays.ocdbt/rank-00000/d/*", "flipped"),
        ("arrays.ocdbt/rank-00001/manifest.ocdbt", "truncated"),
        ("arrays.ocdbt/rank-00001/d/*", "removed"),
    ],
    "in_safetensors": [
        ("model/rank-00000-float32.safetensors", "flipped"),
        ("optimizer/rank-00001-float32.safetensors", "truncated"),
        ("optimizer/rank-00000-float32.safetensors", "removed"),
        ("model/model.safetensors.index.json", "flipped"),
    ],
}


@dataclass(frozen=True)
class Damage:
    """One thing done to one file, named relative to the checkpoint."""

    file: str
    how: str

    @contextmanager
    def done_to(self, folder: Path) -> Iterator[None]:
        path = folder / self.file
        before = path.read_bytes()
        try:
            self._do(path, before)
            yield
        finally:
            path.write_bytes(before)

    def _do(self, path: Path, before: bytes) -> None:
        if self.how == "removed":
            path.unlink()
        elif self.how == "truncated":
            path.write_bytes(before[: len(before) - 1 - len(before) // 3])
        else:
            random = Random(f"{self.file} {len(before)}")
            flipped = bytearray(before)
            flipped[random.randrange(len(before))] ^= 1 << random.randrange(8)
            path.write_bytes(flipped)


def files_of(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def sampled(name: str, folder: Path) -> list[Damage]:
    """The damages of the default run; a pattern stands for its largest file."""
    found = []
    for pattern, how in SAMPLES[name]:
        largest = max(folder.glob(pattern), key=lambda path: path.stat().st_size)
        found.append(Damage(largest.relative_to(folder).as_posix(), how))
    return found


def everything(folder: Path) -> list[Damage]:
    return [Damage(file, how) for file in files_of(folder) for how in DAMAGES]


@pytest.fixture(
    params=[
        pytest.param("straight", id="zarr"),
        pytest.param("in_ocdbt", id="ocdbt", marks=pytest.mark.full),
        pytest.param("in_safetensors", id="safetensors", marks=pytest.mark.full),
    ]
)
def source(request: pytest.FixtureRequest) -> tuple[str, Run]:
    return request.param, request.getfixturevalue(request.param)


@pytest.fixture
def copy(source: tuple[str, Run], tmp_path: Path) -> Path:
    """A run's folder with its last two checkpoints, to be damaged."""
    run_dir = tmp_path / "run"
    for step in (STEPS - 1, STEPS):
        shutil.copytree(checkpoint(source[1].dir, step), checkpoint(run_dir, step))
    return run_dir


def test_verify_and_load_name_the_damaged_file_and_nothing_falls_back(source: tuple[str, Run], copy: Path) -> None:
    newest = checkpoint(copy, STEPS)
    damages = sampled(source[0], newest)
    _verify_names(newest, damages)
    _loads_refuse(copy, newest, damages)


@pytest.mark.full
def test_verify_and_load_name_every_file_whatever_was_done_to_it(source: tuple[str, Run], copy: Path) -> None:
    newest = checkpoint(copy, STEPS)
    damages = everything(newest)
    assert len(damages) > 40
    _verify_names(newest, damages)
    _loads_refuse(copy, newest, damages)


@pytest.mark.full
def test_with_any_file_damaged_the_newest_that_is_whole_is_loaded(
    source: tuple[str, Run], copy: Path, straight: Run
) -> None:
    newest = checkpoint(copy, STEPS)
    damages = everything(newest)
    before = run(copy, f"resume={checkpoint(copy, STEPS - 1)}", f"train.steps={STEPS - 1}", ranks=2)
    outcomes = _attempts(copy, "latest", damages, steps=STEPS - 1)
    for damage, outcome in zip(damages, outcomes, strict=True):
        assert outcome.get("state_digest") == before["state_digest"], f"{damage}: {outcome}"
        assert outcome["resumed_from"] == str(checkpoint(copy, STEPS - 1))
        hidden = damage == Damage(MANIFEST, "removed")  # without its manifest it is no checkpoint at all
        assert outcome["fell_back_from"] == ([] if hidden else [str(newest)])


def test_latest_falls_back_trains_on_and_saves_the_same_step_again(copy: Path, straight: Run) -> None:
    newest = checkpoint(copy, STEPS)
    largest = max(newest.rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    flipped = bytearray(largest.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    largest.write_bytes(flipped)
    found = run(copy, "resume=latest", f"train.steps={STEPS}", ranks=2)
    assert found["fell_back_from"] == [str(newest)]
    assert found["resumed_from"] == str(checkpoint(copy, STEPS - 1))
    assert (found["losses"], found["state_digest"]) == (
        straight.summary["losses"][-1:],
        straight.summary["state_digest"],
    )
    assert [save["path"] for save in found["checkpoints"]] == [str(newest)]
    assert committed(copy)[-1] == newest
    assert verify_checkpoint(newest) == []
    aside = [path.name for path in root_of(copy).glob(f".quarantined-{STEPS:08d}-*")]
    assert len(aside) == 2, "the damaged one, and why"
    reason = next(root_of(copy).glob(".quarantined-*.reason.txt")).read_text()
    assert largest.name in reason


@pytest.mark.full
@pytest.mark.parametrize("how", DAMAGES)
def test_a_manifest_that_is_gone_or_bad_gives_its_name_to_a_new_save(copy: Path, straight: Run, how: str) -> None:
    newest = checkpoint(copy, STEPS)
    Damage(MANIFEST, how)._do(newest / MANIFEST, (newest / MANIFEST).read_bytes())
    found = run(copy, "resume=latest", f"train.steps={STEPS}", ranks=2)
    assert found["state_digest"] == straight.summary["state_digest"]
    assert found["fell_back_from"] == ([] if how == "removed" else [str(newest)])
    assert verify_checkpoint(newest) == []
    assert len(list(root_of(copy).glob(f".quarantined-{STEPS:08d}-*"))) == 2


def test_an_extra_file_is_named_and_harms_no_load(copy: Path, tmp_path: Path, straight: Run) -> None:
    newest = checkpoint(copy, STEPS)
    extra = ["more.txt", "model/.hidden", "arrays.ocdbt/d/0123", "rng/rank-00002/plain.json", "model/wte.weight/c/0/1"]
    for name in extra:
        (newest / name).parent.mkdir(parents=True, exist_ok=True)
        (newest / name).write_text("not ours")
    problems = verify_checkpoint(newest)
    assert sorted(problem.split(" does not belong")[0] for problem in problems) == sorted(extra)
    again = f"train.steps={STEPS}"
    found = run(tmp_path / "one", again, f"resume={newest}", "~components.rng")
    assert found["loaded_digest"] == straight.summary["state_digest"]


def _verify_names(newest: Path, damages: list[Damage]) -> None:
    assert verify_checkpoint(newest) == []
    for damage in damages:
        with damage.done_to(newest):
            if damage == Damage(MANIFEST, "removed"):
                with pytest.raises(CheckpointError, match=MANIFEST):
                    verify_checkpoint(newest)
                continue
            problems = verify_checkpoint(newest)
        assert problems, damage
        assert any(damage.file in problem for problem in problems), f"{damage}: {problems}"
        if "/c/" in damage.file:
            component = damage.file.partition("/")[0]
            assert problems[0].startswith(f"{component}: "), f"{damage}: {problems}"
    assert verify_checkpoint(newest) == []


def _loads_refuse(run_dir: Path, newest: Path, damages: list[Damage]) -> None:
    """Every load by path must fail in a sentence that names the file, and the component whose bytes are concerned."""
    outcomes = _attempts(run_dir, str(newest), damages, steps=STEPS)
    for damage, outcome in zip(damages, outcomes, strict=True):
        assert "error" in outcome, f"{damage} was loaded: {outcome}"
        expected = "CheckpointNotFoundError" if damage == Damage(MANIFEST, "removed") else "CorruptCheckpointError"
        assert outcome["kind"] == expected, f"{damage}: {outcome}"
        assert outcome["error"].startswith(f"load of {newest.name}"), outcome
        assert damage.file in outcome["error"], f"{damage}: {outcome}"
        if "/c/" in damage.file:
            assert f"{damage.file.partition('/')[0]}: " in outcome["error"], f"{damage}: {outcome}"


def _attempts(run_dir: Path, resume: str, damages: list[Damage], *, steps: int) -> list[dict[str, Any]]:
    """The summary or the error of a run that resumes, once for each damage. Nothing is trained or saved."""
    overrides = [f"resume={resume}", f"train.steps={steps}"]
    return run(run_dir, *overrides, ranks=2, job=_Attempt(damages))["outcomes"]  # type: ignore[no-any-return]


class _Attempt:
    """The job of each rank."""

    def __init__(self, damages: list[Damage]) -> None:
        self.damages = damages

    def __call__(self, cfg: dict[str, Any], topology: Topology) -> dict[str, Any]:
        newest = checkpoint(Path(cfg["run_dir"]), STEPS)
        outcomes = []
        for damage in self.damages:
            with damage.done_to(newest) if topology.is_lead else nullcontext():
                outcomes.append(_outcome(cfg, topology))
        return {"outcomes": outcomes}


def _outcome(cfg: dict[str, Any], topology: Topology) -> dict[str, Any]:
    try:
        return train(cfg, topology)
    except CheckpointError as error:
        return {"kind": type(error).__name__, "error": str(error)}
