"""Tiers on hosts: a save in their memory outlives the ranks, and a host where others have copies; later tiers get it beside training."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt import CheckpointCoordinator, Checkpointer, StateComponent
from ckpt.catalog import verify
from ckpt.cli.listing import ListKeys, list_checkpoints
from ckpt.errors import ConfigurationError, CorruptCheckpointError
from ckpt.format.manifest import MANIFEST_NAME
from ckpt.format.places import ObjectPath
from ckpt.ranks.topology import Topology
from ckpt.saving.tiers import Tier, local, memory, memory_of, partners_of, remote
from ckpt.state.sharded_tensor import ShardedTensor
from ckpt.storage.keeper.hosts import HERE, THERE
from ckpt.storage.objects.store import CountedRequests
from ckpt.storage.stored import read_manifest_bytes
from tests.support.ranks import run_ranks
from tests.support.states import BACKENDS, Fitted, coordinator, random_bits, require_equal_states

_ROWS = 48
ROOT = "root"


def _tensors(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A global tensor whose rows the ranks share, and one that all have."""
    return random_bits((_ROWS, 1000), torch.float32, 2 * step), random_bits((3000,), torch.float32, 2 * step + 1)


def _components(topology: Topology, step: int) -> tuple[list[StateComponent], list[torch.Tensor]]:
    """The components of a rank at a step, and their tensors."""
    rows, model = _tensors(step)
    mine = rows.chunk(topology.world_size)[topology.rank].clone()
    shard = ShardedTensor.from_rank_offsets("w", mine, (0, topology.rank, topology.world_size))
    parts = [StateComponent("model", Fitted({"b": model}), "replicated"), StateComponent("shard", Fitted({"w": shard}), "sharded")]
    return parts, [model, mine]


def _run(
    topology: Topology, folder: Path, step: int, tiers: Sequence[Tier], **options: Any
) -> tuple[CheckpointCoordinator, list[torch.Tensor]]:
    components, tensors = _components(topology, step)
    return coordinator(topology, folder / "root", components, tiers=tiers, **options), tensors


def _memory(topology: Topology, folder: Path, hosts: str = "012", **options: Any) -> Tier:
    return memory(path=_of_host(topology, folder, hosts), keep_s=20.0, **options)


def _of_host(topology: Topology, folder: Path, hosts: str) -> Path:
    """What stands for the memory of this rank's host. `hosts`: their names, in the order of their ranks."""
    place = folder / f"host-{hosts[topology.node_rank]}"
    place.mkdir(exist_ok=True)
    return place


def _set(tensors: Sequence[torch.Tensor], topology: Topology, step: int) -> None:
    rows, model = _tensors(step)
    tensors[0].copy_(model)
    tensors[1].copy_(rows.chunk(topology.world_size)[topology.rank])


def _train(topology: Topology, folder: Path, backend: str, steps: int, copies: int) -> None:
    """Save each step, and go without a word, as ranks do that are killed."""
    made, tensors = _run(topology, folder, 0, [_memory(topology, folder, copies=copies)], backend=backend)
    for step in range(1, steps + 1):
        _set(tensors, topology, step)
        made.save_checkpoint(checkpoint_id=step, goes_home=False)
    with pytest.raises(InterruptedError), made:
        raise InterruptedError


def _resume(topology: Topology, folder: Path, backend: str, step: int, hosts: str = "012", saves: bool = False) -> dict[str, list[int]]:
    made, tensors = _run(topology, folder, 0, [_memory(topology, folder, hosts)], backend=backend)
    with made:
        made.load_checkpoint()
        rows, model = _tensors(step)
        require_equal_states(tensors, [model, rows.chunk(topology.world_size)[topology.rank]])
        assert made.last_load is not None and made.last_load.checkpoint_id == f"{step:08d}"
        if saves:
            made.save_checkpoint(checkpoint_id=step + 1)
        return made.last_load.requests


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_ranks_killed_their_memory_is_read(tmp_path: Path, backend: str) -> None:
    run_ranks(4, _train, tmp_path, backend, 2, 0, nodes=[2, 2])
    run_ranks(4, _resume, tmp_path, backend, 2, nodes=[2, 2])  # and saves nothing, so that the save stays where it is
    assert not [*(tmp_path / "root").glob("checkpoint-*")]
    requests = run_ranks(4, _resume, tmp_path, backend, 2, "012", True, nodes=[2, 2])[0]
    assert set(requests) <= {HERE, THERE} and requests[HERE][1] > 0
    assert [path.name for path in (tmp_path / "root").glob("checkpoint-*")] == ["checkpoint-00000003"]
    assert not [*tmp_path.glob("host-*/ckpt-*/*")], "a run that has ended leaves its memory"


def test_copies_that_a_crash_has_cut_off_are_made_up_for_by_the_first_save(tmp_path: Path) -> None:
    run_ranks(4, _train, tmp_path, "zarr", 2, 0, nodes=[2, 2])
    run_ranks(4, _go_on, tmp_path, nodes=[2, 2])
    assert sorted(path.name for path in (tmp_path / "root").glob("checkpoint-*")) == ["checkpoint-00000003", "checkpoint-00000005"]


def _go_on(topology: Topology, folder: Path) -> None:
    """Restore step 2 from memory, save three steps that are not due in the root, and end."""
    made, _ = _run(topology, folder, 0, [_memory(topology, folder)])
    with made:
        made.load_checkpoint()
        for step in (3, 4, 5):
            made.save_checkpoint(checkpoint_id=step, goes_home=False)


@pytest.mark.parametrize(
    ("nodes", "hosts"), [([2, 2, 2], "0n2"), ([2, 2], "20"), ([1, 1, 1], "2n0"), ([3, 1], "02")], ids=["alike", "two", "three", "uneven"]
)
def test_a_host_that_is_lost_is_read_from_its_copies_onto_other_ranks(tmp_path: Path, nodes: list[int], hosts: str) -> None:
    run_ranks(6, _train, tmp_path, "zarr", 3, 1, nodes=[2, 2, 2])
    shutil.rmtree(tmp_path / "host-1")
    requests = run_ranks(sum(nodes), _resume, tmp_path, "zarr", 3, hosts, nodes=nodes)[0]
    assert set(requests) == {HERE, THERE}
    assert not (tmp_path / "host-n" / memory_of(tmp_path, Path()).parent).exists(), "a host that has nothing needs no keeper for a load"


@pytest.mark.parametrize("host", [0, 1])
@pytest.mark.parametrize("damage", ["flipped", "cut short", "removed"])
def test_the_files_of_a_host_whose_manifest_is_damaged_are_read(tmp_path: Path, host: int, damage: str) -> None:
    run_ranks(4, _train, tmp_path, "zarr", 2, 0, nodes=[2, 2])
    (manifest,) = (tmp_path / f"host-{host}").glob(f"ckpt-*/*/checkpoint-00000002/{MANIFEST_NAME}")
    data = manifest.read_bytes()
    if damage == "removed":
        manifest.unlink()
    else:
        manifest.write_bytes(data[:-40] if damage == "cut short" else data[:-40] + bytes([data[-40] ^ 1]) + data[-39:])
    run_ranks(3, _resume, tmp_path, "zarr", 2, "01", nodes=[1, 2])


def test_partners_are_the_next_hosts_of_other_groups() -> None:
    assert [partners_of(host, 3, 1) for host in range(3)] == [[1], [2], [0]]
    assert partners_of(0, 5, 2, "aabbb") == [2, 3] and partners_of(4, 5, 3, "aabbb") == [0, 1, 2]


def _loop(folder: Path, model: torch.nn.Module, **options: Any) -> Checkpointer:
    return Checkpointer(folder / "root", model=model, every=4, **options)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_each_tier_gets_the_saves_that_are_due_in_it_and_the_last_one(tmp_path: Path, mode: str) -> None:
    tiers = [memory(path=tmp_path, every=1), local(tmp_path / "disk", every=2, keep_last=2)]
    model = torch.nn.Linear(2, 2)
    with _loop(tmp_path, model, tiers=tiers, mode=mode) as checkpoints:
        assert checkpoints.restore() == 0
        for step in range(1, 8):
            torch.nn.init.constant_(model.weight, step)
            assert checkpoints.step(step)
            checkpoints.wait()
            assert checkpoints.coordinator._tiered is not None
            checkpoints.coordinator._tiered.wait()
            assert [path.name for path in tmp_path.glob("ckpt-*/*/checkpoint-*")] == [f"checkpoint-{step:08d}"]
    assert [saved.step for saved in checkpoints.list()] == [4, 7]
    assert sorted(path.name for path in (tmp_path / "disk").glob("checkpoint-*")) == ["checkpoint-00000006", "checkpoint-00000007"]
    assert not [*tmp_path.glob("ckpt-*/*")]
    for place in (tmp_path / "root", tmp_path / "disk"):
        assert ckpt.load(place / "checkpoint-00000007")["model"]["weight"].eq(7).all()


def test_the_newest_of_all_tiers_is_restored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Linear(2, 2)
    tiers = [memory(every=1, keep_s=60.0), local(tmp_path / "disk", every=3)]
    with pytest.raises(InterruptedError), _loop(tmp_path, model, tiers=tiers) as checkpoints:
        for step in range(1, 6):
            torch.nn.init.constant_(model.weight, step)
            checkpoints.step(step)
        assert checkpoints.coordinator._tiered is not None
        checkpoints.coordinator._tiered.wait()
        raise InterruptedError
    assert list_checkpoints(ListKeys(path=str(tmp_path / "root"), json=True)) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [[row["step"] for row in listed[place]] for place in ("checkpoints", "in_memory")] == [[4], [5]]
    found = []
    for lost in (None, memory_of(tmp_path / "root"), tmp_path / "root" / "checkpoint-00000004", tmp_path / "disk"):
        if lost is not None:
            shutil.rmtree(lost)
        with pytest.raises(InterruptedError), _loop(tmp_path, model, tiers=tiers) as checkpoints:
            torch.nn.init.zeros_(model.weight)
            found.append(int(checkpoints.restore()))
            assert model.weight.eq(found[-1]).all()
            raise InterruptedError
    with _loop(tmp_path, model, tiers=tiers) as checkpoints:
        assert found == [5, 4, 3, 0] and checkpoints.restore() == 0


def test_below_a_damaged_checkpoint_of_the_root_the_hosts_are_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(2, 2)
    disk = local(tmp_path / "disk", every=3, keep_last=2)
    with pytest.raises(InterruptedError), _loop(tmp_path, model, tiers=[memory(path=tmp_path), disk]) as checkpoints:
        for step in range(1, 9):
            torch.nn.init.constant_(model.weight, step)
            checkpoints.step(step)
            assert checkpoints.coordinator._tiered is not None
            checkpoints.coordinator._tiered.wait()
        raise InterruptedError
    shutil.rmtree(next(tmp_path.glob("ckpt-*")))  # now 3 and 6 are on the disk, 4 and 8 in the root
    for damaged in (tmp_path / "root" / "checkpoint-00000008" / "model").rglob("c/*"):
        damaged.write_bytes(bytes(damaged.stat().st_size))
    reads: list[Path] = []
    monkeypatch.setattr("ckpt.run.tiered.read_manifest_bytes", lambda path: [reads.append(path), read_manifest_bytes(path)][1])
    found = []
    for lost in (None, tmp_path / "disk" / "checkpoint-00000006", tmp_path / "root" / "checkpoint-00000004", tmp_path / "disk"):
        if lost is not None:
            shutil.rmtree(lost)
        with pytest.raises((InterruptedError, CorruptCheckpointError)), _loop(tmp_path, model, tiers=[disk]) as checkpoints:
            torch.nn.init.zeros_(model.weight)
            found.append(int(restored := checkpoints.restore()))
            assert model.weight.eq(found[-1]).all() and restored.report is not None
            assert [Path(path).name[-1] for path in restored.report.fell_back_from] == ["8"]
            raise InterruptedError
    assert found == [6, 4, 3]
    assert sorted(path.name[-1] for path in reads) == ["3", "3", "3", "6"], "each manifest is read once in a search"


def test_a_copy_that_ends_beside_a_save_removes_nothing_but_what_waited_for_it(tmp_path: Path) -> None:
    with _loop(tmp_path, torch.nn.Linear(2, 2), tiers=[memory(path=tmp_path, keep_last=2)]) as checkpoints:
        tiered = checkpoints.coordinator._tiered
        assert tiered is not None
        for step in (1, 2, 3):
            checkpoints.save(step)
        stale = tiered._newest
        assert stale is not None
        for step in (5, 6):
            checkpoints.save(step)
        (folder,) = tmp_path.glob("ckpt-*/*/")
        tiered._release(stale)
        assert sorted(path.name[-1] for path in folder.glob("checkpoint-*")) == ["5", "6"]
        tiered._release(replace(stale, folder=folder / "checkpoint-00000006"))
        tiered._release(replace(stale, folder=folder / "checkpoint-00000005"))
        assert sorted(path.name[-1] for path in folder.glob("checkpoint-*")) == ["5", "6"]


def test_what_is_newer_than_the_checkpoint_that_a_run_goes_back_to_is_set_aside_in_all_tiers(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    tiers = [memory(path=tmp_path), local(tmp_path / "disk", every=3)]
    with pytest.raises(InterruptedError), _loop(tmp_path, model, tiers=tiers) as checkpoints:
        for step in range(1, 7):
            checkpoints.step(step)
        assert checkpoints.coordinator._tiered is not None
        checkpoints.coordinator._tiered.wait()
        raise InterruptedError
    with pytest.raises(InterruptedError), _loop(tmp_path, model, tiers=tiers, overwrite=True) as checkpoints:
        assert checkpoints.restore(4) == 4
        raise InterruptedError
    with _loop(tmp_path, model, tiers=tiers) as checkpoints:
        assert checkpoints.restore() == 4


@pytest.mark.parametrize(
    ("tiers", "sentence"),
    [
        (lambda: [memory(copies=1)], "the tier memory is to have copies on 1 other hosts, and the run has 0 of them"),
        (lambda: [memory(groups=["a", "b"])], "groups of the tier memory names 2 hosts, and the run has 1: give one for each host"),
        (lambda: [local("disk"), local("disk")], "two tiers have one folder: give each one of its own"),
        (lambda: [memory(every=0)], "memory.every is 0; expected a whole number of at least 1"),
        (lambda: [memory(keep_last=0)], "keep_last is 0; expected a whole number of at least 1, or None to keep every checkpoint"),
        (lambda: memory(), "tiers is a Tier; expected a list of tiers"),
        (lambda: ["memory"], "tiers[0] is 'memory'; expected what memory() or local() returns, or remote() for the last one"),
        (lambda: [remote("s3://bucket/run"), memory()], "tiers[0] is a Root; expected what memory() or local() returns"),
        (lambda: [remote("s3:/bucket")], "url of remote() is"),
        (lambda: [remote("s3://bucket/run", every=0)], "remote.every is 0; expected a whole number of at least 1"),
        (lambda: [remote("s3://bucket/run", every=5)], "folder is "),
        (lambda: [remote(ROOT, every=5)], "every is 4, and remote() in tiers says 5: give it once"),
        (lambda: [remote(ROOT, keep_last=1)], "retention is keep_last=2, and remote() in tiers says keep_last=1: give it once"),
    ],
)
def test_a_mistake_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiers: Callable[[], Any], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError) as caught:
        Checkpointer(ROOT, model=torch.nn.Linear(2, 2), every=4, keep_last=2, tiers=tiers())
    assert str(caught.value).startswith(sentence), caught.value
    assert not [*tmp_path.iterdir()]


def test_a_list_of_tiers_ends_with_the_checkpoint_root(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    tiers = [memory(path=tmp_path), remote(tmp_path / "root", every=2, keep_last=1, keep_every=4)]
    with Checkpointer(model=model, tiers=tiers, save_rng=False) as checkpoints:
        for step in range(1, 8):
            assert checkpoints.step(step) and checkpoints.coordinator._tiered is not None
            checkpoints.coordinator._tiered.wait()
            assert (checkpoints.find_latest() is None) == (step == 1)
    assert [saved.step for saved in checkpoints.list()] == [4, 7]
    part = StateComponent("model", model, "replicated")
    with CheckpointCoordinator([part], None, None, tiers=tiers, backend="zarr", strategy="direct", device="cpu") as made:
        made.load_checkpoint()
        for step in (8, 9, 10, 11):
            made.save_checkpoint(checkpoint_id=step)
            assert made._tiered is not None
            made._tiered.wait()
        assert [path.name[-2:] for path in sorted((tmp_path / "root").glob("checkpoint-*"))] == ["04", "08", "10"]


def test_the_checkpoint_root_may_be_the_only_tier(tmp_path: Path) -> None:
    with Checkpointer(model=torch.nn.Linear(2, 2), tiers=[remote(tmp_path, every=2)]) as checkpoints:
        assert [checkpoints.step(step) for step in (1, 2)] == [False, True] and not checkpoints.coordinator.has_tiers
    with pytest.raises(ConfigurationError, match="folder is None; expected the path of a folder"):
        Checkpointer(model=torch.nn.Linear(2, 2), tiers=[])
    with pytest.raises(ConfigurationError, match="did you mean the first argument?"):
        Checkpointer(folder=str(tmp_path), model=torch.nn.Linear(2, 2))


def test_what_tiers_take_of_a_host_is_said_before_the_first_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(1024, 1024, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    tiers = [memory(path=tmp_path, keep_last=2), local(tmp_path / "disk")]
    with caplog.at_level("INFO", "ckpt"), _loop(tmp_path, model, optimizer=optimizer, tiers=tiers) as checkpoints:
        said = "the tier memory takes about 36 MiB of each host: 3 times what the ranks of one write in a save; the tier local takes about"
        assert said in caplog.text
        model(torch.ones(1024)).sum().backward()
        optimizer.step()
        checkpoints.save(1)
        assert "the tier memory takes up to 36 MiB of each host" in caplog.text
    with _loop(tmp_path / "more", model, tiers=tiers[:1]) as checkpoints:
        assert checkpoints.coordinator.memory.endswith("; the tier memory takes 3 times what the ranks of one write in a save")


def test_a_host_without_room_is_refused_before_a_byte_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.saving.tiers.free_bytes", lambda _: 1000)
    checkpoints = _loop(tmp_path, torch.nn.Linear(200, 200), tiers=[memory(path=tmp_path, keep_s=1.0)])
    with pytest.raises(ConfigurationError, match="the tier memory needs 0 MiB on the host of rank 0, for 2 saves at a time"):
        checkpoints.save(1)
    checkpoints.close()
    assert not [*tmp_path.glob("**/checkpoint-*"), *tmp_path.glob("**/.unpublished*")]


_FROZEN, _TRAINED = 400_000, 20_000
_SMALL = 30_000
"""Manifest, indexes, plain values and the like."""


def _new_bytes(root: Path, before: str, after: str) -> int:
    """Bytes of the files of a checkpoint that an earlier one does not share."""
    old = {path.stat().st_ino for path in (root / f"checkpoint-{before}").rglob("*")}
    found = [path.stat() for path in (root / f"checkpoint-{after}").rglob("*") if path.is_file()]
    assert sum(each.st_size for each in found) > _FROZEN
    return sum(each.st_size for each in found if each.st_ino not in old)


def _save_again(topology: Topology, folder: Path, backend: str, root: Path | None) -> tuple[list[int], int]:
    """Save, with a part of the state that does not change.

    Returns:
        the bytes that the last save has added to each tier of this host and to the root, and those of the store's puts for it.
    """
    host, home = _of_host(topology, folder, "012"), root or ObjectPath("memory", "tiers", folder.name)
    frozen, trained = (random_bits((size // 4,), torch.float32, topology.rank + size) for size in (_FROZEN, _TRAINED))
    parts = [
        StateComponent(key, Fitted({"w": ShardedTensor.from_rank_offsets("w", mine, (0, topology.rank, topology.world_size))}), "sharded")
        for key, mine in (("frozen", frozen), ("trained", trained))
    ]
    copies = topology.world_size - 1
    tiers = [_memory(topology, folder, copies=copies, keep_last=2), local(host / "disk", copies=copies, keep_last=2)]
    with coordinator(topology, home, parts, tiers=tiers, backend=backend, incremental=True) as made:
        for step in (1, 2, 3):
            asked = CountedRequests(home)
            made.save_checkpoint(checkpoint_id=f"{step}")
            assert made._tiered is not None
            made._tiered.wait()
            trained.add_(1)
        assert made.last_save is not None and made.last_save.written_bytes < 2 * topology.world_size * _TRAINED + _SMALL
        roots = [next(host.glob("ckpt-*/*/")), host / "disk", *([root] if root else [])]
        for each in roots[:2]:
            assert sorted(path.name for path in each.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-3"], "each host keeps two"
        return [_new_bytes(each, "2", "3") for each in roots], asked.made().get("put", [0, 0])[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_did_not_change_moves_to_no_tier_and_no_host_again(tmp_path: Path, backend: str) -> None:
    for added, _ in run_ranks(2, _save_again, tmp_path, backend, tmp_path / "root", nodes=[1, 1]):
        assert len(added) == 3 and all(_TRAINED < each < 4 * _TRAINED + _SMALL for each in added), added
    assert not verify.examine(tmp_path / "root" / "checkpoint-3").problems


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_did_not_change_is_put_into_a_store_once(tmp_path: Path, backend: str) -> None:
    _, put = _save_again(Topology.alone(), tmp_path, backend, None)
    assert _TRAINED < put < 2 * _TRAINED + _SMALL
