"""`ckpt.save` and `ckpt.load` of a state dict, on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import zarr

import ckpt
from ckpt.errors import CheckpointExistsError, CheckpointNotFoundError, ConfigurationError, MissingStateError
from tests.support.states import ALL_DTYPES, random_bits, same_bits


def state_of_everything() -> dict[str, Any]:
    tensors = {str(dtype).removeprefix("torch."): random_bits((3, 5), dtype, 1) for dtype in ALL_DTYPES}
    plain = {"step": 7, "names": ["a", "b"], "nested": {"pair": (1, 2.5), "none": None, "bytes": b"\x00\xff"}}
    return {"tensors": tensors, "list": [torch.arange(3), {"deep": torch.tensor(1.5)}], **plain}


@pytest.mark.parametrize("format", ["zarr", "tensorstore", "kimi-engine"])
def test_a_state_dict_comes_back_as_it_was(tmp_path: Path, format: str) -> None:
    state = state_of_everything()
    report = ckpt.save(state, tmp_path / "new" / "folder", format=format)
    loaded = ckpt.load(tmp_path / "new" / "folder")
    tensors, plain = loaded.pop("tensors"), {key: loaded[key] for key in ("step", "names", "nested")}
    assert all(same_bits(tensors[name], one) for name, one in state["tensors"].items())
    assert plain == {key: state[key] for key in plain}
    assert torch.equal(loaded["list"][0], torch.arange(3))
    assert float(loaded["list"][1]["deep"]) == 1.5
    assert report.path == str(tmp_path / "new" / "folder")
    assert report.bytes == sum(file.stat().st_size for file in (tmp_path / "new").rglob("*") if file.is_file())
    assert str(report).startswith("saved folder: ")
    assert str(report).endswith(" GB/s")


def test_zarr_itself_reads_it(tmp_path: Path) -> None:
    weight = torch.arange(2.0**16).reshape(256, 256)  # of its own file: small tensors are packed
    ckpt.save({"weight": weight}, tmp_path / "saved")
    assert torch.equal(torch.from_numpy(zarr.open_group(tmp_path / "saved", mode="r")["state/weight"][:]), weight)


def test_a_module_and_its_optimizer_are_filled_in_place(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    ckpt.save({"model": model.state_dict(), "step": 3, "nested": {"rate": 0.5}}, tmp_path / "saved")
    weight = model.weight.detach().clone()
    model.weight.data.zero_()
    into = {"model": model.state_dict(), "step": 0, "nested": {"rate": 0.0}}
    loaded = ckpt.load(tmp_path / "saved", into)
    assert torch.equal(model.weight.data, weight)
    assert (into["step"], into["nested"]) == (3, {"rate": 0.5})
    assert loaded["model"]["weight"].data_ptr() == model.weight.data_ptr()


def test_tied_tensors_come_back_under_all_of_their_names(tmp_path: Path) -> None:
    weight = torch.arange(6.0)
    ckpt.save({"model": {"embedding": weight, "head": weight}, "again": [weight]}, tmp_path / "saved")
    loaded = ckpt.load(tmp_path / "saved")
    assert torch.equal(loaded["model"]["head"], weight)
    assert (
        loaded["model"]["head"].data_ptr() == loaded["model"]["embedding"].data_ptr() == loaded["again"][0].data_ptr()
    )


def test_keys_that_do_not_match_are_named_and_can_be_left_out(tmp_path: Path) -> None:
    ckpt.save({"a": torch.zeros(2), "b": torch.ones(2)}, tmp_path / "saved")
    into = {"b": torch.zeros(2), "c": torch.full((2,), 5.0)}
    with pytest.raises(MissingStateError, match="only in the checkpoint: a; only wanted: c"):
        ckpt.load(tmp_path / "saved", into)
    ckpt.load(tmp_path / "saved", into, strict=False)
    assert into["b"].tolist() == [1.0, 1.0]
    assert into["c"].tolist() == [5.0, 5.0]


def test_the_checkpoints_of_a_checkpointer_are_loaded_too(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    with ckpt.Checkpointer(
        tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.25)
    ) as checkpoints:
        path = checkpoints.save(1)
    assert path is not None
    loaded = ckpt.load(path)
    assert torch.equal(loaded["model"]["weight"], model.weight)
    assert loaded["optimizer"]["param_groups"]["weight"]["lr"] == 0.25
    weights = {"model": {name: torch.empty_like(one) for name, one in model.state_dict().items()}}
    ckpt.load(path, weights)
    assert torch.equal(weights["model"]["bias"], model.bias)


def test_a_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    ckpt.save({"a": torch.zeros(2)}, tmp_path / "saved")
    with pytest.raises(CheckpointExistsError, match="holds a checkpoint already"):
        ckpt.save({"a": torch.ones(2)}, tmp_path / "saved")
    assert ckpt.load(tmp_path / "saved")["a"].tolist() == [0.0, 0.0]


def test_what_a_save_cannot_keep_and_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="state is a list; expected a state dict"):
        ckpt.save([torch.zeros(2)], tmp_path / "saved")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="object"):
        ckpt.save({"a": object()}, tmp_path / "saved")
    with pytest.raises(CheckpointNotFoundError, match="is not a checkpoint"):
        ckpt.load(tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match="into is a Tensor; expected a state dict"):
        ckpt.load(tmp_path, torch.zeros(2))  # type: ignore[arg-type]
    assert not (tmp_path / "saved").exists()
