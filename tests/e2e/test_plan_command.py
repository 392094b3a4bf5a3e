"""`recipes.plan` says, before anything is loaded, what `recipes.train` then does."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import recipes.plan
from ckpt.errors import CheckpointError, CorruptCheckpointError, MissingStateError
from recipes.commands import planning
from recipes.commands.planning import PlanKeys, show
from recipes.commands.planning import plan as planned
from recipes.support.config import GIVEN, checked, given_keys, popped_keys
from recipes.training.gpt import GPT
from recipes.training.training import train
from tests.conf.configs import composed, config
from tests.e2e.conftest import Run
from tests.e2e.runs import SMALL, TEXT, checkpoint, run
from tests.support.covering import and_in_full, sampled
from tests.support.ranks import run_ranks

STEP = 4
SAMPLE = STEP * 12


class Plan:
    """The command, called in an empty folder, in which it leaves nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch = monkeypatch
        self.capsys = capsys

    def __call__(self, *overrides: str) -> tuple[int, str, str]:
        """Return the exit code and what it printed."""
        self.monkeypatch.setattr(sys, "argv", ["plan", *SMALL, *overrides])
        self.capsys.readouterr()
        try:
            recipes.plan.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        assert list(Path.cwd().iterdir()) == []
        return code, *self.capsys.readouterr()

    def json(self, *overrides: str) -> dict[str, Any]:
        """The output with json=true, by the function that the command calls after Hydra, which tells it what was given."""
        cfg = composed(Path.cwd(), *SMALL, *overrides, "json=true", root="plan")
        keys = popped_keys(cfg, PlanKeys)
        self.capsys.readouterr()
        with self.monkeypatch.context() as patched:
            told = {GIVEN: given_keys(overrides)}
            patched.setattr(planning, "checked", lambda *args, **kw: checked(*args, **kw) | told)
            show(found := planned(keys, cfg), keys)
        assert list(Path.cwd().iterdir()) == []
        tree: dict[str, Any] = json.loads(self.capsys.readouterr().out)
        assert tree["loads"] == found.forecast.loads
        return tree


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Plan:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    return Plan(monkeypatch, capsys)


@pytest.mark.full
def test_three_ranks_in_another_layout_do_what_was_planned(
    plan: Plan, saved: str, straight: Run, tmp_path: Path
) -> None:
    wanted = ["parallel=fsdp", "launch.nproc_per_node=3"]
    tree = plan.json(saved, *wanted)
    assert tree["loads"]
    path = checkpoint(straight.dir, STEP)
    summary = run(tmp_path / "run", f"train.steps={STEP}", f"resume={path}", *wanted, ranks=3)
    assert summary["first_step"] == STEP + 1
    cut = [one["bytes_of_one_copy"] for one in tree["components"].values() if one["bytes_by_rank"] is None]
    counts_of_steps = 4 * len(list(GPT(size="nano").parameters()))  # each parameter's, which every rank holds
    assert len(cut) == 2
    assert summary["bytes_needed"] == sum(cut) + 2 * counts_of_steps, "three ranks read a third each"


@pytest.fixture
def saved(straight: Run) -> str:
    """The checkpoint of two data-parallel ranks after STEP steps, as an override."""
    return f"checkpoint={checkpoint(straight.dir, STEP)}"


def verdicts(tree: dict[str, Any]) -> dict[str, str]:
    return {key: component["verdict"] for key, component in tree["components"].items()}


def test_a_change_of_ranks_and_layout_is_told_component_by_component(plan: Plan, saved: str, straight: Run) -> None:
    code, out, err = plan(saved, "parallel=fsdp", "launch.nproc_per_node=3")
    assert (code, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0].endswith("checkpoint-00000004: saved by 2 ranks; wanted by 3 ranks, parallel=fsdp (dp 3)")
    assert "model replicated sharded, reshard resharded from 2 to 3 ranks a part of 747.8 kB" in lines
    moved = "saved by 2 ranks, this run has 3"
    assert f"scheduler replicated replicated, replica replica taken: {moved}" in lines
    assert f"dataset global global, repartition repartitioned at sample {SAMPLE}" in lines
    assert f"rng per_rank per_rank, derive derived from seed 0, step {STEP}" in lines
    assert lines[1] == "It would load."
    root = straight.dir / "checkpoints"
    assert not list(root.glob(".*")), "nothing was written beside the checkpoints either"


def test_as_json_the_plan_gives_topologies_keys_and_bytes_exactly(plan: Plan, saved: str) -> None:
    code, out, err = plan(saved, "nodes=2", "launch.nproc_per_node=2", "json=true")
    assert (code, err) == (0, "")
    tree = json.loads(out)
    assert tree["saved"] == {"world_size": 2, "topology": {"nodes": [[0, 1]], "groups": {"dp": [[0, 1]]}}}
    assert tree["wanted"] == {
        "layout": "parallel=ddp (dp 4)",
        "world_size": 4,
        "topology": {"nodes": [[0, 1], [2, 3]], "groups": {"dp": [[0, 1, 2, 3]]}},
    }
    model = tree["components"]["model"]
    size = sum(p.numel() * 4 for p in GPT(size="nano").parameters())
    assert (model["bytes_by_rank"], model["bytes_of_all_ranks"]) == ([size] * 4, 4 * size)
    assert (model["only_in_checkpoint"], model["only_wanted"], model["does_not_fit"]) == ([], [], {})


def test_what_does_not_fit_is_listed_key_by_key(plan: Plan, saved: str) -> None:
    code, as_json, _ = plan(saved, "model.tie_embeddings=true", "json=true")
    tree = json.loads(as_json)
    assert (code, tree["loads"]) == (1, False)
    model, optimizer = tree["components"]["model"], tree["components"]["optimizer"]
    assert (model["verdict"], model["only_in_checkpoint"], model["only_wanted"]) == ("refused", [], [])
    assert model["does_not_fit"] == {"lm_head.weight": "differs from wte.weight, and they are one tensor in this run"}
    own = {"state.lm_head.weight.exp_avg", "state.lm_head.weight.exp_avg_sq", "state.lm_head.weight.step"}
    assert set(optimizer["only_in_checkpoint"]) == own
    code, out, _ = plan(saved, "model.tie_embeddings=true")
    assert code == 1
    assert re.search(r"model +lm_head\.weight +differs from wte\.weight", out)
    assert out.splitlines()[1].strip() == "It would not load."
    tree = plan.json(saved, "model.size=tiny", "~components.optimizer")
    unfit = tree["components"]["model"]["does_not_fit"]
    assert unfit["wte.weight"] == "found float32 [256, 64], expected float32 [256, 128]"
    assert "h.4.ln_1.bias" in tree["components"]["model"]["only_wanted"]


CASES = {
    "the same, on one rank": [],
    "held by one rank": ["parallel=single"],
    "own data": ["data.dispatch=false"],
    "generators of two ranks": ["components.rng.elastic=null"],
    "generators rebuilt": ["components.rng.elastic=rebuild"],
    "any generator's state": ["components.rng.elastic=replica"],
    "model refuses": ["components.model.elastic=refuse"],
    "schedule rebuilt": ["components.scheduler.elastic=rebuild"],
    "another text": [f"data.path={Path(TEXT).with_name('keyword.py')}"],
    "tied": ["model.tie_embeddings=true"],
    "tied, as far as it goes": ["model.tie_embeddings=true", "load.strict=false"],
    "without schedule": ["~components.scheduler"],
    "another optimizer": ["optimizer._target_=torch.optim.Adam"],
    "another optimizer, without its state": [
        "optimizer._target_=torch.optim.Adam", "~components.optimizer", "~components.scheduler"
    ],
    "an option of no loaded state": ["+optimizer.amsgrad=true"],
    "two-stage": ["strategy=two-stage", "strategy.group=dp"],
    "sharded": ["parallel=fsdp"],
    "one stage": ["parallel=pipeline"],
    "another pattern": ["components.model.sharing_pattern=per_rank", "components.model.validate_replication=false"],
    "more than was saved": [
        "+components.more={_target_: tests.e2e.nodes.NodeCache, made_in: x, sharing_pattern: global}"
    ],
    "more, if there": [
        "+components.more={_target_: tests.e2e.nodes.NodeCache, made_in: x, sharing_pattern: global, required: false}"
    ],
}
REFUSED = {
    "another optimizer", "an option of no loaded state", "generators of two ranks", "any generator's state", "model refuses",
    "another text", "tied", "another pattern", "more than was saved",
}  # fmt: skip


def test_a_component_that_the_run_has_forgotten_is_refused_by_plan_and_run_alike(plan: Plan, tmp_path: Path) -> None:
    more = "+components.more={_target_: tests.e2e.nodes.NodeCache, made_in: x, sharing_pattern: global}"
    run(tmp_path / "saved", "train.steps=1", more)
    path = checkpoint(tmp_path / "saved", 1)
    tree = plan.json(f"checkpoint={path}")
    assert not tree["loads"] and "only in the checkpoint: more; this run has model, optimizer" in tree["refusal"]
    with pytest.raises(MissingStateError, match="only in the checkpoint: more; this run has model, optimizer"):
        run(tmp_path / "run", "train.steps=2", f"resume={path}")
    loose = plan.json(f"checkpoint={path}", "load.strict=false")
    assert loose["loads"] and loose["passed_over"] == {"more": "only in the checkpoint"}
    assert run(tmp_path / "run", "train.steps=2", f"resume={path}", "load.strict=false")["first_step"] == 2


@pytest.mark.parametrize("damaged", ["rng/rank-00000/plain.json", "index-00000.json", "config.yaml"])
@sampled("verify", ["true", "false"])
def test_damage_that_a_load_meets_before_it_reads_tensors_is_foreseen(
    plan: Plan, straight: Run, tmp_path: Path, damaged: str, verify: str
) -> None:
    path = tmp_path / checkpoint(straight.dir, STEP).name
    shutil.copytree(checkpoint(straight.dir, STEP), path)
    (path / damaged).write_bytes((path / damaged).read_bytes()[:-3])
    given = f"load.verify={verify}"

    def refuses(act: Callable[[], Any]) -> bool:
        try:
            return act() is False
        except CorruptCheckpointError:
            return True

    planned = refuses(lambda: plan.json(f"checkpoint={path}", given)["loads"])
    assert planned == refuses(lambda: run(tmp_path / "run", f"train.steps={STEP}", f"resume={path}", given))
    assert planned or verify == "false"


def test_a_checkpoint_of_another_program_is_planned_as_it_is_loaded(plan: Plan, tmp_path: Path) -> None:
    torch.save({"model": GPT(size="nano").state_dict(), "epoch": 3}, tmp_path / "model-3.pt")
    only_model = [f"~components.{key}" for key in ("optimizer", "scheduler", "dataset", "rng")]
    given = [*only_model, "load.allow_pickle=true"]
    assert plan.json(f"checkpoint={tmp_path / 'model-3.pt'}", *given)["loads"]
    assert run(tmp_path / "run", "train.steps=4", f"resume={tmp_path / 'model-3.pt'}", *given)["first_step"] == 1


BY_DEFAULT = [
    "the same, on one rank",
    "generators of two ranks",
    "schedule rebuilt",
    "tied",
    "without schedule",
    "two-stage",
    "one stage",
    "more, if there",
]


@and_in_full(("case",), [(case,) for case in BY_DEFAULT], [(case,) for case in CASES])
def test_a_run_of_one_rank_does_what_was_planned(
    plan: Plan, saved: str, straight: Run, tmp_path: Path, case: str
) -> None:
    tree = plan.json(saved, *CASES[case])
    assert tree["loads"] == (case not in REFUSED)
    path = checkpoint(straight.dir, STEP)
    try:
        summary = run(tmp_path / "run", f"train.steps={STEP}", f"resume={path}", *CASES[case])
    except CheckpointError as error:
        assert not tree["loads"]
        sentences = [one["text"].removeprefix("refused: ") for one in tree["components"].values()]
        sentences += [tree["refusal"]] if tree["refusal"] else []
        assert any(str(error).endswith(sentence) for sentence in sentences), (str(error), sentences)
        assert tree["refusal"] or verdicts(tree)[str(error.component)] == "refused"
    else:
        assert tree["loads"]
        assert summary["bytes_needed"] == sum(one["bytes_of_all_ranks"] for one in tree["components"].values())


def test_verdicts_have_one_word_each(plan: Plan, saved: str) -> None:
    found = verdicts(plan.json(saved, *CASES["generators rebuilt"], "components.scheduler.elastic=rebuild"))
    assert found == {
        "model": "replica taken",
        "optimizer": "replica taken",
        "scheduler": "rebuilt",
        "dataset": "repartitioned",
        "rng": "rebuilt",
    }
    same = verdicts(plan.json(saved, "launch.nproc_per_node=2"))
    assert set(same.values()) == {"loaded"}
    assert verdicts(plan.json(saved, *CASES["more, if there"]))["more"] == "left out"
    assert verdicts(plan.json(saved, *CASES["tied, as far as it goes"]))["model"] == "partly loaded"


def test_stages_that_are_each_ranks_own_are_planned_with_the_layers_of_each_rank(plan: Plan, tmp_path: Path) -> None:
    own = [f"components.{key}.sharing_pattern=per_rank" for key in ("model", "optimizer")]
    cfg = config(tmp_path / "run", *SMALL, "parallel=pipeline", "train.steps=1", *own, num_ranks=2)
    run_ranks(2, _train, cfg, process_group=True, timeout_s=120.0)
    saved = f"checkpoint={checkpoint(tmp_path / 'run', 1)}"
    tree = plan.json(saved, "parallel=pipeline", *own, "launch.nproc_per_node=2")
    assert set(verdicts(tree).values()) == {"loaded"}
    sizes = tree["components"]["model"]["bytes_by_rank"]
    assert len(set(sizes)) == 2 and sum(sizes) == sum(p.numel() * 4 for p in GPT(size="nano").parameters())
    tree = plan.json(saved, "parallel=pipeline", *own, "launch.nproc_per_node=3")
    assert verdicts(tree) == {
        "model": "refused",
        "optimizer": "refused",
        "scheduler": "replica taken",
        "dataset": "repartitioned",
        "rng": "derived",
    }
    assert (
        "component model is per_rank and was saved by 2 ranks, this run has 3." in tree["components"]["model"]["text"]
    )


def _train(topology: Any, cfg: dict[str, Any]) -> None:
    train(cfg, topology)


def test_an_old_checkpoint_of_pickled_files_is_planned_where_it_may_be_read(plan: Plan, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-40"
    folder.mkdir()
    torch.save(GPT(size="nano").state_dict(), folder / "model_state.pt")
    only_model = [f"~components.{key}" for key in ("optimizer", "scheduler", "dataset", "rng")]
    code, _, err = plan(f"checkpoint={folder}", *only_model)
    assert code == 1 and "load.allow_pickle=true" in err
    tree = plan.json(f"checkpoint={folder}", *only_model, "load.allow_pickle=true")
    assert (verdicts(tree), tree["saved"]) == ({"model": "loaded"}, None)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([], "no checkpoint is given; add checkpoint=<a checkpoint>"),
        (["checkpoint=/proc", "launch.nproc_per_node=two"], "launch.nproc_per_node"),
        (["checkpont=/proc"], "checkpont"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(plan: Plan, overrides: list[str], says: str) -> None:
    code, out, err = plan(*overrides)
    assert (code, out) == (1, "")
    assert says in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["checkpoint=/nowhere"], "/nowhere is not a checkpoint: it does not exist. Give the folder of a committed checkpoint"),
        (["checkpoint=/proc"], "/proc is not a checkpoint"),
        (["checkpoint=/proc", "nodes=0"], "nodes=0: expected at least 1"),
        (["checkpoint=/proc", "parallel=single", "nodes=2"], "parallel=single trains on one rank, but there are 2"),
        (["checkpoint=/proc", "components.rng.elastic=rubber"], "elastic=rubber does not apply to per_rank components"),
    ],
)
def test_a_checkpoint_or_layout_that_cannot_be_is_refused(plan: Plan, overrides: list[str], says: str) -> None:
    with pytest.raises(CheckpointError) as told:
        plan.json(*overrides)
    assert says in str(told.value) and len(str(told.value).splitlines()) == 1
