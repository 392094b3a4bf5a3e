"""The commands on an address: a run on ranks saves, goes on, and its checkpoints are read, converted and compared, in an object store."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckpt.format.places import ObjectPath
from ckpt.storage.objects.store import store_of
from tests.e2e.one_by_one import Said, one_by_one
from tests.e2e.runs import REPO, SMALL
from tests.support.object_server import ObjectServer
from tests.support.pace import patience

ROOT = "s3://bucket/run"


@pytest.fixture(scope="module", params=["one by one", pytest.param("typed", marks=pytest.mark.full)])
def how(request: pytest.FixtureRequest) -> str:
    """How commands are run: by one process, or by one each."""
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def server(how: str) -> Iterator[ObjectServer]:
    with ObjectServer() as server, server.used():
        yield server


class Command:
    """Runs commands in a folder of their own, as a user would."""

    def __init__(self, folder: Path, run: Callable[..., Said]) -> None:
        self.folder, self._run = folder, run

    def __call__(self, recipe: str, *keys: str, fails: bool = False) -> str:
        code, out, err = self._run(f"recipes.{recipe}", *keys)
        assert (code != 0) == fails, out + err
        assert "a-secret" not in out + err
        return err if fails else out

    def train(self, name: str, *keys: str) -> dict[str, Any]:
        self("train", f"output_dir={self.folder / name}", "save.every=3", *SMALL, *keys)
        found: dict[str, Any] = json.loads((self.folder / name / "summary.json").read_bytes())
        return found


@pytest.fixture(scope="module")
def command(how: str, server: ObjectServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    folder = tmp_path_factory.mktemp("commands")

    def typed(module: str, *keys: str) -> Said:
        words = [sys.executable, "-m", module, *keys]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=patience(120.0))
        return Said(done.returncode, done.stdout, done.stderr)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(REPO))
        if how == "typed":
            yield Command(folder, typed)
            return
        with one_by_one(folder, tmp_path_factory.mktemp("said")) as run:
            yield Command(folder, run)


def test_a_run_goes_on_in_another_layout_to_the_bit_and_its_checkpoints_are_read(command: Command, server: ObjectServer) -> None:
    on_two = "parallel=fsdp", "launch.nproc_per_node=2"
    whole = command.train("whole", "train.steps=9", *on_two)
    first = command.train("first", "train.steps=6", *on_two, f"checkpoint_root={ROOT}", "ckpt=tensorstore", "save.mode=async")
    server.forget()
    go_on = f"checkpoint_root={ROOT}", "ckpt=zarr", "resume=latest", "strategy=two-stage"
    second = command.train("second", "train.steps=9", *on_two, *go_on)
    assert second["state_digest"] == whole["state_digest"] and second["losses"] == whole["losses"][6:]
    assert second["requests"]["get"]["bytes"] > second["bytes_read"] / 2 and "put" not in second["requests"]
    written = first["checkpoints"][-1]
    assert written["requests"]["put"]["bytes"] >= written["bytes"] > 0 < written["requests"]["list"]["requests"]
    assert second["resumed_from"] == f"{ROOT}/checkpoint-00000006" == first["checkpoints"][-1]["path"]
    refused = command("train", "output_dir=third", *SMALL, f"checkpoint_root={ROOT}", "train.steps=3", fails=True)
    assert "holds the checkpoints of an earlier run" in refused

    verified = json.loads(command("verify", f"path={ROOT}", "json=true"))
    assert verified["ok"] and len(verified["checkpoints"]) == 3
    inspected = json.loads(command("inspect", f"path={ROOT}", "json=true"))
    assert [one["id"] for one in inspected["checkpoints"]] == ["00000003", "00000006", "00000009"]
    for at in (ROOT, f"{ROOT}/checkpoint-00000009"):
        command("inspect", f"path={at}", "html=page.html")
        assert f"{at}<" in (command.folder / "page.html").read_text()
    other = "parallel=tp_fsdp", "launch.nproc_per_node=4"
    assert "It would load." in command("plan", f"checkpoint={ROOT}/checkpoint-00000009", *SMALL, *other)

    newest = f"{ROOT}/checkpoint-00000009"
    command("convert", f"src={newest}", "dst=s3://bucket/converted", "to=kimi-engine", "launch.nproc_per_node=2")
    command("convert", "src=s3://bucket/converted", "dst=here", "to=tensorstore")
    command("convert", "src=here", "dst=s3://bucket/again", "to=zarr")
    for other in ("s3://bucket/converted", "here", "s3://bucket/again"):
        assert "are equal" in command("diff", f"a={newest}", f"b={other}")
    assert "writes folders alone" in command("convert", f"src={newest}", "dst=s3://bucket/x", "to=safetensors", fails=True)

    of_newest = [one.data for key, one in server.objects["bucket"].items() if "run/checkpoint-00000009" in key]
    max(of_newest, key=len)[100] ^= 1
    third = command.train("fourth", "train.steps=9", "parallel=ddp", "launch.nproc_per_node=2", f"checkpoint_root={ROOT}", "resume=latest")
    assert third["resumed_from"] == f"{ROOT}/checkpoint-00000006" and third["fell_back_from"] == [newest]
    assert "quarantined-" in "".join(server.keys())


@pytest.mark.full
def test_what_other_programs_wrote_is_inspected_verified_and_converted(command: Command, server: ObjectServer) -> None:
    hub = command.folder / "hub"
    hub.mkdir()
    save_file({"w": torch.randn(300, 200), "b": torch.arange(7)}, hub / "model.safetensors")
    store_of(ObjectPath("s3", "bucket")).put("hub/model.safetensors", (hub / "model.safetensors").read_bytes())
    assert "safetensors" in command("inspect", "path=s3://bucket/hub")
    assert "no digests: nothing to verify" in command("verify", "path=s3://bucket/hub")
    command("convert", "src=s3://bucket/hub", "dst=s3://bucket/from-hub", "to=zarr")
    assert "are equal" in command("diff", "a=s3://bucket/from-hub", "b=hub")


def test_a_store_that_does_not_answer_ends_a_run_in_one_sentence(command: Command) -> None:
    said = command("train", "output_dir=gone", "checkpoint_root=s3://gone/run", "train.steps=3", fails=True)
    assert said.strip() == "checkpoint root s3://gone/run cannot be read: there is no such bucket: 's3://gone'"
