"""The library speaks of its arguments, the commands of the keys of the config."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from torch.nn import Identity

import ckpt
from ckpt.catalog.retention import Retention
from ckpt.engine.offload import TravelTypes
from ckpt.errors import (
    Argument,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigurationError,
    declare,
    describe,
    leave_out,
    rebuild,
    refused,
    require_no_sizes,
)
from ckpt.memory.budget import MemoryBudget, Needs
from ckpt.ranks.agreement import PhaseOutcome, conclude
from ckpt.run.weights_to_rollouts import IN_MEMORY
from ckpt.saving.save_settings import SaveSettings
from ckpt.state.pattern_check import Diagnosis, PatternVerdict, act_on
from ckpt.state.sharing import Sharing, SharingPattern, StateComponent
from ckpt.storage.metadata import other_format
from recipes.support.cli import CONF
from recipes.support.sentences import sentence_of

KEYS = re.compile(
    r"(?:^|[\s(;,:])(?:~?components\.|save\.[a-z_]+(?:[= ]|$)|load\.[a-z_]+=|ckpt(?:\.\w+)?=|strategy\.\w+=|output_dir=<|run_name=|"
    r"resume=|launch\.|device\.[a-z]+=|engine\.[a-z_]+=|parallel=|agree\.)"
)
"""The keys of a config replace argument names."""
BARE = re.compile(r"\b(leave component|declare component|(?:strict|cast|allow_pickle)=(?:True|False)|saves\.\w+=|backend=\w+)\b")
"""Arguments that have keys in the config: an `Argument` names them, and no text."""
OF_PROGRAMS = {"arguments.py", "metadata.py", "state_dicts.py"}
"""Files with such texts for programs alone, or that make an `Argument` of them."""
LOST = Diagnosis(
    "x",
    Sharing(SharingPattern.REPLICATED),
    (Sharing(SharingPattern.PER_RANK),),
    PatternVerdict.LOSES_STATE,
    "x differs: declare component x with sharing_pattern=per_rank",
)
WITH_SUCH_AN_ARGUMENT = {"huggingface.py"}
"""`CkptTrainer(ckpt={...})`."""


def test_no_sentence_of_the_library_speaks_to_a_command_line() -> None:
    """A program that uses the library has no config."""
    assert _files_that_say(KEYS) - WITH_SUCH_AN_ARGUMENT == set()


def test_no_sentence_of_the_library_hides_an_argument_that_a_command_has_a_key_for() -> None:
    assert _files_that_say(BARE) - OF_PROGRAMS == set()


def _files_that_say(pattern: re.Pattern[str]) -> set[str]:
    """Files of the library with a text that is no docstring, and in which the pattern is found; not within `Argument(...)`."""
    found = set()
    for path in Path(ckpt.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text())
        named = [call for call in ast.walk(tree) if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("Argument", "refused")]
        skipped = {id(node) for call in named for node in ast.walk(call)}
        skipped |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in skipped]
        if any(isinstance(text, str) and pattern.search(text) for text in texts):
            found.add(path.name)
    return found


@pytest.mark.parametrize(
    ("said", "command"),
    [
        (("To go on, ", declare("rng", elastic=None)), "To go on, set components.rng.elastic=null"),
        (
            (declare("x", sharing_pattern="per_group", process_group_name="tp"), ", or ", leave_out("x"), "."),
            "set components.x.sharing_pattern=per_group components.x.process_group_name=tp, or leave component x out with ~components.x.",
        ),
        (("Load with ", Argument("load.strict", False), "."), "Load with load.strict=false."),
        (("Save with ", Argument("backend", "zarr"), "."), "Save with ckpt=zarr."),
        (
            (Argument("backend.pool", True, "KimiEngineBackend(pool=True)"), ": give ", Argument("strategy.group", None)),
            "ckpt.pool=true: give strategy.group=null",
        ),
        (("Give it ", IN_MEMORY), "Give it ckpt=kimi-engine, ckpt.pool=true"),
        ((Argument("world_size", 3, "Run on 3 ranks"), "."), "Run on 3 ranks (launch.nproc_per_node=3)."),
        (("/x: ", Argument("output_dir", None, "choose another folder"), ": Full"), "/x: choose another with output_dir=<folder>: Full"),
    ],
)  # fmt: skip
def test_a_command_says_an_argument_of_the_library_as_its_own_keys(said: Sequence[str], command: str) -> None:
    error = ConfigurationError(*said)
    assert str(error) == "".join(said), "the library's own words"
    assert sentence_of(error, CONF, "train") == command
    assert sentence_of(rebuild(json.loads(json.dumps(describe(error)))), CONF, "train") == command, "on every rank"


def test_an_error_of_all_ranks_names_the_arguments_of_each_of_theirs() -> None:
    raised = {rank: refused("saves.mode", f"{rank}", "sync", f"saves.mode={rank}") for rank in range(6)}
    verdicts = {rank: PhaseOutcome("save", "plan", describe(error)) for rank, error in raised.items()}
    agreed = conclude(verdicts, {}, 6)
    assert agreed is not None
    said = sentence_of(rebuild(agreed), CONF, "train")
    assert said.startswith("save failed in phase plan on rank 0: save.mode=0: expected sync; on rank 1: save.mode=1: ")
    assert said.endswith("and 2 more failures") and "saves." not in said


NEEDS = Needs(64 << 20, 0, (1 << 20, 32 << 20), (4 << 20, 8 << 20))


@pytest.mark.parametrize(
    ("refuse", "command"),
    [
        (lambda: SaveSettings(mode="later"), "save.mode=later: expected one of sync, async"),
        (lambda: SaveSettings(overlap=True), "save.overlap=true has no effect with save.mode=sync, for training waits until "
            "the checkpoint is committed: leave it out, or give save.mode=async"),
        (lambda: MemoryBudget.shared_out(3, NEEDS), "coordinator.memory_budget_mib=3: expected at least 69"),
        (lambda: TravelTypes("int8", ()), "engine.rollout_dtype=int8: expected one of "),
        (lambda: require_no_sizes(["max_in_flight_mib"]), "max_in_flight_mib is no argument any more: one budget of a rank "),
        (lambda: Retention(keep_last=0), "save.keep_last=0; expected a whole number of at least 1"),
        (lambda: act_on([LOST], {"x": StateComponent("x", Identity(), "replicated")}, "warn", tell=False),
            "x differs: set components.x.sharing_pattern=per_rank. To save in spite of it, "),
    ],
)  # fmt: skip
def test_errors_of_the_library_name_the_keys_of_the_config(refuse: Callable[[], object], command: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        refuse()
    assert sentence_of(caught.value, CONF, "train").startswith(command)


def test_old_checkpoints_of_pickles_are_converted_by_a_command(tmp_path: Path) -> None:
    (tmp_path / ".metadata").touch()
    found = other_format(tmp_path)
    assert isinstance(found, Argument)
    assert found.endswith(". Load it by ckpt.load(path, allow_pickle=True), or into a run by its path; no code in it is run")
    said = sentence_of(CheckpointNotFoundError(found), CONF, "train")
    assert said.startswith(f"{tmp_path} is a checkpoint of torch.distributed.checkpoint, whose metadata is a pickle. To read it here")
    assert said.endswith(" dst=<folder> load.allow_pickle=true; no code in it is run")
