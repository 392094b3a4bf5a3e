"""Saving and loading on one rank: names, strictness, tied weights, optimizers, replacement, what a checkpoint holds."""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from ckpt import CheckpointCoordinator, StateComponent
from ckpt.backends.kimi_engine import KimiEngineBackend
from ckpt.backends.zarr import ZarrBackend
from ckpt.dist_checkpointing import ShardedTensor
from ckpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptCheckpointError,
    MissingStateError,
    ShapeMismatchError,
    StorageError,
)
from ckpt.loading.direct import DirectLoad
from ckpt.ranks.topology import Topology
from ckpt.saving.save_settings import SaveSettings
from ckpt.state.state_digest import state_digest
from ckpt.state.statefuls import ModelState, OptimizerState, RNGState
from ckpt.storage.stored import read_manifest
from tests.support.covering import sampled
from tests.support.ranks import run_threads
from tests.support.states import BACKENDS, Fitted, Held, coordinator, cpu, global_index, random_bits, same_bits

ALONE = Topology.alone()


def save(root: Path, state: dict, checkpoint_id: str = "1", **options: object) -> str:
    with coordinator(ALONE, root, [StateComponent("model", Held(state), "global")], **options) as made:
        return made.save_checkpoint(checkpoint_id=checkpoint_id)


def load(root: Path, state: dict, *, strict: bool = True, path: Path | None = None, kind: type[Held] = Held) -> Held:
    held = kind(state)
    coordinator(ALONE, root, [StateComponent("model", held, "global")]).load_checkpoint(path, strict=strict)
    return held


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tensors_name_is_data_and_never_a_path(tmp_path: Path, backend: str) -> None:
    names = [
        "../x",
        "a/b",
        "",
        "ünï cödé",
        "x" * 400,
        "x" * 400 + "y",
        "packed-float32-00000",
        ".hidden",
        "a.b",
        "..",
        "c/0",
        "zarr.json",
    ]
    state = {name: global_index((200, 100)) + i for i, name in enumerate(names)}
    save(tmp_path / "root", state, backend=backend)
    got = load(tmp_path / "root", {name: torch.zeros(200, 100) for name in names})
    for name, tensor in state.items():
        assert same_bits(got.state[name], tensor), name
    assert [p.name for p in tmp_path.iterdir()] == ["root"]
    assert [p.name for p in (tmp_path / "root").iterdir()] == ["checkpoint-1"]


def test_a_component_whose_key_would_be_a_path_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="letters, digits"):
        StateComponent("../x", Held({}), "global")


def test_non_contiguous_tensors_are_saved_and_filled_through_their_strides(tmp_path: Path) -> None:
    base = global_index((300, 200))
    save(tmp_path, {"t": base.t(), "s": base[::3, ::2]})
    target = torch.full((300, 200), -1.0)
    strided = torch.full((200, 400), -1.0)
    load(tmp_path, {"t": target.t(), "s": strided[::2, ::4]})
    assert same_bits(target, base)
    assert same_bits(strided[::2, ::4].contiguous(), base[::3, ::2].contiguous())
    assert torch.all(strided[1::2] == -1)


def test_an_object_that_holds_nothing_yet_is_given_all_that_was_saved(tmp_path: Path) -> None:
    state = {
        "seen": {"doc": 3, "of": [1, (2, 3)]},
        "ema": {0: random_bits((100, 300), torch.bfloat16, 1)},
        "list": [torch.arange(3), "x"],
    }
    save(tmp_path, state)
    got = load(tmp_path, {"seen": {}}).loaded
    assert got["seen"] == state["seen"]
    assert same_bits(got["ema"][0], state["ema"][0])
    assert got["list"][0].tolist() == [0, 1, 2]
    assert got["list"][1] == "x"


def model(seed: int = 0, *, tied: bool = False) -> torch.nn.Module:
    torch.manual_seed(seed)
    made = torch.nn.ModuleDict(
        {
            "wte": torch.nn.Embedding(90, 200),
            "h": torch.nn.Linear(200, 200),
            "head": torch.nn.Linear(200, 90, bias=False),
        }
    )
    if tied:
        made["head"].weight = made["wte"].weight
        made.tied_names = {"head.weight": "wte.weight"}
    return made


def step(made: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    made["head"](made["h"](made["wte"](torch.randint(0, 90, (8,))))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("tied", [False, True])
def test_optimizer_state_follows_parameter_names_through_another_order_and_other_groups(
    tmp_path: Path, tied: bool
) -> None:
    trained = model(tied=tied)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.01, betas=(0.8, 0.95))
    for _ in range(3):
        step(trained, optimizer)
    components = [
        StateComponent("model", trained, "replicated"),
        StateComponent("optimizer", OptimizerState(optimizer, trained), "replicated"),
    ]
    coordinator(ALONE, tmp_path, components).save_checkpoint(checkpoint_id="1")
    fresh = model(1, tied=tied)
    parameters = list(fresh.parameters())[::-1]
    other = torch.optim.AdamW([{"params": parameters[:1]}, {"params": parameters[1:]}], lr=0.5)
    components = [
        StateComponent("model", fresh, "replicated"),
        StateComponent("optimizer", OptimizerState(other, fresh), "replicated"),
    ]
    coordinator(ALONE, tmp_path, components).load_checkpoint()
    assert [group["lr"] for group in other.param_groups] == [0.01, 0.01]
    assert other.param_groups[0]["betas"] == (0.8, 0.95)
    names = dict(fresh.named_parameters())
    for name, parameter in trained.named_parameters():
        assert same_bits(parameter.detach(), names[name].detach())
        for state_field, value in optimizer.state[parameter].items():
            assert same_bits(other.state[names[name]][state_field], value), (name, state_field)
    assert state_of(trained, optimizer) == state_of(fresh, other)
    if tied:
        assert fresh["head"].weight is fresh["wte"].weight
        arrays = read_manifest(tmp_path / "checkpoint-1").arrays
        assert arrays["model/head.weight"].alias_of == "model/wte.weight"
        assert not any("head.weight" in name for name in arrays if name.startswith("optimizer"))


def state_of(made: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    return state_digest({"model": ModelState(made), "optimizer": OptimizerState(optimizer, made)}, ALONE)


def test_a_tied_checkpoint_fills_both_copies_of_an_untied_model(tmp_path: Path) -> None:
    tied = model(tied=True)
    coordinator(ALONE, tmp_path, [StateComponent("model", tied, "replicated")]).save_checkpoint(checkpoint_id="1")
    untied = model(1)
    coordinator(ALONE, tmp_path, [StateComponent("model", untied, "replicated")]).load_checkpoint()
    assert same_bits(untied["head"].weight.detach(), tied["wte"].weight.detach())
    assert same_bits(untied["wte"].weight.detach(), tied["wte"].weight.detach())


def test_an_untied_checkpoint_is_refused_by_a_tied_model_rather_than_losing_a_weight(tmp_path: Path) -> None:
    coordinator(ALONE, tmp_path, [StateComponent("model", model(), "replicated")]).save_checkpoint(checkpoint_id="1")
    with pytest.raises(MissingStateError, match=r"head\.weight differs from wte\.weight, and they are one tensor"):
        coordinator(ALONE, tmp_path, [StateComponent("model", model(tied=True), "replicated")]).load_checkpoint()


def test_a_bare_optimizer_without_names_is_refused_and_one_with_names_is_fine(tmp_path: Path) -> None:
    made = model()
    with pytest.raises(ConfigurationError, match="without a name"):
        coordinator(
            ALONE, tmp_path, [StateComponent("optimizer", torch.optim.SGD(made.parameters(), lr=1.0), "global")]
        )
    named = torch.optim.SGD(made.named_parameters(), lr=1.0, momentum=0.9)
    step(made, named)
    coordinator(ALONE, tmp_path, [StateComponent("optimizer", named, "global")]).save_checkpoint(checkpoint_id="1")
    assert "optimizer/state.h.weight.momentum_buffer" in read_manifest(tmp_path / "checkpoint-1").arrays


def test_groups_that_were_saved_apart_are_not_merged_silently(tmp_path: Path) -> None:
    made = model()
    parameters = list(made.parameters())
    apart = torch.optim.SGD([{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:], "lr": 0.2}])
    coordinator(ALONE, tmp_path, [StateComponent("o", OptimizerState(apart, made), "global")]).save_checkpoint(
        checkpoint_id="1"
    )
    together = OptimizerState(torch.optim.SGD(parameters, lr=1.0), made)
    with pytest.raises(ConfigurationError, match=r"wte\.weight and h\.weight share a parameter group"):
        coordinator(ALONE, tmp_path, [StateComponent("o", together, "global")]).load_checkpoint()


def test_every_random_generator_goes_on_where_it_was_and_is_restored_last(tmp_path: Path) -> None:
    class Drawing(Held):
        def load_state_dict(self, state_dict: dict) -> None:
            random.random(), np.random.rand(), torch.rand(1)

    components = [StateComponent("rng", RNGState(cpu()), "per_rank"), StateComponent("x", Drawing({"a": 1}), "global")]
    made = coordinator(ALONE, tmp_path, components)
    random.gauss(0, 1), np.random.randn()  # both keep half a pair for the next draw
    made.save_checkpoint(checkpoint_id="1")
    wanted = (random.gauss(0, 1), random.random(), np.random.randn(), np.random.rand(), torch.rand(3).tolist())
    made.load_checkpoint()
    assert (random.gauss(0, 1), random.random(), np.random.randn(), np.random.rand(), torch.rand(3).tolist()) == wanted


def test_keys_on_one_side_only_are_errors_when_strict_and_reported_when_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator(ALONE, tmp_path, [StateComponent("model", model(), "global")]).save_checkpoint(checkpoint_id="1")
    other = torch.nn.ModuleDict({"wte": torch.nn.Embedding(90, 200), "new": torch.nn.Linear(3, 3)})
    before = other["new"].weight.detach().clone()
    made = coordinator(ALONE, tmp_path, [StateComponent("model", other, "global")])
    with pytest.raises(MissingStateError, match=r"only in the checkpoint: h\.bias, h\.weight, head\.weight"):
        made.load_checkpoint()
    with caplog.at_level(logging.WARNING):
        made.load_checkpoint(strict=False)
    assert same_bits(other["wte"].weight.detach(), model()["wte"].weight.detach())
    assert same_bits(other["new"].weight.detach(), before)
    assert "only wanted: new.weight, new.bias" in caplog.text


def test_a_missing_component_is_an_error_if_required_and_strict(tmp_path: Path) -> None:
    save(tmp_path, {"w": torch.arange(3)})
    for required, strict, fails in ((True, True, True), (True, False, False), (False, True, False)):
        held = Held({"w": torch.zeros(3, dtype=torch.int64)})
        components = [
            StateComponent("model", held, "global"),
            StateComponent("ema", Held({}), "global", required=required),
        ]
        made = coordinator(ALONE, tmp_path, components)
        if fails:
            with pytest.raises(
                MissingStateError,
                match=r"component ema is not in the checkpoint, which has: model\. Leave component ema out, declare component ema with ",
            ):
                made.load_checkpoint(strict=strict)
        else:
            made.load_checkpoint(strict=strict)
            assert held.state["w"].tolist() == [0, 1, 2]


def test_another_shape_or_type_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    save(tmp_path, {"a": torch.arange(4.0), "w": global_index((6, 5))})
    target = {"a": torch.full((4,), -1.0), "w": torch.zeros(5, 6)}
    with pytest.raises(
        ShapeMismatchError, match=r"model: w: the checkpoint holds global shape \[6, 5\], this run asks for \[5, 6\]"
    ):
        load(tmp_path, target, kind=Fitted)
    with pytest.raises(ShapeMismatchError, match="holds float32, this run asks for float64"):
        load(tmp_path, {"a": target["a"], "w": torch.zeros(6, 5, dtype=torch.float64)}, kind=Fitted)
    assert torch.all(target["a"] == -1)


def test_the_manifest_snippet_of_the_third_reference_runs_unchanged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, {"w": global_index((200, 100)), "n": 1})
    with open(tmp_path / "checkpoint-1" / "checkpoint_manifest.json") as f:
        manifest = json.load(f)
    print(f"World size: {manifest['world_size']}")
    print(f"Timestamp: {manifest['timestamp']}")
    print("Components:")
    for key, comp in manifest["components"].items():
        print(f"  {key}:")
        print(f"    Pattern: {comp['sharing_pattern']}")
        print(f"    Ranks: {comp['ranks']}")
        print(f"    Size: {comp['size_bytes']} bytes")
    printed = capsys.readouterr().out
    assert "World size: 1\n" in printed
    assert "  model:\n    Pattern: global\n    Ranks: [0]\n    Size: 800" in printed


def test_a_renamed_or_copied_checkpoint_stays_whole(tmp_path: Path) -> None:
    path = Path(save(tmp_path, {"w": global_index((200, 100))}, backend="ocdbt"))
    moved = tmp_path / "elsewhere" / "my favourite"
    moved.parent.mkdir()
    path.rename(moved)
    assert same_bits(load(tmp_path, {"w": torch.zeros(200, 100)}, path=moved).state["w"], global_index((200, 100)))


def test_saving_an_id_again_replaces_it_and_retention_keeps_the_newest(tmp_path: Path) -> None:
    components = [StateComponent("model", held := Held({"w": torch.arange(3)}), "global")]
    made = coordinator(ALONE, tmp_path, components, keep_last=2)
    for checkpoint_id in ("1", "2", "2", "3", "1"):
        held.state["w"] += 10
        made.save_checkpoint(checkpoint_id=checkpoint_id)
    made.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-3"]
    got = load(tmp_path, {"w": torch.zeros(3, dtype=torch.int64)})
    assert got.state["w"].tolist() == [50, 51, 52], "the newest is the one committed last, not the largest number"


def test_overwrite_removes_what_was_there_once_the_first_new_one_is_committed(tmp_path: Path) -> None:
    for checkpoint_id in ("1", "2"):
        save(tmp_path, {"w": torch.arange(3)}, checkpoint_id)
    made = coordinator(
        ALONE, tmp_path, [StateComponent("model", Held({"w": torch.arange(4)}), "global")], overwrite=True
    )
    made.save_checkpoint(checkpoint_id="7")
    made.save_checkpoint(checkpoint_id="8")
    made.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-7", "checkpoint-8"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_histories_are_not_mixed_after_a_load_of_an_older_checkpoint(tmp_path: Path, overwrite: bool) -> None:
    with coordinator(ALONE, tmp_path, [StateComponent("model", Held({"n": 1}), "global")]) as first:
        for number in range(1, 5):
            first.save_checkpoint(checkpoint_id=f"{number}")
    run_threads(2, _go_on_from_the_second, tmp_path, overwrite)
    names = sorted(path.name for path in tmp_path.iterdir())
    if overwrite:
        assert [name.rpartition("-")[0] for name in names[:2]] == [".abandoned-3", ".abandoned-4"]
        assert names[2:] == ["checkpoint-1", "checkpoint-2", "checkpoint-9"]
    else:
        assert names == [f"checkpoint-{number}" for number in range(1, 5)]


def _go_on_from_the_second(topology: Topology, root: Path, overwrite: bool) -> None:
    made = coordinator(topology, root, [StateComponent("model", Held({"n": 0}), "global")], overwrite=overwrite)
    made.load_checkpoint(root / "checkpoint-2")
    if overwrite:
        names = {path.name for path in root.iterdir()}
        assert names.isdisjoint({"checkpoint-3", "checkpoint-4"}), "set aside at once"
        made.save_checkpoint(checkpoint_id="9")
        return
    for _ in range(2):
        with pytest.raises(
            CheckpointExistsError, match="holds newer checkpoints: checkpoint-3, checkpoint-4. .*overwrite=True"
        ):
            made.save_checkpoint(checkpoint_id="9")
    made.load_checkpoint(root / "checkpoint-4")  # the newest: there is nothing to leave
    made.save_checkpoint(root / "checkpoint-4")


def test_a_root_that_was_removed_is_not_made_anew(tmp_path: Path) -> None:
    root = tmp_path / "root"
    made = coordinator(ALONE, root, [StateComponent("model", Held({"w": torch.arange(4)}), "global")])
    made.save_checkpoint(checkpoint_id="1")
    shutil.rmtree(root)
    with pytest.raises(StorageError, match="checkpoint root .*root was removed while this run was using it"):
        made.save_checkpoint(checkpoint_id="2")
    assert not root.exists()


def test_a_damaged_newest_checkpoint_is_passed_over_then_quarantined_by_the_next_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"w": global_index((200, 100)), "n": 1}
    for checkpoint_id in ("1", "2"):
        save(tmp_path, {**state, "n": int(checkpoint_id)}, checkpoint_id)
    chunk = tmp_path / "checkpoint-2" / "model" / "w" / "c" / "0" / "0"
    data = bytearray(chunk.read_bytes())
    data[777] ^= 1
    chunk.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=r"model: w: bytes .*c/0/0"):
        load(tmp_path, {"w": torch.zeros(200, 100)}, path=tmp_path / "checkpoint-2")
    held = Held({"w": torch.zeros(200, 100), "n": 0})
    made = coordinator(ALONE, tmp_path, [StateComponent("model", held, "global")])
    made.load_checkpoint()
    assert held.loaded["n"] == 1
    assert made.last_load.fell_back_from == (str(tmp_path / "checkpoint-2"),)
    assert "checkpoint-2 is damaged and passed over" in caplog.text
    made.save_checkpoint(checkpoint_id="2")
    quarantined = [p for p in tmp_path.iterdir() if p.name.startswith(".quarantined-2-")]
    assert len(quarantined) == 2, "the folder and the reason"
    assert load(tmp_path, {"w": torch.zeros(200, 100), "n": 0}).loaded["n"] == 0


def test_when_every_checkpoint_is_damaged_nothing_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="no committed checkpoint"):
        load(tmp_path, {})
    save(tmp_path, {"w": torch.arange(3)})
    manifest = tmp_path / "checkpoint-1" / "checkpoint_manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-3])
    with pytest.raises(CorruptCheckpointError, match="every checkpoint in .* is damaged.*its own digest"):
        load(tmp_path, {})


def test_a_root_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="/proc/nowhere"):
        save(Path("/proc/nowhere"), {"w": torch.arange(3)})
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="in the way|Not a directory|File exists"):
        save(tmp_path / "file", {"w": torch.arange(3)})


def test_a_path_given_for_a_save_names_the_folder_and_the_id(tmp_path: Path) -> None:
    made = coordinator(ALONE, tmp_path / "root", [StateComponent("model", Held({"w": torch.arange(3)}), "global")])
    assert made.save_checkpoint(tmp_path / "other" / "checkpoint-x7") == str(tmp_path / "other" / "checkpoint-x7")
    with pytest.raises(ConfigurationError, match="must be checkpoint-<id>"):
        made.save_checkpoint(tmp_path / "other" / "x7")
    with pytest.raises(ConfigurationError, match="agree"):
        made.save_checkpoint(tmp_path / "other" / "checkpoint-x7", checkpoint_id="8")
    assert Path(made.save_checkpoint()).name.startswith("checkpoint-20")


def test_what_a_killed_save_of_the_same_run_left_is_cleared_by_its_next_save(tmp_path: Path) -> None:
    made = coordinator(ALONE, tmp_path, [StateComponent("model", Held({"w": torch.arange(3)}), "global")])
    made.save_checkpoint(checkpoint_id="1")
    left = tmp_path / ".unpublished-2-0123abcd"
    left.mkdir()
    (left / "index-00000.json").write_text("{")
    owner = {"host": "h", "pid": 1, "run_id": str(tmp_path)}
    (tmp_path / ".unpublished-2-0123abcd.owner.json").write_text(json.dumps(owner))
    made.save_checkpoint(checkpoint_id="3")
    made.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-3"]


@sampled("backend", [*BACKENDS, "kimi-engine"], 2)
@pytest.mark.parametrize("saves", [{}, {"mode": "async", "when_busy": "queue"}])
def test_a_closed_coordinator_has_given_all_descriptors_back(
    tmp_path: Path, backend: str, saves: dict[str, str]
) -> None:
    closed, counts = [], []
    gc.disable()  # close() gives them back, not the collector
    try:
        for number in range(3):
            state = Held({f"w{i}": torch.randn(300, 300) for i in range(5)})
            made = coordinator(
                ALONE,
                tmp_path / str(number),
                [StateComponent("model", state, "global")],
                backend=KimiEngineBackend() if backend == "kimi-engine" else backend,
                saves=SaveSettings(**saves),
            )
            for checkpoint_id in ("a", "b", "c"):
                made.save_checkpoint(checkpoint_id=checkpoint_id)
            made.wait()
            made.load_checkpoint()
            made.close()
            closed.append(made)
            counts.append(psutil.Process().num_fds())
            until = time.monotonic() + 5
            while counts[-1] > counts[0] and time.monotonic() < until:  # the thread that wrote may be about to end
                time.sleep(0.01)
                counts[-1] = psutil.Process().num_fds()
    finally:
        gc.enable()
    assert max(counts) == counts[0]


GIVEN = {"backend": "zarr", "strategy": "direct", "device": "cpu"}


def made(root: Path, components: Any = None, groups: Any = None, topology: Any = ALONE, **options: Any) -> Any:
    parts = [StateComponent("model", Held({"w": torch.arange(6.0)}), "global")] if components is None else components
    return CheckpointCoordinator(parts, groups, topology, root, **{**GIVEN, **options})


@pytest.mark.parametrize("backend", ["zarr", "tensorstore", "kimi-engine"])
@pytest.mark.parametrize("strategy", ["direct", "two-stage"])
def test_names_numbers_and_nothing_at_all_are_taken_for_what_they_mean(
    tmp_path: Path, backend: str, strategy: str
) -> None:
    with made(str(tmp_path), topology=None, backend=backend, strategy=strategy) as saving:
        assert saving.save_checkpoint(checkpoint_id=5) == str(tmp_path / "checkpoint-00000005")
        assert saving.save_checkpoint(tmp_path / "checkpoint-00000006", 6) == str(tmp_path / "checkpoint-00000006")
    store = {"zarr": "zarr", "tensorstore": "ocdbt", "kimi-engine": "safetensors"}[backend]
    assert {entry.store for entry in read_manifest(tmp_path / "checkpoint-00000005").arrays.values()} == {store}
    held = Held({"w": torch.zeros(6)})
    with made(tmp_path, iter([StateComponent("model", held, "global")]), {}, None, strategy=strategy) as loading:
        loading.load_checkpoint(str(tmp_path / "checkpoint-00000005"))
    assert same_bits(held.state["w"], torch.arange(6.0))


def test_without_a_topology_a_process_of_several_that_have_not_met_is_not_taken_for_one_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(
        ConfigurationError, match=r"WORLD_SIZE is 4: call torch\.distributed\.init_process_group first, or"
    ):
        made(tmp_path, topology=None)


class NoBackend: ...


WRONG = [
    ({"backend": "zar"}, "backend is 'zar'; expected one of zarr, tensorstore, kimi-engine, or an object such as ZarrBackend()"),
    ({"backend": ZarrBackend}, "backend is the class ZarrBackend; expected one of zarr, "),
    ({"backend": NoBackend()}, "backend is a NoBackend; expected one of zarr, "),
    ({"backend": None}, "backend is None; expected one of zarr, "),
    ({"strategy": "two_stage"}, "strategy is 'two_stage'; expected one of direct, two-stage, or an object such as "),
    ({"strategy": ZarrBackend()}, "strategy is a ZarrBackend; expected one of direct, two-stage, "),
    ({"device": "cuda:1"}, "device is 'cuda:1'; expected one of cpu, cuda, npu, without a number, or Device("),
    ({"device": torch.device("cpu")}, "device is a device; expected the type of a device, such as cpu, or a ckpt.memory.device"),
    ({"topology": 4}, "topology is 4; expected a ckpt.ranks.topology.Topology, or None for the ranks of torch.distributed"),
    ({"root": 5}, "output_dir is 5; expected the path of a folder, as a string or a Path"),
    ({"root": None}, "output_dir is None; expected the path of a folder"),
    ({"root": ""}, "output_dir is ''; expected the path of a folder"),
    ({"components": {"model": Held({})}}, "state_components is a dict; expected a list of StateComponent, each with its key"),
    ({"components": StateComponent("model", Held({}), "global")}, "state_components is a StateComponent; expected a list of "),
    ({"components": [torch.nn.Linear(1, 1)]}, "state_components[0] is a Linear; expected a StateComponent(key, object, "),
    ({"components": "model"}, "state_components is 'model'; expected a list of StateComponent"),
    ({"groups": [0]}, "process_groups is a list; expected a dictionary: name -> torch process group, or the global ranks"),
    ({"groups": {"tp": 0}}, "process_groups['tp'] is 0; expected a dictionary: name -> "),
    ({"groups": {"tp": ["0"]}}, "process_groups['tp'] is a list; expected a dictionary: name -> "),
    ({"saves": {"mode": "async"}}, "saves is a dict; expected one of sync, async, or a SaveSettings, such as SaveSettings(mode='async')"),
    ({"saves": SaveSettings}, "saves is the class SaveSettings; expected one of sync, async"),
    *(
        ({"keep_last": number}, f"keep_last is {number!r}; expected a whole number of at least 1, or None to keep every checkpoint")
        for number in (True, 0, -1, 2.0, "2")
    ),
    ({"memory_budget_mib": 0.5}, "memory_budget_mib is 0.5; expected a whole number of MiB, or None for no limit"),
    ({"memory_budget_mib": 68}, "memory_budget_mib=68: expected at least 69"),
    ({"packed_mib": 4}, "packed_mib is no argument any more: one budget of a rank bounds all host memory beside the state; "),
    ({"verfy": False}, "verfy=False: there is no such setting; did you mean verify?"),
    ({"loads": {"verify": False}}, "loads is a dict; expected a LoadSettings, such as LoadSettings(verify=False)"),
    ({"stale_s": "60"}, "stale_s is '60'; expected a number of seconds from 0 on"),
    ({"stale_s": float("nan")}, "stale_s is nan; expected a number of seconds from 0 on"),
    ({"retry_s": -1}, "retry_s is -1; expected a number of seconds from 0 on"),
    ({"verify": "no"}, "verify is 'no'; expected True or False"),
    ({"overwrite": 1}, "overwrite is 1; expected True or False"),
    ({"allow_pickle": None}, "allow_pickle is None; expected True or False"),
    ({"config_text": {}}, "config_text is a dict; expected a string, or None"),
    ({"pattern_check": "x"}, "pattern_check=x: expected one of warn, error, off"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "says"), WRONG, ids=lambda value: next(iter(value)) if isinstance(value, dict) else ""
)
def test_what_an_argument_cannot_be_is_said_when_the_coordinator_is_made(
    tmp_path: Path, given: dict[str, Any], says: str
) -> None:
    options = {"root": tmp_path / "root", **given}
    with pytest.raises(ConfigurationError) as refused:
        made(options.pop("root"), **options)
    assert str(refused.value).startswith(says)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda one: one.save_checkpoint(checkpoint_id=-1),
            "checkpoint_id is -1; expected a name, or a number from 0 on",
        ),
        (lambda one: one.save_checkpoint(checkpoint_id=True), "checkpoint_id is True; expected a name, or a number"),
        (lambda one: one.save_checkpoint(checkpoint_id=1.5), "checkpoint_id is 1.5; expected a name, or a number"),
        (lambda one: one.save_checkpoint(checkpoint_id=""), "checkpoint_id is ''; expected a name, or a number"),
        (lambda one: one.save_checkpoint(5), "checkpoint_path is 5; expected the path of a folder"),
        (
            lambda one: one.save_checkpoint("100"),
            "checkpoint_path 100 with checkpoint_id None: the last part of the path must be checkpoint-<id>, and agree with the id where "
            "both are given; give such a path, or for step 100 only checkpoint_id=100",
        ),
        (lambda one: one.save_checkpoint(validate="yes"), "validate is 'yes'; expected True or False"),
        (lambda one: one.load_checkpoint(5), "checkpoint_path is 5; expected the path of a folder"),
        (lambda one: one.load_checkpoint(strict="log_all"), "strict is 'log_all'; expected True or False"),
    ],
)
def test_what_an_argument_cannot_be_is_said_when_a_checkpoint_is_saved_or_loaded(
    tmp_path: Path, call: Any, says: str
) -> None:
    with made(tmp_path) as one, pytest.raises(ConfigurationError) as refused:
        call(one)
    assert str(refused.value).startswith(says)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"overlap": "yes"}, "saves.overlap is 'yes'; expected True or False"),
        ({"writer_cores": "2"}, "saves.writer_cores is '2'; expected a number"),
        ({"grace_s": None, "incremental": 1}, "saves.incremental is 1; expected True or False"),
    ],
)
def test_settings_of_saves_of_a_wrong_type_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        SaveSettings(mode="async", **settings)
    assert str(refused.value).startswith(says)


def test_a_component_whose_key_is_no_string_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="component key 5 may hold letters"):
        StateComponent(5, Held({}), "global")  # type: ignore[arg-type]


def _rows_of(topology: Topology, whole: dict[str, torch.Tensor]) -> dict[str, ShardedTensor]:
    """This rank's rows of each tensor."""
    ends = [len(next(iter(whole.values()))) * rank // topology.world_size for rank in range(topology.world_size + 1)]
    first, end = ends[topology.rank : topology.rank + 2]
    return {name: ShardedTensor.at(name, one[first:end].clone(), one.shape, (first, 0)) for name, one in whole.items()}


@pytest.mark.parametrize("num_loading", [1, 2, 3])
def test_small_tensors_that_are_encoded_together_load_whole_and_in_other_rows(tmp_path: Path, num_loading: int) -> None:
    """A packed array is decoded as a row of elements, from which each rank's box is cut."""
    whole = {name: random_bits((7, 5), torch.float32, seed) for seed, name in enumerate(("v", "w"))}
    backend = ZarrBackend(compressors=[{"name": "zstd", "configuration": {"level": 1, "checksum": False}}])

    def component(rows: dict[str, ShardedTensor]) -> StateComponent:
        return StateComponent("model", Held(rows), "sharded")

    def save(topology: Topology) -> None:
        coordinator(topology, tmp_path, [component(_rows_of(topology, whole))], backend=backend).save_checkpoint(
            checkpoint_id="1"
        )

    def load(topology: Topology) -> None:
        blank = _rows_of(topology, {name: torch.zeros_like(one) for name, one in whole.items()})
        coordinator(topology, tmp_path, [component(blank)], backend=backend).load_checkpoint()
        for name, wanted in _rows_of(topology, whole).items():
            assert same_bits(blank[name].data, wanted.data), name

    run_threads(2, save)
    assert not json.loads((tmp_path / "checkpoint-1" / "index-00000.json").read_text())["chunks"].popitem()[1][0][-1]
    run_threads(num_loading, load)


@pytest.mark.parametrize("slow", [0, 2])
def test_reports_name_the_rank_that_took_longest(tmp_path: Path, slow: int) -> None:
    def reports(topology: Topology) -> tuple[int | None, int | None]:
        class Slow(ZarrBackend):
            def writer(self, *args: Any, **options: Any) -> Any:
                pause()
                return super().writer(*args, **options)

        def pause() -> None:
            if topology.rank == slow:
                time.sleep(0.3)

        def read_at(*args: Any) -> int:
            pause()
            return os.preadv(*args)

        state = Held({"w": torch.full((4,), float(topology.rank))})
        components = [StateComponent("own", state, "per_rank")]
        run = coordinator(topology, tmp_path, components, backend=Slow(), strategy=DirectLoad(read_at=read_at))
        run.save_checkpoint(checkpoint_id="1")
        run.load_checkpoint()
        assert run.last_save is not None and run.last_load is not None
        return run.last_save.slowest_rank, run.last_load.slowest_rank

    assert run_threads(3, reports) == [(slow, slow)] * 3


def test_a_single_rank_is_not_called_the_slowest(tmp_path: Path) -> None:
    run = coordinator(Topology.alone(), tmp_path, [StateComponent("own", Held({"n": 1}), "per_rank")])
    run.save_checkpoint(checkpoint_id="1")
    run.load_checkpoint()
    assert run.last_save is not None and run.last_load is not None
    assert run.last_save.slowest_rank is run.last_load.slowest_rank is None
    assert "slowest" not in str(run.last_save)
    assert str(replace(run.last_save, save_s=2.5, blocked_s=2.5, slowest_rank=2)).endswith(" GB/s, rank 2 slowest")
