"""The program `ckpt`, as a person types it: words, what is printed, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckpt
from ckpt import Checkpointer, StateComponent
from ckpt.catalog import copying
from ckpt.catalog.catalog import catalog_at
from ckpt.cli import removing
from ckpt.cli.arguments import argument, as_option, spelled
from ckpt.cli.listing import age_of
from ckpt.cli.main import COMMANDS, run
from ckpt.format.manifest import MANIFEST_NAME
from ckpt.ranks.topology import Topology
from recipes.support.sentences import in_config_words
from tests.support.pace import patience
from tests.support.ranks import forkserver
from tests.support.states import Held, coordinator


def saved(root: Path, steps: int = 3, *, seed: int = 0, losses: tuple[float, ...] = ()) -> Path:
    """A root with checkpoints of a model whose weights are other ones at each step."""
    held = Held({})
    with coordinator(Topology.alone(), root, [StateComponent("model", held, "replicated")]) as run:
        for step in range(1, steps + 1):
            generator = torch.Generator().manual_seed(seed if step > 1 else 0)
            held.state = {"w": torch.randn(50, 40, generator=generator), "b": torch.arange(7.0) + step, "step": step}
            metrics = {"loss": losses[step - 1]} if losses else None
            run.save_checkpoint(checkpoint_id=f"{step:08d}", metrics=metrics)
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return saved(tmp_path / "run" / "checkpoints", losses=(0.5, 0.2, 0.3))


def called(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    capsys.readouterr()
    code = run([str(word) for word in words])
    return code, *capsys.readouterr()


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_a_page_with_every_option_and_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = called(capsys, name, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"Usage: ckpt {name} ") and COMMANDS[name].short.split()[0] in out and f"$ ckpt {name} " in out
    assert all(len(line) <= 100 for line in out.splitlines())


def test_the_list_of_commands_needs_no_torch() -> None:
    program = "import sys; from ckpt.cli.main import run; code = run(['--help']); assert 'torch' not in sys.modules; sys.exit(code)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "") and all(f"  {name} " in done.stdout for name in COMMANDS)


def test_python_minus_m_is_the_same_program(root: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "ckpt", "ls", root, "--json"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and [row["step"] for row in json.loads(done.stdout)["checkpoints"]] == [1, 2, 3]


def test_a_listing_has_a_line_for_each_checkpoint_within_80_columns(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = called(capsys, "ls", root)
    head, _, *rows = (line.split() for line in out.splitlines())
    assert code == 0 and head == ["step", "age", "size", "layout", "format", "marks"]
    assert [row[0] for row in rows] == ["1", "2", "3"] and [row[-3:] for row in rows][1] == ["best", "(loss", "0.2)"]
    assert rows[2][-1] == "newest" and all("zarr" in row and "rank" in row for row in rows)
    assert all(len(line) <= 80 for line in out.splitlines())


def test_the_best_checkpoint_is_that_of_the_metric_and_direction_asked_for(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(called(capsys, "ls", root, "--json")[1])["best"] == "00000002"
    assert json.loads(called(capsys, "ls", root, "--json", "--greater")[1])["best"] == "00000001"
    code, out, err = called(capsys, "ls", root, "--json", "--best", "accuracy")
    assert (code, out) == (2, "") and err == "error: --best accuracy: no checkpoint here has a value of it; they have loss\n"


def test_a_checkpoint_whose_manifest_is_damaged_is_marked_and_the_exit_code_says_so(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = root / "checkpoint-00000002" / MANIFEST_NAME
    manifest.write_bytes(manifest.read_bytes().replace(b"float32", b"float16", 1))
    code, out, _ = called(capsys, "ls", root)
    assert code == 1 and "damaged" in out.splitlines()[3] and out.splitlines()[-1].startswith("checkpoint-00000002: ")


@pytest.fixture
def another_user(root: Path, tmp_path: Path) -> Iterator[None]:
    """A process without rights of its own: what is in the folder of the test is everybody's, up to `closed`."""
    for path in [tmp_path, *tmp_path.rglob("*")]:
        path.chmod(0o777)
    for above in tmp_path.parents:
        if above.stat().st_mode & 0o011 != 0o011:
            above.chmod(above.stat().st_mode | 0o011)
    os.seteuid(4321 if os.geteuid() == 0 else os.geteuid())
    yield
    os.seteuid(os.getuid())


def closed(path: Path, mode: int = 0) -> None:
    """Change the mode of a path as its owner."""
    user = os.geteuid()
    os.seteuid(os.getuid())
    path.chmod(mode)
    os.seteuid(user)


@pytest.mark.parametrize("what", ["checkpoint-00000002", f"checkpoint-00000002/{MANIFEST_NAME}"])
def test_a_checkpoint_that_one_may_not_read_is_a_row_beside_the_others_and_no_damage(
    root: Path, another_user: None, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    closed(root / what)
    for command in ("ls", "show"):
        code, out, err = called(capsys, command, root)
        assert "…" not in out
        assert (code, err) == (2, "") and "unreadable" in out and "damaged" not in out
        assert out.splitlines()[-1].startswith("checkpoint-00000002: Permission denied: ")
        rows = {row["id"]: row["mark"] for row in json.loads(called(capsys, command, root, "--json")[1])["checkpoints"]}
        assert rows == {"00000001": None, "00000002": "unreadable", "00000003": None}
    code, out, _ = called(capsys, "verify", root)
    assert code == 2 and out.count(": ok, ") == 2 and f"{root / 'checkpoint-00000002'}: could not be read\n" in out
    code, out, err = called(capsys, "diff", root / "checkpoint-00000001", root / "checkpoint-00000002")
    assert (code, out) == (2, "") and "Permission denied" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("command", ["verify", "diff", "convert", "copy"])
def test_damage_of_what_is_read_is_1_and_what_may_not_be_read_is_2(
    root: Path, another_user: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    first, second, new = root / "checkpoint-00000001", root / "checkpoint-00000002", tmp_path / "deep" / "new"
    words = {"verify": [second], "diff": [first, second]}.get(command, [second, new])
    file = max((path for path in second.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    closed(file)
    code, _, said = called(capsys, command, *words)
    assert code == 2 and ".unpublished" not in said and ("goes on from it" in said) == (command == "copy")
    closed(file, 0o666)
    file.write_bytes(bytes(file.stat().st_size))
    code, out, err = called(capsys, command, *words)
    assert code == 1 and "not those that were saved" in out + err and "earlier checkpoint" not in err
    assert not new.parent.exists() or command != "copy" or list(new.parent.iterdir()) == []


def test_a_folder_of_runs_is_listed_by_its_folders_of_checkpoints(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = called(capsys, "ls", root.parent.parent, "--json")
    assert code == 0 and json.loads(out)["folders"] == [{"path": str(root), "checkpoints": 3, "newest": "00000003"}]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59, "59 s"), (60, "1 min"), (3599, "59 min"), (7200, "2 h"), (86400 * 3, "3 d"), (-5, "0 s")]
)
def test_an_age_has_one_unit(seconds: int, text: str) -> None:
    now = datetime(2026, 1, 5, tzinfo=UTC)
    assert age_of(now - timedelta(seconds=seconds), now) == text


def test_damage_and_differences_are_exit_code_1_and_trouble_is_2(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = root / "checkpoint-00000001", root / "checkpoint-00000002"
    assert called(capsys, "verify", root)[0] == called(capsys, "diff", first, first)[0] == 0
    assert called(capsys, "diff", first, second)[0] == 1
    code, out, err = called(capsys, "diff", first, root / "no")
    assert (code, out) == (2, "") and err.startswith("error: ") and len(err.splitlines()) == 1
    assert called(capsys, "diff", first)[0] == called(capsys, "nope")[0] == called(capsys, "ls", root, "--nope")[0] == 2
    file = max((path for path in first.rglob("*") if path.is_file() and path.suffix != ".json"), key=lambda path: path.stat().st_size)
    file.write_bytes(bytes(file.stat().st_size))
    code, out, _ = called(capsys, "verify", root, "--json")
    assert code == 1 and [bool(one["problems"]) for one in json.loads(out)["checkpoints"]] == [True, False, False]


def test_sentences_name_options_here_and_keys_in_a_recipe(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert called(capsys, "show", root / "checkpoint-00000001", "--limit", "1")[1].endswith(
        "give --filter <part of its name> or --all to see it\n"
    )
    assert called(capsys, "show", root, "--limit", "0")[2] == "error: --limit 0: expected at least 1, or --limit none for all\n"
    assert argument("load.allow_pickle") == "allow_pickle=True"
    with spelled(in_config_words):
        assert (argument("load.allow_pickle"), argument("limit", None)) == ("load.allow_pickle=true", "limit=null")
        with spelled(as_option):
            assert argument("load.allow_pickle") == "--allow-pickle"
        assert argument("to", "zarr") == "to=zarr"


def test_an_error_of_the_library_names_the_option_that_helps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"w": torch.arange(3)}, tmp_path / "w.pt")
    code, _, err = called(capsys, "show", tmp_path / "w.pt")
    assert code == 2 and err.endswith("without running any code in it, load with --allow-pickle.\n")
    assert called(capsys, "show", tmp_path / "w.pt", "--allow-pickle")[0] == 0


def test_a_checkpoint_is_converted_to_files_that_safetensors_reads(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = called(capsys, "convert", root / "checkpoint-00000003", tmp_path / "plain", "--to", "safetensors")
    assert (code, err) == (0, "") and out.startswith(f"{root / 'checkpoint-00000003'} is now {tmp_path / 'plain'}, in safetensors; ")
    found = load_file(tmp_path / "plain" / "model.safetensors")
    assert torch.equal(found["b"], torch.arange(7.0) + 3) and called(capsys, "show", tmp_path / "plain")[0] == 0
    code, _, err = called(capsys, "convert", root / "checkpoint-00000003", tmp_path / "x", "--to", "pickle")
    assert code == 2 and "zarr" in err and not (tmp_path / "x").exists()


def test_a_name_with_a_line_break_is_one_like_others_and_nothing_is_left_beside_it(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new, first = tmp_path / "new" / "a b\n\u202e\u00fc", root / "checkpoint-00000001"
    for number, command in enumerate(("copy", "convert")):
        code, out, err = called(capsys, command, first, f"{new}{number}")
        assert (code, err) == (0, "") and "a b\\n\\u202e\u00fc" in out
    assert called(capsys, "convert", first, f"{new}2", "--to", "safetensors")[0] == 0
    assert sorted(new.parent.iterdir()) == [new.with_name(f"{new.name}{number}") for number in range(3)]


def test_a_conversion_to_safetensors_and_back_has_another_order_and_the_same_tensors(tmp_path: Path) -> None:
    state = {"model": {"half": torch.ones(3, dtype=torch.float16), "whole": torch.ones(3), "long": torch.arange(3)}}
    ckpt.save(state, tmp_path / "old")
    assert run(["convert", str(tmp_path / "old"), str(tmp_path / "plain"), "--to", "safetensors"]) == 0
    assert run(["convert", str(tmp_path / "plain"), str(tmp_path / "back")]) == 0
    back = ckpt.load(tmp_path / "back")
    assert list(back) == ["long", "whole", "half"] and all(torch.equal(back[name], state["model"][name]) for name in back)


def test_show_leaves_a_page_where_a_file_is_given_for_it(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    for path in (root, root / "checkpoint-00000001"):
        code, out, err = called(capsys, "show", path, "--html", page)
        assert (code, err) == (0, "") and out.startswith(f"{page}: a page of {path}, ")
        assert "model/w" in page.read_text()
    page.unlink()
    code, out, _ = called(capsys, "show", root, "--html", page, "--json")
    assert code == 0 and len(json.loads(out)["checkpoints"]) == 3 and page.is_file()
    code, out, err = called(capsys, "show", root, "--html", tmp_path / "no" / "page.html")
    assert (code, out) == (2, "") and len(err.splitlines()) == 1


def test_two_runs_part_at_the_first_checkpoint_that_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = saved(tmp_path / "good"), saved(tmp_path / "bad", seed=1)
    code, out, _ = called(capsys, "bisect", good, bad)
    assert code == 1 and out.startswith("the runs differ at step 2, and are equal at step 1, the one before: 1 difference, in model\n")
    assert called(capsys, "bisect", good, good)[0] == 0 and called(capsys, "bisect", good, tmp_path)[0] == 2


def test_sizes_of_files_are_the_same_in_each_command(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = root / "checkpoint-00000001"
    (listed, *_), (shown, *_), (read, *_) = (
        json.loads(called(capsys, command, root, "--json")[1])["checkpoints"] for command in ("ls", "show", "verify")
    )
    (copied,) = json.loads(called(capsys, "copy", first, tmp_path / "copy", "--json")[1])["checkpoints"]
    assert listed["size_bytes"] == shown["size_bytes"] < shown["apparent_bytes"]
    assert read["num_bytes"] == copied["num_bytes"] == shown["apparent_bytes"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ls", "--beast", "x", "."], "there is no option --beast; did you mean --best or --greater?"),
        (["ls", "--limits", "."], "there is no option --limits"),
        (["shwo"], "no such command 'shwo'"),
        (["ls"], "missing argument 'PATH'"),
        (["show", ".", "--limit", "x"], "invalid value for '--limit': 'x' is not a valid integer"),
        (["ls", ""], "path is empty: expected the path of a folder, or an address; this folder is ."),
        (["bisect", "{first}", "{root}"], "{first} is a checkpoint, and no run: give the folder that it is in, or compare two "),
        (["bisect", "{file}", "{root}"], "{file} is no run: neither it nor its folder checkpoints holds a checkpoint; give the folder of "),
        (["copy", "{first}", "{file}"], "{file} is no folder; choose another path"),
        (["copy", "{root}", "{file}"], "{file} is no folder; choose another path"),
        (["copy", "{first}", "{first}/inner"], "{first}/inner is inside of {first}; choose a place outside of it"),
        (["copy", "{root}", "{root}/inner"], "{root}/inner is inside of {root}; choose a place outside of it"),
        (["convert", "{first}", "{first}/inner"], "{first}/inner is inside of {first}; choose a place outside of it"),
        (["copy", "s3://bucket/run", "s3://bucket/run/inner"], "s3://bucket/run/inner is inside of s3://bucket/run; choose "),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    names = {"root": root, "first": root / "checkpoint-00000001", "file": tmp_path / "file"}
    names["file"].write_text("x")
    before = sorted(tmp_path.rglob("*"))
    code, out, err = called(capsys, *(word.format(**names) for word in words))
    assert (code, out) == (2, "") and err.startswith(f"error: {said.format(**names)}") and err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_the_help_says_where_none_may_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    for command, option in {"copy": "--last INT|none", "show": "--limit INT|none", "convert": "--max-shard-size TEXT|none"}.items():
        assert option in called(capsys, command, "--help")[1]


def test_a_copy_that_is_interrupted_says_that_it_goes_on(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    words = "copy", root / "checkpoint-00000001", tmp_path / "new"
    with monkeypatch.context() as patched:
        patched.setattr(copying, "_require_same", interrupt)
        code, _, err = called(capsys, *words)
    assert code == 130 and err.strip() == "interrupted; the same command goes on from what is copied"
    code, out, _ = called(capsys, *words)
    assert code == 0 and "7 files, 6 files of them left by an earlier copy" in out


@pytest.mark.parametrize("locked", ["", "checkpoint-00000002/model"])
def test_where_one_may_not_write_nothing_is_removed_and_one_sentence_says_so(
    root: Path, another_user: None, capfd: pytest.CaptureFixture[str], locked: str
) -> None:
    closed(root / locked, 0o555)
    before = sorted(root.rglob("*"))
    code, out, err = called(capfd, "rm", "--yes", root / "checkpoint-00000001", root / "checkpoint-00000002")
    assert (code, out) == (2, "") and " cannot be removed: Permission denied: " in err and err.count("\n") == 1
    assert sorted(root.rglob("*")) == before


def test_a_damaged_checkpoint_whose_files_are_not_known_is_not_removed(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (root / "checkpoint-00000001" / MANIFEST_NAME).write_text("{")
    code, out, err = called(capfd, "rm", "--yes", root / "checkpoint-00000001")
    assert (code, out) == (1, "") and "rm cannot tell its files from yours" in err and err.count("\n") == 1
    assert (root / "checkpoint-00000001").is_dir()


def test_checkpoints_are_removed_when_it_is_said_so_and_no_others(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    beside = root / "checkpoint-00000001" / "mine.txt"
    beside.write_text("kept")
    code, out, err = called(capsys, "rm", root / "checkpoint-00000001", root / "checkpoint-00000002")
    assert (code, out) == (2, "") and err.startswith("error: remove 2 checkpoints, ") and err.endswith("give --yes\n")
    assert len(catalog_at(root).committed()) == 3
    assert called(capsys, "rm", "--yes", root / "checkpoint-00000001", root / "checkpoint-00000002")[0] == 0
    assert [one.id for one in catalog_at(root).committed()] == ["00000003"] and beside.read_text() == "kept"
    assert {path.name for path in root.iterdir() if path.name[0] != "."} == {"checkpoint-00000001", "checkpoint-00000003"}


def test_a_no_removes_nothing(root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removing, "_asked", lambda question: False)
    assert called(capsys, "rm", root / "checkpoint-00000001")[0] == 1 and (root / "checkpoint-00000001").is_dir()


def _save_and_live(root: Path, pipe: Connection) -> None:
    run = Checkpointer(root, model=torch.nn.Linear(2, 2))
    run.save(1)
    run.save(2)
    pipe.send("saved")
    pipe.recv()


def test_what_is_no_checkpoint_a_link_and_one_of_a_run_that_saves_are_not_removed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "notes").mkdir()
    (root / "link").symlink_to("checkpoint-00000001")
    for path, reason in {"notes": "is not a checkpoint", "link": "is a symbolic link", "no": "does not exist"}.items():
        code, _, err = called(capsys, "rm", "--yes", root / "checkpoint-00000002", root / path)
        assert code == 2 and reason in err
    other = root.parent / "other"
    here, there = forkserver().Pipe()
    living = forkserver().Process(target=_save_and_live, args=(other, there))
    living.start()
    assert here.recv() == "saved"
    first = catalog_at(other).committed()[0].path
    code, _, err = called(capsys, "rm", "--yes", first)
    here.send("go on")
    living.join(patience(60.0))
    assert code == 2 and "a run is saving in" in err and first.is_dir()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_the_code_of_its_completion(
    shell: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = called(capsys, "completion", shell)
    assert code == 0 and "_CKPT_COMPLETE" in out
    if shell == "bash":
        for name, value in {"COMP_WORDS": "ckpt ver", "COMP_CWORD": "1", "_CKPT_COMPLETE": "bash_complete"}.items():
            monkeypatch.setenv(name, value)
        assert "verify" in called(capsys)[1]


def test_a_reader_that_ends_is_no_error(root: Path) -> None:
    command = f"{sys.executable} -m ckpt show {root / 'checkpoint-00000001'} --all | head -1 > /dev/null; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("0\n", "")
