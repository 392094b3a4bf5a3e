"""The two commands that only read: what they print, what they exit with, and that they leave no trace."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckpt import StateComponent
from ckpt.cli import reading
from ckpt.cli.reading import committed_below
from ckpt.errors import CheckpointNotFoundError
from ckpt.format.manifest import MANIFEST_NAME
from ckpt.ranks.topology import Topology
from ckpt.saving.save_settings import SaveSettings
from tests.support.pages import parsed
from tests.support.states import Held, coordinator


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run") / "checkpoints"
    model = {
        "big[red]": torch.arange(60_000, dtype=torch.bfloat16).reshape(300, 200),
        "small\n": torch.arange(6).reshape(2, 3),
        "step": 3,
    }
    run = coordinator(Topology.alone(), root, [StateComponent("model", Held(model), "replicated")])
    for checkpoint_id in ("00000001", "00000002"):
        run.save_checkpoint(checkpoint_id=checkpoint_id)
    return root


@pytest.fixture
def root(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a root with two checkpoints, which a command is run beside, in an empty folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return shutil.copytree(saved, tmp_path / "run" / "checkpoints")


def run(monkeypatch: pytest.MonkeyPatch, recipe: str, *overrides: str) -> int:
    """Call a recipe as the command line would; return its exit code, and check that it wrote nothing where it ran."""
    monkeypatch.setattr(sys, "argv", [recipe, *overrides])
    try:
        importlib.import_module(f"recipes.{recipe}").main()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    assert list(Path.cwd().iterdir()) == []
    return code


def names(root: Path) -> list[str]:
    return sorted(str(path) for path in root.rglob("*"))


@pytest.mark.parametrize("recipe", ["verify", "inspect"])
def test_reading_leaves_no_trace(root: Path, monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    before = names(root)
    for path in (root, root / "checkpoint-00000001"):
        for json_only in ("false", "true"):
            assert run(monkeypatch, recipe, f"path={path}", f"json={json_only}") == 0
    assert names(root) == before


def test_verify_says_ok_with_counts_for_every_checkpoint_of_a_root(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "verify", f"path={root}") == 0
    out, err = capsys.readouterr()
    first, second = out.splitlines()
    num_files = sum(path.is_file() for path in (root / "checkpoint-00000001").rglob("*"))
    assert first.startswith(f"{root}/checkpoint-00000001: ok, {num_files} files, ")
    assert second.startswith(f"{root}/checkpoint-00000002: ok, ")
    assert err == ""


def test_verify_names_what_is_wrong_and_exits_with_1(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (chunk,) = (root / "checkpoint-00000002" / "model").glob("big*/c/0/0")
    chunk.write_bytes(bytes(chunk.stat().st_size))
    (root / "checkpoint-00000002" / "extra").write_text("x")
    assert run(monkeypatch, "verify", f"path={root}") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == [
        f"{root}/checkpoint-00000002: 2 problems",
        "  model: big[red]: bytes 0 to 120000 of model/big%5Bred%5D/c/0/0 are not those that were saved",
        "  extra does not belong to the checkpoint",
    ]
    assert run(monkeypatch, "verify", f"path={root}/checkpoint-00000001") == 0


def test_a_long_verify_says_how_fast_it_was_and_on_a_terminal_how_far_it_is(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read = reading.examine

    def slowly(path: Path, *, progress: Callable[[int], None]) -> object:
        found = read(path, progress=progress)
        time.sleep(0.2)
        return found

    monkeypatch.setattr(reading, "examine", slowly)
    monkeypatch.setattr(reading, "SHOWN_AFTER_S", 0.1)
    monkeypatch.setattr("ckpt.cli.progress.SHOWN_AFTER_S", 0.1)
    path = root / "checkpoint-00000001"
    said = re.compile(rf"{path}: ok, \d+ files, \d+ bytes, 0\.\d s, 0\.00 GB/s\n")
    assert run(monkeypatch, "verify", f"path={path}") == 0
    out, err = capsys.readouterr()
    assert said.fullmatch(out) and err == ""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert run(monkeypatch, "verify", f"path={path}") == 0
    out, err = capsys.readouterr()
    assert said.fullmatch(out) and "verify checkpoint-00000001" in err and "kB" in err


def test_verify_as_json_prints_only_json(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "checkpoint-00000002" / "extra").write_text("x")
    assert run(monkeypatch, "verify", f"path={root}", "json=true") == 1
    out, err = capsys.readouterr()
    tree = json.loads(out)
    assert err == ""
    assert tree["ok"] is False
    assert [one["problems"] for one in tree["checkpoints"]] == [[], ["extra does not belong to the checkpoint"]]


def test_a_damaged_manifest_is_a_sentence_in_both_commands(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = root / "checkpoint-00000002"
    (checkpoint / MANIFEST_NAME).write_text("{ nothing")
    for recipe, path in (("verify", root), ("verify", checkpoint), ("inspect", checkpoint)):
        assert run(monkeypatch, recipe, f"path={path}") == 1
        out, err = capsys.readouterr()
        assert "the manifest does not match its own digest" in out + err
        assert "Traceback" not in err
    assert run(monkeypatch, "inspect", f"path={root}", "json=true") == 1
    first, second = json.loads(capsys.readouterr().out)["checkpoints"]
    assert first["problem"] is None
    assert "does not match its own digest" in second["problem"]


def test_a_checkpoint_folder_without_manifest_is_a_problem_of_its_root(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "checkpoint-00000002" / MANIFEST_NAME).unlink()
    assert run(monkeypatch, "verify", f"path={root}") == 1
    assert f"  {root}/checkpoint-00000002 is not a checkpoint" in capsys.readouterr().out
    assert run(monkeypatch, "verify", f"path={root}/checkpoint-00000002") == 2
    assert "it has no checkpoint_manifest.json" in capsys.readouterr().err


@pytest.mark.parametrize("recipe", ["verify", "inspect"])
def test_a_path_that_is_neither_checkpoint_nor_root_is_one_sentence(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recipe: str
) -> None:
    other = root / "torch-dist"
    other.mkdir()
    (other / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    for given, said in (
        (f"path={other}", "is a torch_dist checkpoint of Megatron-Core"),
        (f"path={root}/nope", f"{root}/nope does not exist; give a checkpoint or a folder of checkpoints"),
        (
            f"path={root.parent}",
            f"{root.parent} is not a checkpoint: it has no {MANIFEST_NAME}; "
            f"it holds checkpoints/checkpoint-00000002, checkpoints/checkpoint-00000001; give {root}",
        ),
        (f"path={root}/checkpoint-00000001/{MANIFEST_NAME}", "is not a checkpoint"),
        ("json=true", "no path is given; add path="),
        ("json=maybe", "path"),
        (str(root), f"{root}: expected key=value, such as path={root}"),
        (f"pth={root}", "did you mean path?"),
    ):
        assert run(monkeypatch, recipe, given) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert said in err
        assert len(err.splitlines()) == 1


def test_inspect_lists_the_checkpoints_of_a_root_in_commit_order(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "inspect", f"path={root}") == 0
    out = capsys.readouterr().out
    assert 0 < out.index("checkpoint-00000001") < out.index("checkpoint-00000002")
    assert run(monkeypatch, "inspect", f"path={root}", "json=true") == 0
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [row["id"] for row in rows] == ["00000001", "00000002"]
    assert [row["num_arrays"] for row in rows] == [2, 2]
    assert rows[0]["timestamp"] < rows[1]["timestamp"]


def test_inspect_shows_components_and_arrays_with_names_as_they_are(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "inspect", f"path={root}/checkpoint-00000001") == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert any(line.startswith("model replicated rank 0 rank 0 2 120") for line in lines)
    assert any(
        line.startswith("model/big[red] bfloat16 300 x 200 120.0 kB zarr model/big%5Bred%5D by rank 0")
        for line in lines
    )
    assert "model/small\\n int64 2 x 3 48 bytes packed by rank 0" in lines


def test_inspect_as_json_gives_every_number_exactly(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "inspect", f"path={root}/checkpoint-00000001", "json=true") == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["components"]["model"]["sharing_pattern"] == "replicated"
    big, small = tree["arrays"]["model/big[red]"], tree["arrays"]["model/small\n"]
    assert (big["dtype"], big["shape"], big["size_bytes"], big["store"]) == ("bfloat16", [300, 200], 120_000, "zarr")
    assert (small["packed_in"], small["size_bytes"]) == ([0], 48)


def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *overrides: str) -> list[str]:
    assert run(monkeypatch, "inspect", *overrides) == 0
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines() if line.strip()]


def test_inspect_marks_the_newest_checkpoint_and_lists_as_many_as_limit_says(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = "checkpoint-00000001 ", "checkpoint-00000002 "
    for overrides, checkpoints, hint in (
        ((), [first, second], []),
        (("limit=2",), [first, second], []),
        (("limit=null",), [first, second], []),
        (("limit=1", "all=true"), [first, second], []),
        (("limit=1",), [second], ["1 more older checkpoint: give filter=<part of its name> or all=true to see it"]),
        (("filter='01'",), [first], ["filter=01 leaves out 1 of 2 checkpoints"]),
        (("filter=check", "limit=1"), [second], ["1 more older checkpoint: give all=true to see it"]),
    ):
        lines = shown(monkeypatch, capsys, f"path={root}", *overrides)
        rows = [line for line in lines if line.startswith("checkpoint-")]
        assert sum(line.startswith("the newest") for line in lines) == (second in checkpoints)
        assert not lines[lines.index(rows[0]) + 1].startswith("the newest") or checkpoints[0] == second
        assert len(rows) == len(checkpoints) and all(map(str.startswith, rows, checkpoints))
        assert [line for line in lines if "more" in line or "leaves" in line] == hint


def test_inspect_lists_the_arrays_that_filter_and_limit_choose(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = f"path={root}/checkpoint-00000001"
    lines = shown(monkeypatch, capsys, path, "limit=1")
    assert lines[-2].startswith("model/big[red] ")
    assert lines[-1] == "1 more array: give filter=<part of its name> or all=true to see it"
    lines = shown(monkeypatch, capsys, path, "filter=sma", "limit=1")
    assert lines[-2].startswith("model/small") and lines[-1] == "filter=sma leaves out 1 of 2 arrays"
    assert shown(monkeypatch, capsys, path, "filter=model", "limit=1")[-1] == "1 more array: give all=true to see it"
    for overrides in ((), ("limit=null",), ("limit=2",), ("limit=1", "all=true")):
        assert shown(monkeypatch, capsys, path, *overrides)[-1].startswith("model/small")
    for wanted in ("SMALL", "'model/s*'", "'*sm?ll*'"):
        assert shown(monkeypatch, capsys, path, f"filter={wanted}")[-2].startswith("model/small")
    (said,) = [line for line in shown(monkeypatch, capsys, path, "filter='s*'") if line.startswith("filter=")]
    assert said.startswith("filter=s* chooses none of 2 arrays; parts of their names: model, big[red], small")
    assert run(monkeypatch, "inspect", path, "limit=0") == 2
    assert "limit=0: expected at least 1, or limit=null for all" in capsys.readouterr().err


@pytest.fixture
def incremental(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root with three checkpoints: the second and third share a chunk with the first, which has room of its own, too."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    root = tmp_path / "checkpoints"
    state = {"frozen": torch.arange(100_000.0), "moving": torch.arange(50_000.0)}
    parts = [StateComponent("model", Held(state), "replicated")]
    run = coordinator(Topology.alone(), root, parts, saves=SaveSettings(incremental=True))
    for checkpoint_id in ("1", "2", "3"):
        state["moving"] += 1
        run.save_checkpoint(checkpoint_id=checkpoint_id)
    return root


def test_inspect_tells_what_checkpoints_share_from_what_removing_one_frees(
    incremental: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {
        (found.st_dev, found.st_ino): found.st_size
        for path in incremental.rglob("*")
        if path.is_file() and (found := path.stat())
    }
    assert run(monkeypatch, "inspect", f"path={incremental}", "json=true") == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["on_disk_bytes"] == sum(sizes.values())
    assert all(row["apparent_bytes"] - row["unique_bytes"] == 400_000 for row in tree["checkpoints"])
    assert all(200_000 < row["unique_bytes"] < 210_000 for row in tree["checkpoints"])
    assert run(monkeypatch, "inspect", f"path={incremental}/checkpoint-2", "json=true") == 0
    alone = json.loads(capsys.readouterr().out)
    assert {name: alone[name] for name in ("apparent_bytes", "unique_bytes")} == {
        name: tree["checkpoints"][1][name] for name in ("apparent_bytes", "unique_bytes")
    }
    assert run(monkeypatch, "inspect", f"path={incremental}") == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0].endswith("checkpoints: 3 checkpoints, the oldest commit first, 1.0 MB on disk")
    assert sum("600.0 kB 60" in line and "kB 20" in line for line in lines) == 3
    assert run(monkeypatch, "inspect", f"path={incremental}/checkpoint-1") == 0
    assert " kB of them its own" in " ".join(capsys.readouterr().out.split())
    shutil.rmtree(incremental / "checkpoint-1")
    shutil.rmtree(incremental / "checkpoint-3")
    assert run(monkeypatch, "inspect", f"path={incremental}", "json=true") == 0
    ((row,), on_disk) = (tree := json.loads(capsys.readouterr().out))["checkpoints"], tree["on_disk_bytes"]
    assert row["apparent_bytes"] == row["unique_bytes"] == on_disk


def test_verify_names_every_checkpoint_that_links_a_damaged_file(
    incremental: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with (incremental / "checkpoint-2/model/frozen/c/0").open("r+b") as chunk:
        chunk.write(b"\xff")
    assert run(monkeypatch, "verify", f"path={incremental}") == 1
    lines = capsys.readouterr().out.splitlines()
    for number in (1, 2, 3):
        others = ", ".join(f"checkpoint-{other}" for other in (1, 2, 3) if other != number)
        assert lines[3 * number - 3 : 3 * number] == [
            f"{incremental}/checkpoint-{number}: 1 problem",
            "  model: frozen: bytes 0 to 400000 of model/frozen/c/0 are not those that were saved",
            f"  damaged files are shared with {others}",
        ]
    assert run(monkeypatch, "verify", f"path={incremental}/checkpoint-3", "json=true") == 1
    (one,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert one["damage_shared_with"] == [f"{incremental}/checkpoint-{number}" for number in (1, 2)]


def test_a_checkpoint_of_megatron_core_is_told_apart_from_none_and_the_way_on_is_said() -> None:
    folder = Path(__file__).parents[1] / "golden" / "megatron" / "tp2"
    with pytest.raises(CheckpointNotFoundError, match=r"python -m recipes\.convert src=.*tp2 dst="):
        committed_below(folder)


@pytest.mark.parametrize("recipe", ["verify", "inspect"])
def test_a_checkpoint_removed_while_it_is_read_is_passed_over_or_called_gone(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recipe: str
) -> None:
    first = root / "checkpoint-00000001"
    name = "examine" if recipe == "verify" else "read_manifest"
    read = getattr(reading, name)

    def removed_meanwhile(path: Path, **options: object) -> object:
        if path == first and (path / "model").exists():
            shutil.move(path, root.parent / "away")
        return read(path, **options)

    monkeypatch.setattr(reading, name, removed_meanwhile)
    assert run(monkeypatch, recipe, f"path={root}", "json=true") == 0
    (one,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert one["path"].endswith("checkpoint-00000002")
    shutil.move(root.parent / "away", first)
    assert run(monkeypatch, recipe, f"path={first}") == 2
    assert f"{first} was removed or replaced while it was read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "keys"),
    [
        ("inspect", ["path=s3://b/x", "html=s3://b/x.html"]),
    ],
)
def test_the_address_of_an_object_store_is_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recipe: str, keys: list[str]
) -> None:
    assert run(monkeypatch, recipe, *keys) == 2
    assert "html is s3://b/x.html: expected a folder of a mounted file system here" in capsys.readouterr().err


def test_inspect_leaves_a_page_of_a_checkpoint(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, target, before = root / "checkpoint-00000001", root.parent / "out.html", names(root)
    assert run(monkeypatch, "inspect", f"path={checkpoint}", f"html={target}") == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{target}: a page of {checkpoint}, ") and len(out.splitlines()) == 1 and err == ""
    assert run(monkeypatch, "inspect", f"path={checkpoint}", f"html={target}", "json=true") == 0
    tree = json.loads(capsys.readouterr().out)
    rows = parsed(target.read_text()).rows("tensors")
    assert {row["tensor"].text: row["size"].attributes["data-value"] for row in rows} == {
        name.replace("\n", "\\n"): str(array["size_bytes"]) for name, array in tree["arrays"].items()
    }
    assert names(root) == before


def test_inspect_leaves_a_page_of_a_folder_with_its_commits_and_shared_bytes(
    incremental: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = incremental.parent / "out.html"
    assert run(monkeypatch, "inspect", f"path={incremental}", f"html={target}", "json=true") == 0
    tree = json.loads(capsys.readouterr().out)
    found = parsed(target.read_text())
    rows = found.rows("checkpoints")
    assert [row["checkpoint"].text for row in rows] == ["checkpoint-1", "checkpoint-2", "checkpoint-3 newest"]
    for row, one in zip(rows, tree["checkpoints"], strict=True):
        assert row["size"].attributes["data-value"] == str(one["apparent_bytes"])
        assert row["freed"].attributes["data-value"] == str(one["unique_bytes"])
    new = [int(row["new"].attributes["data-value"] or 0) for row in rows]
    assert sum(new) == tree["on_disk_bytes"] and new[0] == tree["checkpoints"][0]["apparent_bytes"]
    shared = [cell.attributes["data-value"] for cell in found.by_id("shared").all("td", "heat")]
    assert shared == ["400000"] * 3
    (timeline,) = found.all("div", "timeline")
    tips = [str(one.attributes["data-tip"]).splitlines() for one in timeline.all("i")]
    assert [tip[0] for tip in tips] == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert found.all("h2", "part")[0].text == "The newest: checkpoint-3" and len(found.rows("tensors")) == 2


def test_a_damaged_checkpoint_is_a_row_of_the_page_and_the_newest_whole_one_is_shown(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "checkpoint-00000002" / MANIFEST_NAME).write_text("<b>{ nothing")
    target = root.parent / "out.html"
    assert run(monkeypatch, "inspect", f"path={root}", f"html={target}") == 0
    found = parsed(target.read_text())
    first, second = found.rows("checkpoints")
    assert first["tensors"].text == "2" and second["ranks"].text.startswith("damaged: ")
    assert "does not match its own digest" in second["ranks"].text
    assert found.all("h2", "part")[0].text == "The newest: checkpoint-00000001"
    assert run(monkeypatch, "inspect", f"path={root}/checkpoint-00000002", f"html={target}") == 1


def test_a_page_that_cannot_be_written_is_one_sentence(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = root.parent / "notes.html"
    notes.write_text("mine")
    before = names(root)
    for given, said in (
        (f"html={notes}", "notes.html exists and is not a page of this command; remove it, or give another path"),
        (f"html={root}/checkpoint-00000001/out.html", "a checkpoint holds no other files"),
        (f"html={root}", "is a folder"),
        (f"html={root.parent}/no/out.html", "does not exist"),
        ("html=s3://b/out.html", "expected a folder of a mounted file system here"),
        ("htm=out.html", "did you mean html?"),
    ):
        assert run(monkeypatch, "inspect", f"path={root}", given) == 2
        out, err = capsys.readouterr()
        assert out == "" and said in err and len(err.splitlines()) == 1
    assert run(monkeypatch, "inspect", f"path={root.parent}/nope", f"html={root.parent}/out.html") == 2
    assert names(root) == before and notes.read_text() == "mine" and not (root.parent / "out.html").exists()
