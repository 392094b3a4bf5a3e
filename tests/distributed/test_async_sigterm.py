"""SIGTERM while saves are under way in the background: they end, or are given up in time; then the process does."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest

from ckpt.catalog.verify import verify_checkpoint
from ckpt.ranks.sigterm import TOLD_TO_END
from ckpt.ranks.topology import Topology
from recipes.training.training import train
from tests.conf.configs import config
from tests.distributed.test_async_faults import AGREE_S, Numbered, require_sound
from tests.support.async_runs import (
    PATIENCE_S,
    SETTINGS,
    Left,
    Troubled,
    committed,
    has_come,
    let_go,
    settings,
    until,
)
from tests.support.covering import sampled
from tests.support.ranks import Dead, run_ranks

TERMINATED = Dead(-signal.SIGTERM)
SLACK_S = 5.0
SMALL = ["train.batch_size=2"]


def _asked_to_end(topology: Topology, folder: Path) -> None:
    """Note who this is, and ask this process to end as a launcher does."""
    (folder / f"asked-{topology.rank}").write_text(f"{os.getpid()}")
    os.kill(os.getpid(), signal.SIGTERM)


def _train_until(topology: Topology, cfg: dict[str, Any], folder: Path, after_s: float) -> None:
    def end() -> None:
        until(lambda: len(committed(Path(cfg["checkpoint_root"]))) > 1, "two checkpoints")
        time.sleep(after_s)
        _asked_to_end(topology, folder)

    threading.Thread(target=end, daemon=True).start()
    try:
        train(cfg, topology)
    except SystemExit as told:
        assert told.code == TOLD_TO_END
        os._exit(TOLD_TO_END)
    except Exception:  # the other rank may be gone already, and this one's end is put off still
        until(lambda: (folder / f"asked-{topology.rank}").exists(), "the signal")
        time.sleep(PATIENCE_S)


def _require_ended(folder: Path, ranks: int, within_s: float) -> None:
    """All of them ended in time."""
    asked = [folder / f"asked-{rank}" for rank in range(ranks)]
    took_s = time.time() - max(path.stat().st_mtime for path in asked)
    assert took_s < within_s, f"it took {took_s:.1f} s"
    for path in asked:
        pid = int(path.read_text())
        until(partial(_is_gone, pid), f"the end of process {pid}", 3.0)


def _is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize(
    ("moment", "setting"),
    [(0, "overlap")]
    + [pytest.param(moment, [*SETTINGS][moment % 2], marks=pytest.mark.full) for moment in range(1, 14)],
)
def test_a_run_that_is_told_to_end_at_any_moment_ends_and_goes_on_from_its_newest_checkpoint(
    tmp_path: Path, moment: int, setting: str
) -> None:
    """It saves after every step, so that a save is always under way."""
    random = Random(f"{moment}")
    grace_s = random.choice([0.0, 0.5, 20.0])
    overrides = [
        *SETTINGS[setting],
        "save.every=1",
        "save.keep_last=3",
        "ledger.stale_s=1",
        *SMALL,
        f"save.grace_s={grace_s}",
    ]
    run_dir = tmp_path / "run"
    cfg = config(run_dir, "train.steps=10000", *overrides, num_ranks=2)
    memory = Left()
    ended = run_ranks(
        2, _train_until, cfg, tmp_path, random.uniform(0, 1.0), process_group=True, expect_dead=(0, 1), grace_s=grace_s
    )  # fmt: skip
    assert all(one in (TERMINATED, Dead(TOLD_TO_END)) for one in ended), ended
    _require_ended(tmp_path, 2, grace_s + SLACK_S)
    assert "shared memory" not in memory.more()
    root = run_dir / "checkpoints"
    newest = committed(root)[-1]
    assert verify_checkpoint(root / newest) == []
    step = int(newest.removeprefix("checkpoint-"))
    on = config(run_dir, f"train.steps={step + 1}", "resume=latest", "ledger.stale_s=1", *SMALL, num_ranks=2)
    (summary, _) = run_ranks(2, _train, on, process_group=True)
    assert summary["first_step"] == step + 1 and summary["fell_back_from"] == []
    assert not [path for path in root.iterdir() if path.name.startswith(".")], "the next save clears away what was left"


def _train(topology: Topology, cfg: dict[str, Any]) -> dict[str, Any]:
    return train(cfg, topology)


def _be_told_in_a_save(
    topology: Topology, root: Path, notes: Path, trouble: str, grace_s: float, who: list[int]
) -> str | None:
    """Checkpoint 1 is there; 2 is being written when those of `who` are told to end. The others wait for it."""
    numbered = Numbered()
    backend = Troubled(trouble, notes, checkpoint_id="2", rank=0)
    made = numbered.coordinator(topology, root, backend=backend, saves=settings(grace_s=grace_s))
    for number in (1, 2):
        numbered.become(number)
        made.save_checkpoint(checkpoint_id=f"{number}")
        if number == 1:
            made.wait()
    until(lambda: has_come(notes, "2", 0))
    if topology.rank in who:
        _asked_to_end(topology, notes)
        while True:  # training goes on until the process ends
            time.sleep(0.01)
    let_go(notes)
    try:
        made.wait()
    except Exception as error:
        return str(error)
    return None


def test_a_save_that_takes_less_than_the_grace_is_committed_before_the_process_ends(tmp_path: Path) -> None:
    root = tmp_path / "root"
    arguments = (root, tmp_path, "dawdles", 20.0, [0, 1])
    assert run_ranks(2, _be_told_in_a_save, *arguments, agree_s=10.0, expect_dead=(0, 1)) == [TERMINATED] * 2
    _require_ended(tmp_path, 2, 10.0)
    require_sound(root, ["checkpoint-1", "checkpoint-2"])


def test_a_save_that_takes_longer_is_given_up_and_the_one_before_stays(tmp_path: Path) -> None:
    root = tmp_path / "root"
    arguments = (root, tmp_path, "hangs", 1.0, [0, 1])
    memory = Left()
    ended = run_ranks(2, _be_told_in_a_save, *arguments, agree_s=30.0, grace_s=1.0, expect_dead=(0, 1))
    assert all(one in (TERMINATED, Dead(128 + signal.SIGTERM)) for one in ended), ended
    _require_ended(tmp_path, 2, 1.0 + SLACK_S)
    assert "shared memory" not in memory.more()
    require_sound(root, ["checkpoint-1"])


@sampled("who", [0, 1])
def test_one_rank_alone_that_is_told_to_end_finishes_its_part_first(tmp_path: Path, who: int) -> None:
    root = tmp_path / "root"
    arguments = (root, tmp_path, "dawdles", 20.0, [who])
    ended = run_ranks(2, _be_told_in_a_save, *arguments, agree_s=AGREE_S, expect_dead=(who,))
    assert ended[who] == TERMINATED
    assert ended[1 - who] is None or f"rank {who} " in ended[1 - who], "it may learn of the commit, or of the end"
    require_sound(root, ["checkpoint-1", "checkpoint-2"])
