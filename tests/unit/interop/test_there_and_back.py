"""A checkpoint of ours that became one of DCP, or one file of torch.save, becomes what it was: copies, ranks, ties, notes and values."""

from __future__ import annotations

import json
import logging
import shutil
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckpt
from ckpt import Checkpointer, StateComponent
from ckpt.catalog.verify import verify_checkpoint
from ckpt.cli.converting import ConvertKeys, LoadKeys, convert_on_ranks, run_of
from ckpt.dist_checkpointing import ShardedTensor
from ckpt.errors import CorruptCheckpointError
from ckpt.format.export_records import RECORDS_NAME, ExportRecords
from ckpt.format.manifest import CheckpointManifest
from ckpt.interop.comparing import compare
from ckpt.interop.registry import source_at
from ckpt.loading.direct import DirectLoad
from ckpt.ranks.topology import Topology
from ckpt.storage.stored import read_manifest
from tests.support.covering import covering
from tests.support.dcp_runs import dcp_state, one_process_is_meant, save_by_dcp, tensors_of_all_kinds
from tests.support.dcp_runs import run_of as trained
from tests.support.ranks import run_threads
from tests.support.states import Held, coordinator, random_bits
from tests.support.values import same_values

RANKS = 4
HOSTS = ["a", "a", "b", "b"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of four ranks on two hosts, with every sharing pattern, ties, empty tensors, a config and notes."""
    root = tmp_path_factory.mktemp("saved")
    run_threads(RANKS, _save, root, agree_s=60.0, hosts=HOSTS)
    return root / "checkpoint-7"


def _save(topology: Topology, root: Path) -> None:
    run = coordinator(topology, root, _components(topology), process_groups=_groups(topology), config_text="lr: 0.1\n")
    run.save_checkpoint(checkpoint_id="7", metrics={"loss": 0.5}, metadata={"note": "here"})


def _groups(topology: Topology) -> dict[str, list[int]]:
    return {"tp": [0, 1] if topology.rank < 2 else [2, 3]}


def _components(topology: Topology, *, empty: bool = False) -> list[StateComponent]:
    def own(seed: int) -> dict[str, Any]:
        bits = random_bits((40, 5), torch.float32, seed)
        return {"t": bits, "tied": bits, "deep": {"list": [1, (2, 3.5)], "bits": b"\x00\xff", 4: None}, "seed": seed}

    rank, shape = topology.rank, (3 * RANKS, 9000)
    tile = random_bits(shape, torch.float32, 0)[3 * rank : 3 * rank + 3].contiguous()
    states = {
        "model": ({"w": ShardedTensor.at("w", tile, shape, (3 * rank, 0)), "lr": 0.1}, "sharded", None),
        "common": (own(100) | {"none": torch.zeros(0, 3), "scalar": torch.tensor(1.5)}, "replicated", None),
        "first": (own(101), "global", None),
        "rng": (own(rank), "per_rank", None),
        "stage": (own(rank // 2), "per_group", "tp"),
        "host": (own(10 + rank // 2), "per_node", None),
        "plain": ({"step": 7, "name": "a.b/c"}, "per_rank", None),
    }
    if empty:
        states = {key: (_emptied(state), pattern, group) for key, (state, pattern, group) in states.items()}
    return [StateComponent(key, Held(state), pattern, group) for key, (state, pattern, group) in states.items()]


def _emptied(node: Any) -> Any:
    """The same state with other tensors and values."""
    if isinstance(node, dict):
        made = {key: _emptied(one) for key, one in node.items()}
        return made | {"tied": made["t"]} if "tied" in node else made
    if isinstance(node, ShardedTensor):
        return replace(node, data=torch.zeros_like(node.data))
    return torch.zeros_like(node) if isinstance(node, torch.Tensor) else None


def convert(src: Path, dst: Path, to: str, topology: Topology | None = None) -> None:
    wanted = ConvertKeys(src=str(src), dst=str(dst), to=to, load=LoadKeys(allow_pickle=True))
    convert_on_ranks(run_of(wanted), topology or Topology.alone())


def differences(a: Path, b: Path) -> Sequence[Any]:
    sources = (source_at(path, Topology.alone(), DirectLoad(), allow_pickle=True) for path in (a, b))
    return list(compare(*sources))


def without_places(manifest: CheckpointManifest) -> dict[str, Any]:
    """What a manifest says, without where the bytes lie, and which rank wrote them."""
    tree = json.loads(manifest.to_bytes())
    for name in ("files", "manifest_digest"):
        del tree[name]
    for one in tree["components"].values():
        for name in ("ranks", "checksum", "size_bytes", "plain_in"):
            del one[name]
    for array in tree["arrays"].values():
        for name in ("store", "path", "grid", "writers", "packed_in"):
            array.pop(name, None)
    return dict(tree)


@covering(
    {"over": ["dcp", "torch"], "to": ["zarr", "tensorstore", "kimi-engine"], "ranks": [1, 3, 6]}, default=1, full=2
)
def test_it_becomes_what_it_was_on_any_number_of_ranks(
    saved: Path, tmp_path: Path, over: str, to: str, ranks: int
) -> None:
    convert(saved, tmp_path / "other", over)
    run_threads(ranks, _convert_back, tmp_path, to, agree_s=60.0)
    back = tmp_path / "back"
    assert verify_checkpoint(back) == []
    assert differences(saved, back) == []
    assert without_places(read_manifest(back)) == without_places(read_manifest(saved))
    assert (back / "config.yaml").read_bytes() == (saved / "config.yaml").read_bytes()


def _convert_back(topology: Topology, folder: Path, to: str) -> None:
    convert(folder / "other", folder / "back", to, topology)


@pytest.mark.parametrize("over", ["dcp", "torch"])
def test_every_rank_is_given_its_own_copies_from_the_export_itself_and_from_its_way_back(
    saved: Path, tmp_path: Path, over: str
) -> None:
    convert(saved, tmp_path / "other", over)
    convert(tmp_path / "other", tmp_path / "back", "zarr")
    for path in (tmp_path / "other", tmp_path / "back"):
        run_threads(RANKS, _load_and_compare, path, agree_s=60.0, hosts=HOSTS)


def _load_and_compare(topology: Topology, path: Path) -> None:
    components = _components(topology, empty=True)
    run = coordinator(topology, path.parent / "new", components, process_groups=_groups(topology), allow_pickle=True)
    run.load_checkpoint(checkpoint_path=path)
    report = run.last_load
    assert report is not None
    assert (report.checkpoint_id, report.config_text, report.metrics) == ("7", "lr: 0.1\n", {"loss": 0.5})
    for got, wanted in zip(components, _components(topology), strict=True):
        loaded = got.stateful.loaded  # type: ignore[attr-defined]
        assert same_values(_plain(loaded), _plain(wanted.stateful.state_dict())), got.key


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    return {key: one.data if isinstance(one, ShardedTensor) else one for key, one in state.items()}


def test_an_export_to_torch_tells_no_time(saved: Path, tmp_path: Path) -> None:
    """Equal states are equal files, of whichever day."""
    convert(saved, tmp_path / "all.pt", "torch")
    dates = {member.date_time for member in zipfile.ZipFile(tmp_path / "all.pt").infolist() if member.filename.endswith(RECORDS_NAME)}
    assert dates == {(1980, 1, 1, 0, 0, 0)}


def test_programs_without_ours_see_natural_names_and_nothing_else(saved: Path, tmp_path: Path) -> None:
    convert(saved, tmp_path / "dcp", "dcp")
    convert(saved, tmp_path / "all.pt", "torch")
    with one_process_is_meant():
        dcp_to_torch_save(tmp_path / "dcp", tmp_path / "by_dcp.pt")
    for file in ("by_dcp.pt", "all.pt"):
        found = torch.load(tmp_path / file, weights_only=True)
        assert list(found) == ["model", "common", "first", "rng", "stage", "host", "plain"]
        assert list(found["rng"]) == [f"rank-{rank:05d}" for rank in range(RANKS)]
        assert list(found["stage"]) == ["tp-0000", "tp-0001"]
        assert found["rng"]["rank-00002"]["seed"] == 2
    assert torch.load(tmp_path / "all.pt", weights_only=True, mmap=True)["first"]["seed"] == 101
    seen = ckpt.load(tmp_path / "dcp", allow_pickle=True)
    assert (list(seen), list(seen["rng"])) == (list(found), list(found["rng"])), "ckpt.load sees what the others do"


def test_an_export_of_an_export_still_has_all_of_it(saved: Path, tmp_path: Path) -> None:
    convert(saved, tmp_path / "dcp", "dcp")
    convert(tmp_path / "dcp", tmp_path / "all.pt", "torch")
    convert(tmp_path / "all.pt", tmp_path / "dcp again", "dcp")
    convert(tmp_path / "dcp again", tmp_path / "back", "zarr")
    assert differences(saved, tmp_path / "back") == []


def test_the_safetensors_of_one_copy_are_those_of_the_checkpoint(saved: Path, tmp_path: Path) -> None:
    convert(saved, tmp_path / "dcp", "dcp")
    for src, dst in ((saved, "direct"), (tmp_path / "dcp", "by dcp")):
        keys = ConvertKeys(src=str(src), dst=str(tmp_path / dst), to="safetensors", component="common")
        convert_on_ranks(run_of(replace(keys, load=LoadKeys(allow_pickle=True))), Topology.alone())
    direct, by_dcp = (ckpt.load(tmp_path / name / "model.safetensors") for name in ("direct", "by dcp"))
    assert same_values(direct, {key: by_dcp[key] for key in direct})


def test_what_dcp_has_saved_over_an_export_is_dcps(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    convert(saved, tmp_path / "dcp", "dcp")
    state = {"model": {"w": torch.arange(6.0)}}
    with one_process_is_meant():
        save_by_dcp(state, tmp_path / "dcp")
    with caplog.at_level(logging.WARNING, "ckpt"):
        convert(tmp_path / "dcp", tmp_path / "back", "zarr")
    assert f"{tmp_path}/dcp/{RECORDS_NAME} is not used: it describes what was here before" in caplog.text
    assert read_manifest(tmp_path / "back").world_size == 1
    assert same_values(ckpt.load(tmp_path / "back"), state)


def test_records_that_were_changed_or_do_not_fit_are_refused(saved: Path, tmp_path: Path) -> None:
    convert(saved, tmp_path / "dcp", "dcp")
    file = tmp_path / "dcp" / RECORDS_NAME
    whole = file.read_bytes()
    records = ExportRecords(**json.loads(whole))
    first = next(iter(records.names))
    path = next(iter(records.plain))
    forged = {
        "its digest is another": whole.replace(b"7", b"8", 1),
        "is not in the export": replace(records, names=records.names | {first: "none"}).to_bytes(),
        f"it lacks '{path}'": replace(records, plain={k: v for k, v in records.plain.items() if k != path}).to_bytes(),
        "its config is not the one": replace(records, config="lr: 1\n").to_bytes(),
        "it is not what it should be": b"{}",
    }
    for said, data in forged.items():
        file.write_bytes(data)
        with pytest.raises(CorruptCheckpointError, match=RECORDS_NAME) as caught:
            convert(tmp_path / "dcp", tmp_path / "back", "zarr")
        assert said in str(caught.value)
        assert not (tmp_path / "back").exists()
    file.unlink()
    convert(tmp_path / "dcp", tmp_path / "back", "zarr")  # as any checkpoint of DCP


def test_what_dcp_saved_is_the_same_after_ours(tmp_path: Path) -> None:
    """DCP, ours, DCP: the names, the nesting and all bits."""
    state = dcp_state(trained(0)) | {"all": tensors_of_all_kinds(), "deep": {"list": [torch.arange(5), {"x": 3}]}}
    save_by_dcp(state, tmp_path / "step-4")
    convert(tmp_path / "step-4", tmp_path / "ours", "zarr")
    convert(tmp_path / "ours", tmp_path / "again", "dcp")
    for name in ("step-4", "again"):
        with one_process_is_meant():
            dcp_to_torch_save(tmp_path / name, tmp_path / f"{name}.pt")
    before, after = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("step-4", "again"))
    assert same_values(before, after)
    convert(tmp_path / "again", tmp_path / "ours again", "zarr")
    assert differences(tmp_path / "ours", tmp_path / "ours again") == []
    assert without_places(read_manifest(tmp_path / "ours again")) == without_places(read_manifest(tmp_path / "ours"))


def test_a_checkpointer_goes_on_from_an_export_with_its_random_generators(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "own", **trained(0)) as checkpoints:
        path = checkpoints.save(7)
    drawn = torch.rand(3)
    assert path is not None
    convert(Path(path), tmp_path / "dcp", "dcp")
    shutil.rmtree(tmp_path / "own")
    with Checkpointer(tmp_path / "new", **trained(1), allow_pickle=True) as checkpoints:
        assert checkpoints.restore(tmp_path / "dcp") == 7
    assert torch.equal(torch.rand(3), drawn)
