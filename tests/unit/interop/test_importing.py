"""A checkpoint of another program becomes one of ours: the same bits, verified, on any number of ranks, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpt
from ckpt import Checkpointer
from ckpt.backends.base import Backend
from ckpt.backends.kimi_engine import KimiEngineBackend
from ckpt.backends.tensorstore import TensorStoreBackend
from ckpt.backends.zarr import ZarrBackend
from ckpt.catalog.verify import verify_checkpoint
from ckpt.errors import CheckpointExistsError, CorruptCheckpointError, StorageError
from ckpt.interop import importing
from ckpt.interop.importing import import_checkpoint
from ckpt.interop.registry import source_at
from ckpt.loading.direct import DirectLoad
from ckpt.ranks.topology import Topology
from ckpt.saving.writing import RankWritePlan
from ckpt.storage.stored import read_manifest
from tests.support.dcp_runs import dcp_state, require_equal, run_of, save_by_dcp, tensors_of_all_kinds
from tests.support.ranks import run_ranks
from tests.support.states import same_bits
from tests.support.values import same_values

BACKENDS: dict[str, Callable[[], Backend]] = {
    "zarr": ZarrBackend,
    "tensorstore": TensorStoreBackend,
    "kimi-engine": partial(KimiEngineBackend, pool=False),
}


def imported(src: Path, dst: Path, topology: Topology | None = None, to: str = "zarr") -> None:
    topology = topology or Topology.alone()
    import_checkpoint(source_at(src, topology, DirectLoad(), allow_pickle=True), dst, topology, BACKENDS[to]())


@pytest.mark.parametrize("to", BACKENDS)
def test_every_tensor_and_value_comes_over_to_the_bit(tmp_path: Path, to: str) -> None:
    plain = {"names": ["a", "b"], "pair": (1, 2.5), "none": None, "deep": {"list": [torch.arange(5), {"x": 3}]}}
    save_by_dcp({"model": tensors_of_all_kinds(), "other": plain}, tmp_path / "dcp")
    imported(tmp_path / "dcp", tmp_path / "ours", to=to)
    assert verify_checkpoint(tmp_path / "ours") == []
    before, after = ckpt.load(tmp_path / "dcp", allow_pickle=True), ckpt.load(tmp_path / "ours")
    assert same_values(before, after)
    assert all(same_bits(after["model"][name], tensor) for name, tensor in tensors_of_all_kinds().items())


def test_a_checkpointer_goes_on_from_it(tmp_path: Path) -> None:
    saved, live = run_of(0), run_of(1)
    save_by_dcp(dcp_state(saved), tmp_path / "step-12")
    imported(tmp_path / "step-12", tmp_path / "ours" / "12")
    with Checkpointer(tmp_path / "own", **live, save_rng=False) as checkpoints:
        checkpoints.restore(tmp_path / "ours" / "12")
    require_equal(live, saved)


def test_weights_alone_become_the_model(tmp_path: Path) -> None:
    saved, live = run_of(0)["model"], run_of(1)["model"]
    save_file(saved.state_dict(), tmp_path / "model.safetensors")
    imported(tmp_path / "model.safetensors", tmp_path / "7")
    with Checkpointer(tmp_path / "own", model=live, save_rng=False) as checkpoints:
        assert checkpoints.restore(tmp_path / "7") == 7
    assert same_values(dict(live.state_dict()), dict(saved.state_dict()))


def test_a_state_whose_names_no_component_can_have_stays_one_state_dict(tmp_path: Path) -> None:
    state = {"a b": {"w": torch.arange(3)}, "x/y": {"step": 7}}
    save_by_dcp(state, tmp_path / "dcp")
    imported(tmp_path / "dcp", tmp_path / "ours")
    assert same_values(ckpt.load(tmp_path / "ours"), state)


def _import_on_ranks(topology: Topology, folder: Path) -> None:
    imported(folder / "dcp", folder / "ours", topology)


def test_several_ranks_write_a_share_each(tmp_path: Path) -> None:
    state = {"model": {f"w{n}": torch.randint(1 << 30, (3, 1 << 18)) for n in range(4)}, "step": {"step": 3}}
    save_by_dcp(state, tmp_path / "dcp")
    run_ranks(3, _import_on_ranks, tmp_path)
    assert verify_checkpoint(tmp_path / "ours") == []
    assert read_manifest(tmp_path / "ours").components["state"].ranks == [0, 1, 2]
    assert same_values(ckpt.load(tmp_path / "ours"), state)


def _import_what_one_rank_cannot_read(topology: Topology, folder: Path) -> str:
    source = source_at(folder / "dcp", topology, DirectLoad(), allow_pickle=True)
    source.prepare = _refuse  # type: ignore[method-assign]
    with pytest.raises(CorruptCheckpointError) as refused:
        import_checkpoint(source, folder / "ours", topology, ZarrBackend())
    return str(refused.value)


def _refuse(requests: Any) -> Any:
    raise CorruptCheckpointError("the disk is bad")


def test_what_one_rank_cannot_read_ends_it_on_all_and_nothing_appears(tmp_path: Path) -> None:
    save_by_dcp({"model": {"w": torch.zeros(1 << 20)}}, tmp_path / "dcp")
    told = run_ranks(2, _import_what_one_rank_cannot_read, tmp_path)
    assert len(set(told)) == 1 and "the disk is bad" in told[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp"]


def test_a_source_that_was_cut_off_is_refused_and_nothing_appears(tmp_path: Path) -> None:
    save_by_dcp({"model": {"w": torch.arange(1 << 16)}}, tmp_path / "dcp")
    (file,) = (tmp_path / "dcp").glob("*.distcp")
    file.write_bytes(file.read_bytes()[: 1 << 18])
    with pytest.raises(CorruptCheckpointError, match=r"\.distcp"):
        imported(tmp_path / "dcp", tmp_path / "ours")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp"]


def test_what_was_written_wrong_is_found_and_nothing_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(RankWritePlan):
        @staticmethod
        def write(write_plan: RankWritePlan, job: Any, *given: Any) -> Any:  # type: ignore[override]
            result = RankWritePlan.write(write_plan, job, *given)
            chunk = next(path for path in job.folder.rglob("c/0"))
            chunk.write_bytes(bytes(chunk.stat().st_size))
            return result

    save_by_dcp({"model": {"w": torch.ones(1 << 16)}}, tmp_path / "dcp")
    monkeypatch.setattr(importing, "RankWritePlan", Forgetful)
    with pytest.raises(StorageError, match="ours is not what is read back: state: model.w"):
        imported(tmp_path / "dcp", tmp_path / "ours")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp"]


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    save_by_dcp({"a": torch.ones(1)}, tmp_path / "dcp")
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "mine").touch()
    with pytest.raises(CheckpointExistsError):
        imported(tmp_path / "dcp", tmp_path / "ours")
    assert (tmp_path / "ours" / "mine").exists()
