"""Retention by component: older checkpoints keep the weights without the optimizer, and say so wherever they are met."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import CheckpointCoordinator, Checkpointer, StateComponent
from ckpt.backends.tensorstore import TensorStoreBackend
from ckpt.catalog.catalog import catalog_at
from ckpt.catalog.copying import copy_checkpoint
from ckpt.catalog.retention import Retention
from ckpt.catalog.verify import verify_checkpoint
from ckpt.cli.main import run
from ckpt.errors import CheckpointGoneError, ConfigurationError, CorruptCheckpointError, MissingStateError
from ckpt.format.digests import digest_of
from ckpt.format.manifest import MANIFEST_NAME, closing
from ckpt.format.places import ObjectPath, Place, place_of
from ckpt.loading.sources import CommittedSource
from ckpt.ranks.topology import Topology
from ckpt.storage.objects import store as stores
from ckpt.storage.stored import read_manifest
from tests.support.object_server import ObjectServer
from tests.support.ranks import run_ranks
from tests.support.states import Held

FORMATS = {"zarr": "zarr", "tensorstore": TensorStoreBackend(kvstore="file"), "kimi-engine": "kimi-engine"}
OS_CALLS = ("rename", "replace", "unlink", "rmdir", "mkdir", "utime", "fsync")


@pytest.fixture(params=["folder", "store"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path / "checkpoints")
        return
    with ObjectServer() as server, server.used():
        yield "s3://bucket/run"


class Loop:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(300, 100), torch.nn.Linear(100, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.bits: dict[int, torch.Tensor] = {}

    def checkpoints(self, root: str, **options: Any) -> Checkpointer:
        objects = {"model": self.model, "optimizer": self.optimizer} | options
        return Checkpointer(root, **{"on_sigterm": False, "save_at_end": False} | objects)

    def save(self, checkpoints: Checkpointer, *steps: int) -> None:
        for step in steps:
            self.model(torch.ones(300)).sum().backward()
            self.optimizer.step()
            self.bits[step] = self.model[0].weight.detach().clone()
            checkpoints.save(step)
        checkpoints.wait()

    def run(self, root: str, *steps: int, **options: Any) -> None:
        with self.checkpoints(root, **{"keep_last_of": {"optimizer": 1}} | options) as checkpoints:
            checkpoints.restore()
            self.save(checkpoints, *steps)


def at(root: str, step: int) -> Place:
    return place_of(f"{root}/checkpoint-{step:08d}")


def removed(root: str) -> dict[int, tuple[str, ...]]:
    """Step -> what its manifest, and the catalog, say was taken out."""
    found = {int(one.id): one for one in catalog_at(place_of(root)).committed()}
    assert all(tuple(read_manifest(one.path).removed) == one.removed for one in found.values())
    return {step: one.removed for step, one in found.items()}


def files_of(place: Place) -> list[str]:
    if isinstance(place, ObjectPath):
        return [one.key for one in stores.store_of(place).below(place.key)]
    return [str(path) for path in place.rglob("*") if path.is_file()]


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_older_checkpoints_keep_weights_alone(root: str, format: Any, mode: str) -> None:
    loop = Loop()
    loop.run(root, 1, 2, 3, 4, 5, format=format, mode=mode, keep_last=4, keep_last_of={"optimizer": 2})
    assert removed(root) == {2: ("optimizer",), 3: ("optimizer",), 4: (), 5: ()}
    assert [any("/optimizer/" in path for path in files_of(at(root, step))) for step in (2, 3, 4, 5)] == [False, False, True, True]
    for step in (2, 3, 4, 5):
        assert verify_checkpoint(at(root, step)) == []
    with loop.checkpoints(root, optimizer=None, overwrite=True) as weights:
        assert [one.removed for one in weights.list()] == [("optimizer",), ("optimizer",), (), ()]
        assert weights.restore() == 5
        assert weights.restore(2).path == at(root, 2)
    assert torch.equal(loop.model[0].weight, loop.bits[2])


def test_a_resume_from_one_is_refused_by_a_sentence_that_names_the_newest_complete_one(root: str) -> None:
    loop = Loop()
    loop.run(root, 1, 2, 3)
    before = loop.model[0].weight.detach().clone()
    with loop.checkpoints(root) as checkpoints:
        with pytest.raises(MissingStateError) as caught:
            checkpoints.restore(1)
        assert "optimizer was removed from checkpoint-00000001 by retention, and the newest complete one is checkpoint-00000003" in str(
            caught.value
        )
        assert torch.equal(loop.model[0].weight, before), "nothing was loaded"
        assert "optimizer: skipped: was removed from checkpoint-00000001 by retention" in checkpoints.restore(1, strict=False).summary()
    catalog_at(place_of(root)).remove(at(root, 3))
    with loop.checkpoints(root) as checkpoints:
        with pytest.raises(MissingStateError, match="and none that goes on from it is complete"):
            checkpoints.restore(1)
        with pytest.raises(MissingStateError, match="is incomplete: optimizer was removed from checkpoint-00000002 by retention; "):
            checkpoints.restore(strict=False)


@pytest.mark.parametrize("kept", [1, 2])
def test_after_damage_of_the_newest_an_incomplete_one_is_passed_over(tmp_path: Path, kept: int) -> None:
    loop, root = Loop(), str(tmp_path)
    loop.run(root, 1, 2, keep_last_of={"optimizer": 1})
    loop.run(root, 3, keep_last_of={"optimizer": kept})
    (tmp_path / "checkpoint-00000003" / "model" / "0.weight" / "c" / "0" / "0").write_bytes(b"")
    with loop.checkpoints(root, overwrite=True) as checkpoints:
        if kept == 2:
            assert checkpoints.restore(strict=False) == 2
            return
        with pytest.raises(CorruptCheckpointError, match="is damaged or incomplete: .*; optimizer was removed from checkpoint-00000002"):
            checkpoints.restore(strict=False)


def test_a_run_that_goes_on_takes_out_of_its_history_and_of_no_other_run(root: str) -> None:
    loop = Loop()
    loop.run(root, 1, 2, keep_last_of=None)
    with Loop().checkpoints(root, shared_root=True, keep_last_of={"optimizer": 1}) as other:
        Loop().save(other, 7)
        other.restore(7)
    assert removed(root) == {1: (), 2: (), 7: ()}
    with loop.checkpoints(root, shared_root=True, keep_last_of={"optimizer": 1}) as checkpoints:
        checkpoints.restore(2)
        loop.save(checkpoints, 3)
    assert removed(root) == {1: ("optimizer",), 2: ("optimizer",), 7: (), 3: ()}
    assert all(verify_checkpoint(one.path) == [] for one in catalog_at(place_of(root)).committed())


@pytest.mark.parametrize("format", ["zarr", "kimi-engine"])
def test_files_that_an_incremental_save_has_linked_stay_in_the_newer_checkpoint(tmp_path: Path, format: str) -> None:
    held = {key: Held({"w": torch.arange(70_000.0)}) for key in ("model", "optimizer")}
    options: dict[str, Any] = {"format": format, "incremental": True, "keep_last_of": {"optimizer": 1}}
    with Checkpointer(tmp_path, **held, **options, on_sigterm=False, save_at_end=False) as checkpoints:
        checkpoints.save(1)
        saved_ns = (tmp_path / "checkpoint-00000001" / MANIFEST_NAME).stat().st_mtime_ns
        for step in (2, 3):
            checkpoints.save(step)
    assert (tmp_path / "checkpoint-00000001" / MANIFEST_NAME).stat().st_mtime_ns == saved_ns, "by which the newest is named"
    assert removed(str(tmp_path)) == {1: ("optimizer",), 2: ("optimizer",), 3: ()}
    assert [verify_checkpoint(at(str(tmp_path), step)) for step in (1, 2, 3)] == [[], [], []]
    with Checkpointer(tmp_path, **held, on_sigterm=False) as checkpoints:
        held["optimizer"].state["w"].zero_()
        assert checkpoints.restore() == 3
    assert torch.equal(held["optimizer"].state["w"], torch.arange(70_000.0))


def test_a_load_under_way_says_that_the_checkpoint_was_replaced_and_not_that_it_is_damaged(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop()
    loop.run(root, 1, 2, keep_last_of=None)
    check = CommittedSource.check

    def removing(self: CommittedSource, optional: Any) -> Any:
        monkeypatch.setattr(CommittedSource, "check", check)
        run = read_manifest(at(root, 2)).run_id
        catalog = catalog_at(place_of(root), saves_as=run, keep_last=Retention(keep_last_of={"optimizer": 1}))
        catalog.committed()
        catalog.retain(keep=at(root, 2))
        return check(self, optional)

    monkeypatch.setattr(CommittedSource, "check", removing)
    with loop.checkpoints(root) as checkpoints, pytest.raises(CheckpointGoneError, match="it is not damaged. Read a newer one"):
        checkpoints.restore(1)
    assert removed(root) == {1: ("optimizer",), 2: ()}


class Killed(BaseException):
    pass


def killing(step: Callable[..., Any], left: list[int], of: Callable[..., bool]) -> Callable[..., Any]:
    def counted(*args: Any, **options: Any) -> Any:
        if of(*args):
            if left[0] == 0:
                raise Killed
            left[0] -= 1
        return step(*args, **options)

    return counted


def saved_until_killed(loop: Loop, root: str, after: int) -> bool:
    """Save steps 1 and 2; the process dies in the retention of the second, before its change number `after`. False: it does not die."""
    left = [after]
    catalog = type(catalog_at(place_of(root)))
    retain = catalog.retain

    def interrupted(self: Any, **options: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            for name in OS_CALLS if root.startswith("/") else ():
                patch.setattr(os, name, killing(getattr(os, name), left, lambda *_: True))
            for name in ("put", "replace", "delete") if not root.startswith("/") else ():
                patch.setattr(stores.Store, name, killing(getattr(stores.Store, name), left, lambda *_: True))
            return retain(self, **options)

    checkpoints = loop.checkpoints(root, keep_last_of={"optimizer": 1})
    loop.save(checkpoints, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalog, "retain", interrupted)
        try:
            loop.save(checkpoints, 2)
        except Killed:
            return True
        finally:
            checkpoints.coordinator.__exit__(Killed, Killed(), None)
    return False


@pytest.mark.parametrize("format", ["zarr", pytest.param("kimi-engine", marks=pytest.mark.full)])
def test_whoever_is_killed_leaves_a_sound_checkpoint_and_the_next_save_finishes(root: str, format: str, tmp_path: Path) -> None:
    for after in range(60):
        loop, here = Loop(), f"{root}/{after}"
        if root.startswith("/"):
            Path(here).mkdir(parents=True)
        was_killed = saved_until_killed(loop, here, after)
        assert removed(here) in ({1: (), 2: ()}, {1: ("optimizer",), 2: ()})
        odd = [problem for problem in verify_checkpoint(at(here, 1)) if not problem.endswith(" does not belong to the checkpoint")]
        assert odd == [] and verify_checkpoint(at(here, 2)) == []
        is_whole = not removed(here)[1]
        with loop.checkpoints(here, **({} if is_whole else {"optimizer": None})) as checkpoints:
            assert checkpoints.restore(1).path == at(here, 1)
        assert torch.equal(loop.model[0].weight, loop.bits[1])
        with loop.checkpoints(here, keep_last_of={"optimizer": 1}) as checkpoints:
            checkpoints.restore()
            loop.save(checkpoints, 3)
        found = removed(here)
        assert {key for step, keys in found.items() if step != 3 for key in keys} == {"optimizer"} and found[3] == ()
        assert all(verify_checkpoint(one.path) == [] for one in catalog_at(place_of(here)).committed())
        assert not any("/optimizer/" in path for path in files_of(at(here, 1)))
        assert not any(".removed-" in path or ".attempt-" in path for path in files_of(place_of(here)))
        if not was_killed:
            assert after > 3
            return
    raise AssertionError("a removal that never ends")


def test_a_store_keeps_what_another_process_has_changed_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    with ObjectServer() as server, server.used():
        root, loop = "s3://bucket/run", Loop()
        manifest = "run/checkpoint-00000001/checkpoint_manifest.json"
        with loop.checkpoints(root, keep_last_of={"optimizer": 1}) as checkpoints:
            loop.save(checkpoints, 1)
            replace, tried = stores.Store.replace, []

            def changed(self: Any, key: str, data: bytes, tag: Any) -> Any:
                if key == manifest and not tried:
                    tried.append(key)
                    stores.Store.put(self, key, bytes(server.objects["bucket"][key].data))  # another version of the same bytes
                return replace(self, key, data, tag)

            monkeypatch.setattr(stores.Store, "replace", changed)
            loop.save(checkpoints, 2)
            assert tried and removed(root) == {1: (), 2: ()}
            loop.save(checkpoints, 3)
        assert removed(root) == {1: ("optimizer",), 2: ("optimizer",), 3: ()}
        assert all(verify_checkpoint(at(root, step)) == [] for step in (1, 2, 3))


def test_a_put_whose_answer_was_lost_took_the_component_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with ObjectServer() as server, server.used():
        root, loop, lost = "s3://bucket/run", Loop(), list[int]()

        def fault(number: int, operation: str, key: str) -> str | None:
            if operation == "put" and key.endswith("checkpoint-00000001/checkpoint_manifest.json") and not lost:
                lost.append(number)
                return "lost"
            return None

        with loop.checkpoints(root, keep_last_of={"optimizer": 1}) as checkpoints:
            loop.save(checkpoints, 1)
            server.fault = fault
            loop.save(checkpoints, 2)
        assert lost and removed(root) == {1: ("optimizer",), 2: ()}
        assert verify_checkpoint(at(root, 1)) == []
        assert not any(".attempt-" in path or "00001/optimizer/" in path for path in files_of(place_of(root)))


def test_settings_that_can_do_nothing_are_refused_at_once(tmp_path: Path) -> None:
    bad = {"optimzer": "there is no component 'optimzer'; did you mean optimizer", "optimizer": "expected a dictionary"}
    for given, told in (({"optimzer": 1}, bad["optimzer"]), ({"optimizer": 0}, bad["optimizer"])):
        with pytest.raises(ConfigurationError, match=told):
            Loop().checkpoints(str(tmp_path), keep_last_of=given)
    with pytest.raises(ConfigurationError, match="holds all components: save with kvstore=file, or as zarr"):
        Loop().checkpoints(str(tmp_path), format="tensorstore", keep_last_of={"optimizer": 1})
    assert list(tmp_path.iterdir()) == []


def test_a_database_of_a_former_run_keeps_all_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop, root = Loop(), str(tmp_path)
    loop.run(root, 1, format="tensorstore", keep_last_of=None)
    loop.run(root, 2, 3)
    assert removed(root) == {1: (), 2: ("optimizer",), 3: ()}
    assert caplog.text.count("optimizer stays in") == 1
    assert verify_checkpoint(at(root, 1)) == []


@pytest.mark.parametrize("bad", [[], ["model"], ["a", "a"], ["../x"], "optimizer", [1]])
def test_a_manifest_that_lies_about_what_was_removed_is_damaged(tmp_path: Path, bad: Any) -> None:
    loop = Loop()
    loop.run(str(tmp_path), 1, 2)
    manifest = tmp_path / "checkpoint-00000001" / MANIFEST_NAME
    assert b'\n  "removed": ["optimizer"],\n' in manifest.read_bytes()
    body = manifest.read_bytes().replace(b'["optimizer"],\n', f"{json.dumps(bad)},\n".encode(), 1)[: -len(closing("0" * 32))]
    manifest.write_bytes(body + closing(digest_of(body)))
    with pytest.raises(CorruptCheckpointError):
        read_manifest(manifest.parent)


def test_metadata_that_looks_like_it_takes_nothing_out(tmp_path: Path) -> None:
    with Loop().checkpoints(str(tmp_path)) as checkpoints:
        checkpoints.save(1, metadata={"removed": ["optimizer"]})
        assert removed(str(tmp_path)) == {1: ()} and checkpoints.restore() == 1


def test_commands_say_that_it_is_incomplete(root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop = Loop()
    loop.run(root, 1, 2)
    one = str(at(root, 1))

    def said(*words: str, code: int = 0) -> str:
        assert run([*words]) == code
        return capsys.readouterr().out

    assert "without optimizer" in said("ls", root).splitlines()[2]
    assert [row["removed"] for row in json.loads(said("ls", root, "--json"))["checkpoints"]] == [["optimizer"], []]
    assert said("verify", root).splitlines()[0].endswith("without optimizer, which retention removed")
    assert [row["removed_components"] for row in json.loads(said("verify", root, "--json"))["checkpoints"]] == [["optimizer"], []]
    assert "without optimizer" in said("show", root) and "without optimizer, which retention" in " ".join(said("show", one).split())
    assert json.loads(said("show", one, "--json"))["removed"] == ["optimizer"]
    for path in (root, one):
        said("show", path, "--html", str(tmp_path / "page.html"))
        page = (tmp_path / "page.html").read_text()
        assert "without optimizer" in page or "removed by retention" in page
    assert "optimizer" in said("diff", one, str(at(root, 2)), code=1)
    assert "without    optimizer, which retention removed" in said("convert", one, str(tmp_path / "converted"), "--to", "kimi-engine")
    assert read_manifest(tmp_path / "converted").removed == ["optimizer"]
    Loop().run(str(tmp_path / "whole"), 1, 2, keep_last_of=None)
    assert "the runs are equal up to step 2" in said("bisect", root, str(tmp_path / "whole"))
    copy = tmp_path / "copy" / "checkpoint-00000001"
    copy_checkpoint(at(root, 1), copy)
    assert read_manifest(copy).removed == ["optimizer"] and verify_checkpoint(copy) == []


def _save_on_ranks(topology: Topology, root: Path) -> None:
    held = {key: Held({"w": torch.full((5000,), float(topology.rank)), "n": topology.rank}) for key in ("model", "optimizer")}
    components = [StateComponent(key, one, "per_rank") for key, one in held.items()]
    given: dict[str, Any] = {"backend": "zarr", "strategy": "direct", "device": "cpu", "keep_last_of": {"optimizer": 1}}
    with CheckpointCoordinator(components, None, topology, root, **given) as coordinator:
        for number in ("1", "2", "3"):
            coordinator.save_checkpoint(checkpoint_id=number)
        with pytest.raises(MissingStateError, match="removed from checkpoint-1 by retention, and the newest complete one is checkpoint-3"):
            coordinator.load_checkpoint(root / "checkpoint-1")
        held["model"].state["w"].zero_()
        coordinator.load_checkpoint(root / "checkpoint-1", leave_out=["optimizer"])
        assert held["model"].state["w"].eq(topology.rank).all()


def test_the_lead_takes_out_what_all_ranks_have_written(tmp_path: Path) -> None:
    run_ranks(3, _save_on_ranks, tmp_path)
    assert removed(str(tmp_path)) == {1: ("optimizer",), 2: ("optimizer",), 3: ()}
    assert [verify_checkpoint(tmp_path / f"checkpoint-{number}") for number in (1, 2, 3)] == [[], [], []]
    assert not (tmp_path / "checkpoint-1" / "optimizer").exists()
