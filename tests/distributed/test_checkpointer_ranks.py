"""`Checkpointer` on many ranks: patterns that are inferred, in every layout; other numbers of ranks; SIGTERM."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import ckpt
from ckpt import Checkpointer
from ckpt.cli.converting import ConvertKeys, convert_on_ranks, run_of
from ckpt.errors import CheckpointError, ConfigurationError, ReplicationError, WorldSizeError
from ckpt.interop.registry import source_at
from ckpt.loading.direct import DirectLoad
from ckpt.memory.device import Device
from ckpt.ranks.sigterm import TOLD_TO_END
from ckpt.ranks.topology import Phase, Topology
from ckpt.saving.manifest_writer import ManifestWriter
from ckpt.storage.stored import read_manifest
from recipes.training.training import Training
from tests.conf.configs import config
from tests.distributed.test_layouts import LAYOUTS
from tests.e2e.runs import SMALL
from tests.support.covering import sampled
from tests.support.ranks import run_ranks
from tests.support.states import Held

SAMPLE = ("ddp 2", "fsdp 2", "pipeline 2")


def patterns_of(path: Path) -> dict[str, str]:
    return {key: one.sharing_pattern for key, one in read_manifest(path).components.items()}


def set_up(cfg: dict[str, Any], topology: Topology) -> tuple[Training, dict[str, Any]]:
    training = Training(cfg, topology, Device.of_type("cpu"))
    training.join()
    parts = {"model": training.model, "optimizer": training.optimizer, "scheduler": training.scheduler}
    return training, parts | {"data": training.loader}


def _saved_and_restored(topology: Topology, cfg: dict[str, Any], folder: Path) -> tuple[list[float], list[float], Any]:
    """The losses of two steps after a save, from the run that saved and from one that was restored."""
    training, parts = set_up(cfg, topology)
    with Checkpointer(folder, **parts, topology=topology, save_at_end=False) as checkpoints:
        checkpoints.save(0)  # before the first step an optimizer is the same on all ranks
        training.step()
        path = checkpoints.save(1)
        straight = [training.step(), training.step()]
    training, parts = set_up(cfg | {"train": cfg["train"] | {"seed": 77}}, topology)
    with Checkpointer(folder, **parts, topology=topology, save_at_end=False) as checkpoints:
        assert checkpoints.restore() == 1
        return straight, [training.step(), training.step()], path


@pytest.mark.parametrize(
    "layout", [layout if layout in SAMPLE else pytest.param(layout, marks=pytest.mark.full) for layout in LAYOUTS]
)
def test_the_patterns_of_every_layout_are_inferred_and_it_resumes_to_the_bit(tmp_path: Path, layout: str) -> None:
    num_ranks, chosen = LAYOUTS[layout]
    cfg = config(tmp_path, *SMALL, *chosen, num_ranks=num_ranks)
    by_rank = run_ranks(num_ranks, _saved_and_restored, cfg, tmp_path / "saved", process_group=True, timeout_s=120.0)
    for straight, resumed, _ in by_rank:
        assert resumed == straight
    of_parts = "replicated" if layout.split()[0] in ("single", "ddp", "accelerate") else "sharded"
    assert patterns_of(by_rank[0][2]) == {
        "model": of_parts,
        "optimizer": of_parts,
        "scheduler": "replicated",
        "data": "global",  # declared by the loader: rank 0 hands out the batches
        "rng": "per_rank",
    }


def _fsdp(topology: Topology, folder: Path, steps: int) -> tuple[int, list[torch.Tensor]]:
    """Train a model under FSDP2 as its own program would, from the newest checkpoint on."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (topology.world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    inputs = (
        torch.arange(70, dtype=torch.float32).reshape(10, 7).cos()
    )  # equal on all ranks, so their number does not matter

    with Checkpointer(folder, model=model, optimizer=optimizer, scheduler=scheduler) as checkpoints:
        start = checkpoints.restore()
        for step in range(start + 1, steps + 1):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            scheduler.step()
            checkpoints.step(step)
    state = [moment for one in optimizer.state.values() for moment in (one["exp_avg"], one["exp_avg_sq"])]
    return int(start), [one.detach().full_tensor() for one in [*model.parameters(), *state]]


def test_fsdp_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    _, saved = run_ranks(2, _fsdp, tmp_path, 3, process_group=True)[0]
    start, loaded = run_ranks(3, _fsdp, tmp_path, 3, process_group=True)[0]
    assert start == 3
    assert all(torch.equal(a, b) for a, b in zip(saved, loaded, strict=True))
    start, trained = run_ranks(2, _fsdp, tmp_path, 5, process_group=True)[1]
    assert start == 3
    assert all(
        torch.isfinite(one).all() and not torch.equal(one, was) for one, was in zip(trained, loaded, strict=True)
    )


def _save_what_ranks_hold(
    topology: Topology, folder: Path, groups: Mapping[str, Any] | None, patterns: Mapping[str, str] | None = None
) -> str:
    """Save a model of plain tensors, of which ranks 0 and 1 hold one half, 2 and 3 the other; and other objects."""
    half = topology.rank // 2
    model = torch.nn.Linear(2, 2, bias=False)
    model.weight.data.copy_(torch.arange(4.0).reshape(2, 2) + 10 * half)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own, shared = Held({"position": topology.rank}), Held({"best": 1.5, "names": ["a", "b"]})
    objects = {"model": model, "optimizer": optimizer, "own": own, "shared": shared}
    options: dict[str, Any] = {"process_groups": groups and {"dp": groups[str(half)]}, "sharing_patterns": patterns}
    with Checkpointer(folder, **objects, topology=topology, **options, save_rng=False) as checkpoints:
        checkpoints.save(1)
        own.state = {"position": 7}
        path = checkpoints.save(2)
        model.weight.data.zero_()
        own.state = {"position": 0}
        checkpoints.restore(1)
        assert own.loaded == {"position": topology.rank}
        assert torch.equal(model.weight.data, torch.arange(4.0).reshape(2, 2) + 10 * half)
    return str(path)


def test_parts_that_are_no_dtensors_are_known_by_a_group_whose_members_are_equal(tmp_path: Path) -> None:
    groups = {"0": [0, 1], "1": [2, 3]}
    paths = run_ranks(4, _save_what_ranks_hold, tmp_path, groups)
    components = read_manifest(tmp_path / "checkpoint-00000001").components
    assert (components["model"].sharing_pattern, components["model"].group_name) == ("per_group", "dp")
    assert components["own"].sharing_pattern == "per_rank"
    assert components["shared"].sharing_pattern == "replicated"
    assert patterns_of(Path(paths[0]))["own"] == "replicated", "found again at each save"


def test_parts_that_are_no_dtensors_are_refused_where_nothing_tells_what_they_are(tmp_path: Path) -> None:
    refusals = run_ranks(4, _refused, _save_what_ranks_hold, ReplicationError, tmp_path / "refused", None)
    assert len(set(refusals)) == 1
    assert "component model: ranks 0 and 2 hold different values of weight, which does not say what part" in refusals[0]
    assert "sharing_pattern=per_rank" in refusals[0]
    assert not list((tmp_path / "refused").glob("checkpoint-*"))
    run_ranks(4, _save_what_ranks_hold, tmp_path / "given", None, {"model": "per_rank"})


def _refused(topology: Topology, call: Callable[..., Any], error: type[Exception], *args: Any) -> str:
    with pytest.raises(error) as raised:
        call(topology, *args)
    return str(raised.value)


def _restore_position(topology: Topology, folder: Path) -> None:
    Checkpointer(folder, own=Held({"position": 0}), topology=topology, save_rng=False).restore()


def test_states_of_their_own_are_not_given_to_other_ranks(tmp_path: Path) -> None:
    run_ranks(2, _save_own, tmp_path)
    for refusal in run_ranks(3, _refused, _restore_position, WorldSizeError, tmp_path):
        assert "component own is per_rank and was saved by 2 ranks, this run has 3" in refusal


def _save_own(topology: Topology, folder: Path) -> None:
    with Checkpointer(folder, own=Held({"position": topology.rank}), topology=topology) as checkpoints:
        checkpoints.save(1)


def _with_running_means(topology: Topology, folder: Path) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(folder, model=model, optimizer=optimizer) as checkpoints:
        start = checkpoints.restore()
        for step in range(start + 1, 3):
            optimizer.zero_grad()
            model(torch.randn(8, 4) + topology.rank).square().mean().backward()
            optimizer.step()
            checkpoints.step(step)
    return [one.detach() for one in model.state_dict().values()]


def test_a_module_in_ddp_is_saved_with_the_buffers_of_rank_0(tmp_path: Path) -> None:
    trained = run_ranks(2, _with_running_means, tmp_path, process_group=True)
    assert not torch.equal(trained[0][4], trained[1][4]), "running means of each rank's own batch"
    for loaded in run_ranks(2, _with_running_means, tmp_path, process_group=True):
        assert all(torch.equal(a, b) for a, b in zip(loaded, trained[0], strict=True))


def _state_dicts(topology: Topology, folder: Path) -> None:
    """Save a state dict with a DTensor, a copy, a key of each rank, and plain values; load it in other ways."""
    mesh = init_device_mesh("cpu", (topology.world_size,))
    whole = torch.arange(60.0).reshape(6, 10)
    own = f"of rank {topology.rank}"
    state = {
        "cut": distribute_tensor(whole, mesh, [Shard(0)]),
        "copy": torch.arange(7) * 3,
        own: torch.tensor([topology.rank]),
        "step": 5,
    }
    report = ckpt.save(state, folder)
    assert report.bytes == sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    loaded = ckpt.load(folder, load="two-stage")
    assert torch.equal(loaded["cut"], whole)
    assert [int(loaded[f"of rank {rank}"]) for rank in range(topology.world_size)] == [*range(topology.world_size)]
    into = {"cut": distribute_tensor(torch.zeros(6, 10), mesh, [Shard(1)]), "copy": torch.zeros(7, dtype=torch.int64)}
    into |= {own: torch.tensor([-1]), "step": 0}
    ckpt.load(folder, into)
    assert torch.equal(into["cut"].full_tensor(), whole)
    assert (into["copy"].tolist(), int(into[own]), into["step"]) == ([0, 3, 6, 9, 12, 15, 18], topology.rank, 5)
    with pytest.raises(ReplicationError, match="component state: ranks 0 and 1 hold different values of a,"):
        ckpt.save({"a": torch.tensor([topology.rank])}, folder.with_name("unlike"))
    group = {"pairs": [topology.rank // 2 * 2, topology.rank // 2 * 2 + 1]}
    ckpt.save({"a": torch.tensor([topology.rank // 2])}, folder.with_name("pairs"), process_groups=group)
    assert ckpt.load(folder.with_name("pairs"))["a"].tolist() == [topology.rank // 2]


def test_a_state_dict_is_saved_and_loaded_by_many_ranks(tmp_path: Path) -> None:
    run_ranks(4, _state_dicts, tmp_path / "saved", process_group=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pairs", "saved"], "nothing is left of what was refused"


def _save_own_and_shared(topology: Topology, folder: Path) -> None:
    weight = torch.nn.Linear(2, 2)
    weight.weight.data.fill_(3)
    weight.bias.data.fill_(4)
    with Checkpointer(folder, model=weight, own=Held({"position": topology.rank}), topology=topology) as checkpoints:
        checkpoints.save(1)


def test_one_process_loads_what_many_ranks_saved_but_for_their_own_states(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_ranks(2, _save_own_and_shared, tmp_path)
    loaded = ckpt.load(tmp_path / "checkpoint-00000001")
    assert list(loaded) == ["model"]
    assert loaded["model"]["weight"].tolist() == [[3, 3], [3, 3]]
    assert "component own" in caplog.text
    assert "component rng" in caplog.text


def _stage(topology: Topology, folder: Path, saves: bool) -> list[float]:
    """One rank has both layers; two have one each, of the names of the whole."""
    whole = {"first": torch.nn.Linear(1, 1), "last": torch.nn.Linear(1, 1)}
    mine = whole if topology.world_size == 1 else {list(whole)[topology.rank]: list(whole.values())[topology.rank]}
    for at, layer in enumerate(mine.values()):
        layer.weight.data.fill_(at + 1 if saves else 0)
    with Checkpointer(folder, model=torch.nn.ModuleDict(mine), topology=topology, save_at_end=False) as checkpoints:
        if saves:
            checkpoints.save(1)
        else:
            checkpoints.restore()
    return [layer.weight.item() for layer in mine.values()]


def test_pipeline_stages_load_what_one_rank_saved(tmp_path: Path) -> None:
    run_ranks(1, _stage, tmp_path, True)
    assert run_ranks(2, _stage, tmp_path, False) == [[1.0], [2.0]]


def _bad_notes_on_the_lead(topology: Topology, folder: Path) -> str:
    with (
        pytest.raises(ConfigurationError) as raised,
        Checkpointer(
            folder, model=torch.nn.Linear(1, 1), topology=topology, sharing_patterns={"model": "per_rank"}
        ) as checkpoints,
    ):
        checkpoints.save(1, metadata={"a": object()} if topology.is_lead else None)
    return str(raised.value)


def test_metadata_that_the_lead_alone_gives_wrongly_is_refused_on_all_ranks(tmp_path: Path) -> None:
    refusals = run_ranks(2, _bad_notes_on_the_lead, tmp_path)
    assert refusals[0] == refusals[1]
    assert "metadata cannot be stored" in refusals[0]


PHASES = {
    "own folder": "save",
    "sharing": "save",
    "told to end": "step",
    "look": "restore",
    "best": "best",
    "claim": "save of a state dict",
    "state": "save of a state dict",
    "leaves": "save of a state dict",
    "open": "save of a state dict",
    "reach": "save of a state dict",
    "write": "save of a state dict",
    "commit": "save of a state dict",
    "publish": "save of a state dict",
    "list": "load of a state dict",
    "into": "load of a state dict",
    "open records": "restore of an export",
    "indexes": "opening",
}
"""Phases -> the call that goes through them."""


def _with_a_faulty_rank(topology: Topology, folder: Path) -> dict[str, str]:
    """Make each call, with rank 1 failing in one phase of it; the sentences of the errors."""
    phase_of = Topology.phase
    failing = ""

    @contextmanager
    def phase(self: Topology, name: str) -> Iterator[Phase]:
        with phase_of(self, name) as one:
            yield one
            if name == failing and self.rank == 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    ckpt.save({"a": torch.arange(3)}, folder / "whole", topology=topology)
    with Checkpointer(folder / "own", model=torch.nn.Linear(1, 1), topology=topology) as checkpoints:
        wanted = ConvertKeys(src=str(checkpoints.save(1)), dst=str(folder / "export"), to="dcp")
    with topology.phase("export"):
        if topology.is_lead:
            convert_on_ranks(run_of(wanted), Topology.alone())
    errors = {}
    Topology.phase = phase  # type: ignore[method-assign,assignment]
    try:
        for number, (name, call) in enumerate(PHASES.items()):
            failing = name
            new = folder / str(number)
            made = Checkpointer(new, model=torch.nn.Linear(1, 1), topology=topology, metric="loss", allow_pickle=True)
            calls: dict[str, Callable[[], object]] = {
                "save": partial(made.save, 1),
                "step": partial(made.step, 1),
                "restore": made.restore,
                "best": partial(made.restore, "best"),
                "save of a state dict": partial(ckpt.save, {"a": torch.arange(3)}, new, topology=topology),
                "load of a state dict": partial(ckpt.load, folder / "whole", topology=topology),
                "restore of an export": partial(made.restore, folder / "export"),
                "opening": partial(source_at, folder / "whole", topology, DirectLoad()),
            }
            with pytest.raises(CheckpointError) as raised:
                calls[call]()
            errors[name] = str(raised.value)
            failing = ""
            made.close()
    finally:
        Topology.phase = phase_of  # type: ignore[method-assign]
    return errors


def test_a_rank_that_fails_in_any_phase_is_named_on_all_and_nothing_is_committed(tmp_path: Path) -> None:
    first, second = run_ranks(2, _with_a_faulty_rank, tmp_path)
    assert first == second
    for number, name in enumerate(PHASES):
        if name != "best":  # there is none, which the lead says
            assert f"phase {name}" in first[name] and "on rank 1: No space left on device" in first[name], first[name]
        committed = ["checkpoint_manifest.json"] if name == "publish" else []
        assert [path.name for path in tmp_path.glob(f"{number}/checkpoint*")] == committed, name
    assert "is committed" in first["publish"]


def _load_what_rank_1_cannot(topology: Topology, folder: Path) -> dict[str, str]:
    with Checkpointer(folder, model=torch.nn.Linear(2, 1), topology=topology) as checkpoints:
        path = checkpoints.save(1)
    assert path is not None
    errors = {}
    for name, wrong in {"itself": 7, "a component": {"model": 7}}.items():
        right = {"model": torch.nn.Linear(2, 1).state_dict()}
        with pytest.raises(ConfigurationError) as raised:
            ckpt.load(path, into=wrong if topology.rank == 1 else right, topology=topology)  # type: ignore[arg-type]
        errors[name] = str(raised.value)
    return errors


def test_what_one_rank_cannot_load_into_is_said_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(2, _load_what_rank_1_cannot, tmp_path / "checkpoints")
    assert first == second
    for name, said in first.items():
        where = {"itself": "into", "a component": "into['model']"}[name]
        assert f"on rank 1: {where} is a int; expected a state dict" in said


def _killed_in_a_save(topology: Topology, folder: Path) -> None:
    def die(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    ManifestWriter.write = die  # type: ignore[method-assign,assignment]
    ckpt.save({"a": torch.arange(9)}, folder, topology=topology)


def test_the_rest_of_a_killed_save_is_removed_by_the_next_one(tmp_path: Path) -> None:
    run_ranks(1, _killed_in_a_save, tmp_path / "saved", expect_dead=[0])
    assert [path.name.startswith(".unpublished-saved-") for path in tmp_path.iterdir()] == [True, True]
    ckpt.save({"a": torch.arange(9)}, tmp_path / "saved")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def _told_to_end(topology: Topology, folder: Path, mode: str) -> int:
    """Train until the last rank is told to end at its third step, by SIGTERM or by another thread; the exit code."""
    model = torch.nn.Linear(2, 2)
    first = 1
    if mode == "resumed":  # from a step at which all the time so far is none for each step
        mode, first = "sync", 100_001
        Checkpointer(folder, model=model, topology=topology).save(first - 1)
    with (
        pytest.raises(SystemExit) as exited,
        Checkpointer(folder, model=model, topology=topology, every=1000, mode="sync" if mode == "asked" else mode) as checkpoints,
    ):
        assert checkpoints.restore() == first - 1
        for step in range(first, first + 100_000):
            model.weight.data.fill_(step)
            if step == first + 2 and topology.rank == topology.world_size - 1:
                if mode == "asked":
                    asking = threading.Thread(target=checkpoints.end_after_this_step)
                    asking.start()
                    asking.join()
                else:
                    os.kill(os.getpid(), signal.SIGTERM)
            checkpoints.step(step)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    code = exited.value.code
    assert isinstance(code, int)
    return code


@sampled(("num_ranks", "mode"), [(1, "sync"), (2, "async"), (3, "resumed"), (1, "asked"), (2, "asked")], 4)
def test_sigterm_to_one_rank_saves_one_step_on_all_and_ends_them(tmp_path: Path, num_ranks: int, mode: str) -> None:
    assert run_ranks(num_ranks, _told_to_end, tmp_path, mode) == [TOLD_TO_END] * num_ranks
    newest = max(tmp_path.glob("checkpoint-*"))
    step = int(newest.name.removeprefix("checkpoint-"))
    assert step >= (100_003 if mode == "resumed" else 3)
    (entry,) = [entry for name, entry in read_manifest(newest).arrays.items() if name == "model/weight"]
    assert entry.shape == (2, 2)
