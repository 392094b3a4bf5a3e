"""The library speaks of its arguments, the commands of the keys of the config."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import ckpt
from recipes.support.sentences import in_config_words

KEYS = re.compile(
    r"(?:^|[\s(;,:])(?:~?components\.|save\.[a-z_]+(?:[= ]|$)|load\.[a-z_]+=|ckpt(?:\.\w+)?=|strategy\.\w+|output_dir=<|run_name=|"
    r"resume=|launch\.|device\.[a-z]+=|engine\.[a-z_]+=|parallel=|agree\.)"
)
"""The keys of a config replace argument names."""
TO_BE_WRITTEN_ANEW = {"owner.py", "save_settings.py"}
"""Files some of whose sentences still do so."""
WITH_SUCH_AN_ARGUMENT = {"huggingface.py"}
"""`CkptTrainer(ckpt={...})`."""


def test_no_sentence_of_the_library_speaks_to_a_command_line() -> None:
    """A program that uses the library has no config."""
    found: dict[str, list[str]] = {}
    for path in sorted(Path(ckpt.__file__).parent.rglob("*.py")):
        tree = ast.parse(path.read_text())
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docs]
        said = [text for text in texts if isinstance(text, str) and KEYS.search(text)]
        if said:
            found[path.name] = said
    assert {name: said for name, said in found.items() if name not in TO_BE_WRITTEN_ANEW | WITH_SUCH_AN_ARGUMENT} == {}


@pytest.mark.parametrize(
    ("library", "command"),
    [
        (
            "Leave component ema out, declare component ema with required=False, or load with strict=False.",
            "Leave component ema out with ~components.ema, set components.ema.required=false, or load with load.strict=false.",
        ),
        (
            "declare component x with sharing_pattern=per_group and process_group_name=tp",
            "set components.x.sharing_pattern=per_group components.x.process_group_name=tp",
        ),
        (
            "Give each its object, or leave it out on purpose: None for its object in a Checkpointer, leave_out of load_checkpoint, "
            "strict=False for all of them.",
            "Give each its object, or leave it out with load.strict=false.",
        ),
        ("declare component rng with elastic=None, or leave", "set components.rng.elastic=null, or leave"),
        ("saves.writer_cores=0: expected at least 1", "save.writer_cores=0: expected at least 1"),
        ("Give it backend=KimiEngineBackend(pool=True) and", "Give it ckpt=kimi-engine, ckpt.pool=true and"),
        ("take KimiEngineBackend(pool=False)", "take ckpt.pool=false"),
        ("max_in_flight_mib=0: expected", "strategy.max_in_flight_mib=0: expected"),
        ("cpu_transfer=False: rank 0", "strategy.cpu_transfer=false: rank 0"),
        ("group=dp of TwoStageLoad: the run", "strategy.group=dp: the run"),
        ("transport=pigeon of TwoStageLoad: expected", "strategy.transport=pigeon: expected"),
        ("Run on 3 ranks or leave component x out.",
            "Run on 3 ranks (launch.nproc_per_node=3) or leave component x out with ~components.x."),
        ("start at most 2 ranks here", "start at most 2 ranks here: launch.nproc_per_node=2"),
        ("kvstore='s3' is not known", "ckpt.kvstore='s3' is not known"),
        ("/x cannot be written; choose another folder: Full", "/x cannot be written; choose another with output_dir=<folder>: Full"),
        ("a pickle. Load it by ckpt.load(path, allow_pickle=True), or into a run by its path; no code in it is run",
            "a pickle. To read it here, first convert it with python -m recipes.convert src=<it> dst=<folder> load.allow_pickle=true; "
            "no code in it is run"),
        ("load with allow_pickle=True.", "load with load.allow_pickle=true."),
        ("Save with backend=zarr or backend=tensorstore.", "Save with ckpt=zarr or ckpt=tensorstore."),
    ],
)  # fmt: skip
def test_commands_say_a_sentence_of_the_library_with_their_own_keys(library: str, command: str) -> None:
    assert in_config_words(library) == command
    assert in_config_words(command) == command, "said once"
