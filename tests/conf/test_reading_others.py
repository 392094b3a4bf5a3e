"""`inspect` and `verify` read what `ckpt.load`, `diff` and `convert` read, by any name; where there are no digests, they say so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpt
from tests.conf.test_reading import run
from tests.golden.megatron.truth import FOLDER
from tests.support.covering import sampled
from tests.support.dcp_runs import save_by_dcp

STATE: dict[str, Any] = {"w": torch.arange(6.0).reshape(2, 3), "list": [torch.ones(2)], "step": 7}
NAMES = ("epoch=3-step=10.ckpt", "with space", "ünïcode", "[x]", "a,b", "(1)", "x{y}", "a#b", "$x", "~x", "it's", "1e3")


def _hugging_face(path: Path) -> None:
    path.mkdir()
    (path / "config.json").write_text("{}")
    save_file({"w": STATE["w"]}, path / "model.safetensors")


def _old(path: Path) -> None:
    path.mkdir()
    torch.save({"w": STATE["w"]}, path / "model_state.pt")
    torch.save({"step": 7}, path / "rng_state_rank_0.pt")


def _lightning(path: Path) -> None:
    from lightning import LightningModule, Trainer  # which takes seconds, in each worker

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(STATE["w"].clone())

        def training_step(self, batch: Any) -> torch.Tensor:
            return self.w.sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    options = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "enable_progress_bar": False,
    }
    trainer = Trainer(accelerator="cpu", max_steps=0, **options)  # type: ignore[arg-type]
    trainer.fit(Model(), torch.utils.data.DataLoader([0]))
    trainer.save_checkpoint(path)


OTHERS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "torch.save": (lambda path: torch.save(STATE, path), "torch", "w"),
    "DCP": (lambda path: save_by_dcp(STATE, path), "dcp", "w"),
    "safetensors": (lambda path: save_file({"w": STATE["w"]}, f"{path}"), "safetensors", "w"),
    "a folder of Hugging Face's": (_hugging_face, "safetensors", "w"),
    "an old folder": (_old, "files of torch.save", "model/w"),
    "Lightning's": (_lightning, "torch", "state_dict.w"),
}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", OTHERS)
def test_another_program_s_checkpoint_is_shown_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    save, kind, name = OTHERS[case]
    path = tmp_path / "epoch=3-step=10.ckpt"
    save(path)
    given = f"path={path}", "load.allow_pickle=true"
    capsys.readouterr()
    assert run(monkeypatch, "inspect", *given) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0].startswith(f"{path}: {kind}, ") and "no digests" in lines[0]
    assert f"{name} float32 2 x 3 24 bytes" in lines
    assert run(monkeypatch, "inspect", *given, "json=true") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["format"] == kind and shown["arrays"][name]["shape"] == [2, 3]
    assert run(monkeypatch, "verify", *given) == 0
    assert f"{path}: {kind} has no digests: nothing to verify; " in capsys.readouterr().out
    assert run(monkeypatch, "verify", *given, "json=true") == 0
    (row,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert row["problems"] == [] and row["digests"] is False and row["num_bytes"] >= 24
    if "safetensors" not in kind:
        for command in ("inspect", "verify"):
            assert run(monkeypatch, command, f"path={path}") == 2
            assert "load.allow_pickle=true" in capsys.readouterr().err
    page = tmp_path / "page.html"
    assert run(monkeypatch, "inspect", *given, f"html={page}") == 2
    assert "a page shows a checkpoint of this project" in capsys.readouterr().err and not page.exists()


def test_megatron_core_s_zarr_is_shown_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "iter_0000100"
    shutil.copytree(FOLDER / "tp2", path)
    assert run(monkeypatch, "inspect", f"path={path}", "json=true") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["format"] == "Megatron-Core's zarr" and "folder/of/weight" in shown["arrays"]
    assert run(monkeypatch, "verify", f"path={path}") == 0
    assert "no digests: nothing to verify" in capsys.readouterr().out
    next(file for file in (path / "folder/of/weight").iterdir() if file.name[0].isdigit()).unlink()
    assert run(monkeypatch, "verify", f"path={path}") == 1
    assert "folder/of/weight" in capsys.readouterr().out


def test_what_is_missing_of_another_program_s_checkpoint_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_by_dcp(STATE, tmp_path / "dcp")
    (tmp_path / "dcp" / "__0_0.distcp").unlink()
    assert run(monkeypatch, "verify", f"path={tmp_path}/dcp", "load.allow_pickle=true", "json=true") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False and any("__0_0.distcp is missing" in one for one in found["checkpoints"][0]["problems"])
    assert run(monkeypatch, "verify", f"path={tmp_path}/dcp", "load.allow_pickle=true") == 1
    assert "problem" in capsys.readouterr().out


@sampled("name", NAMES, 6)
def test_a_path_is_taken_as_it_was_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = tmp_path / name
    ckpt.save(STATE, path)
    for command in ("inspect", "verify"):
        assert run(monkeypatch, command, f"path={path}") == 0
        assert capsys.readouterr().out.startswith(f"{path}: ")
    assert run(monkeypatch, "diff", f"a={path}", f"b={path}") == 0
    assert run(monkeypatch, "convert", f"src={path}", f"dst={path}.pt", "to=torch") == 0
    assert torch.equal(torch.load(f"{path}.pt")["w"], STATE["w"])


def test_a_bare_path_with_an_equals_sign_is_told_its_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for given, said in (
        ("/x/epoch=3.ckpt", "/x/epoch=3.ckpt: expected key=value, such as path=/x/epoch=3.ckpt\n"),
        ("filter=a=b", "in quotes a value, or each of a sweep, is taken as it is: \"filter='a=b'\"\n"),
    ):
        assert run(monkeypatch, "inspect", given) == 2
        assert capsys.readouterr().err.endswith(said)
