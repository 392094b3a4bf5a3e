"""`device=npu` as a user types it, on the stand-in: found on PYTHONPATH as the real plugin is, by a process that knows nothing of it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.conf.configs import composed
from tests.device.devices import STAND_IN, environment, prepare
from tests.device.test_resume_on_device import STRATEGIES, Run, runs_on
from tests.e2e.runs import REPO, TEXT, Command, Forked, checkpoint, committed, start, summary_of
from tests.support.covering import sampled

pytestmark = pytest.mark.npu

SMALL = ["train.steps=4", "save.every=2", "train.batch_size=2", "device=npu"]
CARD = ["train.steps=2", "save.every=1", "train.batch_size=2", f"data.path={TEXT}", "device=npu"]
LARGE = ["train.steps=1", "model.size=tiny", "device=npu"]


@pytest.fixture(autouse=True, scope="module")
def _stand_in_is_built() -> None:
    prepare("npu")


def begin(run_dir: Path, *overrides: str, ranks: int = 1, **variables: str) -> Command:
    """Start `python -m recipes.train` where the stand-in can be imported."""
    return start(run_dir, *overrides, ranks=ranks, environment=with_stand_in(variables))


def with_stand_in(variables: dict[str, str]) -> dict[str, str]:
    return {"PYTHONPATH": f"{REPO}{os.pathsep}{STAND_IN}", **variables}


def done(command: Command | Forked) -> str:
    """Wait for a good end with nothing on stderr, and return what was printed."""
    command.ended()
    assert (command.code, command.err) == (0, ""), command.err
    return command.out


@pytest.mark.full
def test_two_ranks_train_and_go_on_to_the_bit(tmp_path: Path) -> None:
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    done(begin(straight, "ckpt=tensorstore", *SMALL, ranks=2))
    done(begin(resumed, "ckpt=tensorstore", *SMALL, f"resume={checkpoint(straight, 2)}", ranks=2))
    before, after = summary_of(straight), summary_of(resumed)
    assert (before["world_size"], after["first_step"], len(after["losses"])) == (2, 3, 2)
    assert after["losses"] == before["losses"][2:]
    assert after["state_digest"] == before["state_digest"]


@pytest.mark.full
def test_kimi_gives_weights_from_one_npu_to_another(tmp_path: Path) -> None:
    """checkpoint-engine asks `npu-smi` which chip a process uses, and takes the stand-in for what it is made for."""
    start = ["-m", "recipes.sync_weights", "device=npu", "engine.bucket_mib=1", f"data.path={TEXT}"]
    done(Command(start, ("train.steps=2", "run_name=sync"), tmp_path, {**environment(), **with_stand_in({})}))
    summary = summary_of(tmp_path / "outputs" / "sync")
    assert summary["rollouts"] == [{"rank": 1, **summary["trainer"]}]
    assert summary["trainer"]["version"] == 2


@sampled("typed", [False, True])
def test_the_card_runs_as_it_is_and_any_device_goes_on_from_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], typed: bool
) -> None:
    """`python -m recipes.train ckpt=tensorstore device=npu`, but for the text and the number of steps and samples."""
    words = ("ckpt=tensorstore", *CARD)
    if typed:
        done(Command(["-m", "recipes.train"], words, tmp_path, with_stand_in({})))
    else:
        done(Forked("recipes.train", words, tmp_path, device="npu"))
    card = tmp_path / "outputs" / "dev"
    assert [path.name for path in committed(card)] == ["checkpoint-00000001", "checkpoint-00000002"]
    path = checkpoint(card, 2)
    digests = [summary_of(card)["state_digest"]]
    same = [f"model.size={composed(tmp_path).model.size}", f"resume={path}"]
    for name, strategy in {"cpu": "direct", "npu": "two-stage by the host"}.items():
        (summary,) = runs_on(name, "single", Run(tmp_path / name, [*same, *STRATEGIES[strategy]]))
        assert (summary["first_step"], summary["losses"]) == (3, [])
        digests += [summary["loaded_digest"], summary["state_digest"]]
        assert f"restored {path} at step 2: " in capsys.readouterr().err
    assert digests == [digests[0]] * 5


@pytest.mark.full
def test_ranks_that_torchrun_starts_train_as_those_of_the_recipe_do(tmp_path: Path) -> None:
    done(begin(tmp_path / "own", *SMALL, ranks=2))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "recipes.train"]
    run_dir = tmp_path / "theirs"
    command = Command(
        launcher, (f"output_dir={run_dir}", f"data.path={TEXT}", "model.size=nano", *SMALL), tmp_path, with_stand_in({})
    ).ended()
    assert command.code == 0, command.err
    assert "Traceback" not in command.err
    own, theirs = summary_of(tmp_path / "own"), summary_of(run_dir)
    assert (theirs["losses"], theirs["state_digest"]) == (own["losses"], own["state_digest"])


@pytest.mark.full
def test_a_sweep_over_devices_backends_and_strategies_ends_with_one_table(tmp_path: Path) -> None:
    """Each job reads its last checkpoint back over scrambled tensors, on its device, and compares every bit."""
    arguments = ["-m", "recipes.train", "-m", f"output_dir={tmp_path}/sweep", f"data.path={TEXT}"]
    choices = ("device=cpu,npu", "ckpt=zarr,tensorstore", "strategy=direct,two-stage", "launch.nproc_per_node=2")
    command = Command([*arguments, *choices], ("train.steps=2",), tmp_path, with_stand_in({}))
    printed = done(command)
    rows = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert len(rows) == 8 and [row["error"] for row in rows] == [None] * 8
    assert all(row["save_s"] > 0 and row["load_s"] > 0 and row["bytes_read"] > 12e6 for row in rows)
    digests = [row["state_digest"] for row in rows]
    assert digests == [digests[0]] * 4 + [digests[4]] * 4
    assert printed.count("8 jobs: ") == 1
    logs = [Path(row["run_dir"], "job.log").read_text() for row in rows]
    assert all(log.count("read back checkpoint-00000002, bit for bit") == 1 for log in logs)


def test_the_copies_of_a_device_are_measured_beside_plain_ones(tmp_path: Path) -> None:
    overrides = ["measure=device", "device=npu", f"output_dir={tmp_path}/run", "benchmark.mib=1", "benchmark.repeats=2"]
    printed = done(Forked("recipes.benchmark.__main__", overrides, tmp_path, device="npu"))
    result = json.loads((tmp_path / "run" / "benchmark.json").read_text())
    assert (result["device"], result["ranks"], result["repeats"]) == ("npu:0", 1, 2)
    held = {name: (row["tensors"], row["bytes"]) for name, row in result["states"].items()}
    assert held == {"large tensors": (1, 1 << 20), "tensors of 4 KiB": (256, 1 << 20), "transposed": (1, 1 << 20)}
    for name, row in result["states"].items():
        rounds = result["rounds"][name]
        assert len(rounds) == 2 and all(min(seconds.values()) > 0 for seconds in rounds)
        assert row["ratios"]["save"] == row["medians"]["plain save"] / row["medians"]["save"] > 0
        assert name in printed


# What cannot be


@pytest.mark.full
def test_more_ranks_than_devices_are_refused_with_the_number_that_fits(tmp_path: Path) -> None:
    command = begin(tmp_path / "run", *SMALL, ranks=2, NPU_SIM_DEVICES="1").ended()
    assert re.fullmatch(
        r".*rank 1.*device=npu: local rank 1 has no device of its own, this host shows 1; .*\(launch\.nproc_per_node=1\)",
        command.refused(),
    ), command.err
    assert not list(tmp_path.rglob("checkpoint-*"))


@pytest.mark.full
def test_a_plugin_that_does_not_load_says_why_in_its_own_words(tmp_path: Path) -> None:
    """Here the stand-in's, which has no compiler; the real one's are in tests/device/test_real_torch_npu.py."""
    elsewhere = {"CXX": "no-such-compiler", "NPU_SIM_BUILD": f"{tmp_path}/build"}
    sentence = begin(tmp_path / "run", *SMALL, **elsewhere).ended().refused()
    assert re.fullmatch(r"device=npu: torch_npu .*needs a C\+\+ compiler.*choose device=cpu", sentence)
    assert "CANN" not in sentence


@pytest.mark.full
def test_no_plugin_at_all_names_the_extra(tmp_path: Path) -> None:
    sentence = start(tmp_path / "run", *SMALL).ended().refused()
    assert re.fullmatch(
        r"device=npu: torch_npu is not installed: pip install '.*\[npu\]', or choose device=cpu", sentence
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a short run: 12.8 MB of state."""
    run_dir = tmp_path_factory.mktemp("saved") / "run"
    done(begin(run_dir, *LARGE))
    return run_dir


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["direct", "two-stage"])
def test_little_room_beside_the_state_is_loaded_through_a_smaller_bucket_and_told(
    tmp_path: Path, saved: Path, strategy: str
) -> None:
    path = checkpoint(saved, 1)
    overrides = [*LARGE, f"resume={path}", f"strategy={strategy}"]
    command = begin(tmp_path / "run", *overrides, NPU_SIM_MEMORY="14000000").ended()
    assert command.code == 0, command.err
    assert summary_of(tmp_path / "run")["loaded_digest"] == summary_of(saved)["state_digest"]
    assert re.search(
        r"npu:0 has no room for a bucket of [48]\.0 MiB: loading through one of", command.out + command.err
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("memory", "sentence"),
    [
        ("8000000", r"load of checkpoint-00000001: optimizer: device=npu: npu:0 has no room for .*"),
        ("4000000", r"the set-up of the run: device=npu: npu:0 has no room.*"),
    ],
    ids=["for the state", "for the model"],
)
def test_too_little_device_memory_is_one_sentence(tmp_path: Path, saved: Path, memory: str, sentence: str) -> None:
    overrides = [*LARGE, f"resume={checkpoint(saved, 1)}"]
    command = begin(tmp_path / "run", *overrides, NPU_SIM_MEMORY=memory).ended()
    assert re.fullmatch(sentence, command.refused()), command.err
    assert not committed(tmp_path / "run")
