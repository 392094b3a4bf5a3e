"""`torch.distributed.checkpoint` with our writer and reader, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import ckpt
from ckpt.errors import CheckpointExistsError, CheckpointGoneError, ConfigurationError, CorruptCheckpointError
from ckpt.integrations.dcp import CkptReader, CkptWriter
from tests.states import ALL_DTYPES, random_bits, same_bits

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


def state_of_a_program(seed: int) -> dict[str, Any]:
    tensors = {str(dtype).removeprefix("torch."): random_bits((4, 3), dtype, seed) for dtype in ALL_DTYPES}
    return {
        "model": tensors | {"scalar": torch.tensor(float(seed))},
        "blocks": [{"weight": torch.arange(4.0) + seed}, {"weight": torch.arange(5.0) - seed}],
        "step": seed,
        "rates": {"lr": seed / 2, "name": "a", "bytes": bytes([seed])},
    }


def leaves_of(state: dict[str, Any]) -> list[torch.Tensor]:
    return [*state["model"].values(), *(block["weight"] for block in state["blocks"])]


@pytest.mark.parametrize("format", ["zarr", "tensorstore", "kimi-engine"])
def test_a_program_saves_and_loads_by_one_argument(tmp_path: Path, format: str) -> None:
    saved, loaded = state_of_a_program(1), state_of_a_program(2)
    dcp.save(saved, storage_writer=CkptWriter(tmp_path / "saved", format=format))
    dcp.load(loaded, storage_reader=CkptReader(tmp_path / "saved"))
    assert all(same_bits(a, b) for a, b in zip(leaves_of(saved), leaves_of(loaded), strict=True))
    assert (loaded["step"], loaded["rates"]) == (1, {"lr": 0.5, "name": "a", "bytes": b"\x01"})


def test_the_path_may_come_as_checkpoint_id_and_one_writer_serves_many_saves(tmp_path: Path) -> None:
    writer, reader = CkptWriter(), CkptReader()
    for step in (1, 2):
        dcp.save(state_of_a_program(step), storage_writer=writer, checkpoint_id=str(tmp_path / str(step)))
    for step in (2, 1):
        loaded = state_of_a_program(3)
        dcp.load(loaded, storage_reader=reader, checkpoint_id=str(tmp_path / str(step)))
        assert loaded["step"] == step
        assert all(same_bits(a, b) for a, b in zip(leaves_of(loaded), leaves_of(state_of_a_program(step)), strict=True))


def test_a_planner_that_caches_its_plan_saves_all_of_each_step(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        writer = CkptWriter(tmp_path / str(step))
        dcp.save(state_of_a_program(step), storage_writer=writer, planner=planner)
    for step in (1, 2, 3):
        loaded = state_of_a_program(4)
        dcp.load(loaded, storage_reader=CkptReader(tmp_path / str(step)))
        assert all(same_bits(a, b) for a, b in zip(leaves_of(loaded), leaves_of(state_of_a_program(step)), strict=True))


def test_it_is_saved_in_the_background_by_dcp_itself(tmp_path: Path) -> None:
    saved = state_of_a_program(1)
    dcp.async_save(saved, storage_writer=CkptWriter(tmp_path / "saved")).result()
    assert ckpt.load(tmp_path / "saved")["step"] == 1


def test_what_dcp_saved_is_loaded_by_name_as_it_was_nested(tmp_path: Path) -> None:
    dcp.save(state_of_a_program(1), storage_writer=CkptWriter(tmp_path / "saved"))
    loaded = ckpt.load(tmp_path / "saved")
    assert same_bits(loaded["model"]["bfloat16"], state_of_a_program(1)["model"]["bfloat16"])
    assert loaded["blocks"][1]["weight"].tolist() == [-1.0, 0.0, 1.0, 2.0, 3.0]
    assert loaded["rates"] == {"lr": 0.5, "name": "a", "bytes": b"\x01"}


def test_a_dcp_program_loads_weights_that_a_checkpointer_saved(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    with ckpt.Checkpointer(tmp_path, model=model, optimizer=optimizer) as checkpoints:
        path = checkpoints.save(1)
    assert path is not None
    state = {
        "model": {name: torch.empty_like(one) for name, one in model.state_dict().items()},
        "optimizer": {"state": {"0.weight": {"exp_avg": torch.empty(2, 3)}}},
    }
    dcp.load(state, storage_reader=CkptReader(path))
    assert torch.equal(state["model"]["1.weight"], model[1].weight)
    moments = optimizer.state[model[0].weight]["exp_avg"]
    assert torch.equal(state["optimizer"]["state"]["0.weight"]["exp_avg"], moments)  # type: ignore[index]


def test_another_type_is_converted_as_dcp_does(tmp_path: Path) -> None:
    dcp.save({"a": torch.arange(4.0)}, storage_writer=CkptWriter(tmp_path / "saved"))
    loaded = {"a": torch.zeros(4, dtype=torch.bfloat16)}
    dcp.load(loaded, storage_reader=CkptReader(tmp_path / "saved"))
    assert loaded["a"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_damage_is_found_and_nothing_is_overwritten_or_pickled(tmp_path: Path) -> None:
    dcp.save({"a": torch.arange(4000.0)}, storage_writer=CkptWriter(tmp_path / "saved"))
    with pytest.raises(dcp.api.CheckpointException) as raised:
        dcp.save({"a": torch.arange(4.0)}, storage_writer=CkptWriter(tmp_path / "saved"))
    assert any(isinstance(error, CheckpointExistsError) for error, _ in raised.value.failures.values())
    with pytest.raises(dcp.api.CheckpointException) as raised:
        dcp.save({"a": object()}, storage_writer=CkptWriter(tmp_path / "other"))
    assert any(isinstance(error, ConfigurationError) for error, _ in raised.value.failures.values())
    file = max((tmp_path / "saved").rglob("*"), key=lambda one: one.stat().st_size if one.is_file() else 0)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(dcp.api.CheckpointException) as raised:
        dcp.load({"a": torch.zeros(4000)}, storage_reader=CkptReader(tmp_path / "saved"))
    assert any(isinstance(error, CorruptCheckpointError) for error, _ in raised.value.failures.values())


def test_a_path_is_needed(tmp_path: Path) -> None:
    with pytest.raises((ConfigurationError, dcp.api.CheckpointException), match=r"give CkptWriter\(path\)"):
        dcp.save({"a": torch.zeros(1)}, storage_writer=CkptWriter())


class _RemovedBeforeItIsRead(CkptReader):
    """A reader whose checkpoint another process removes once its metadata is read."""

    def read_data(self, *args: Any, **kwargs: Any) -> Any:
        assert self._folder is not None
        self._folder.rename(self._folder.with_name("removed"))
        return super().read_data(*args, **kwargs)


def test_a_checkpoint_that_is_removed_while_it_is_read_is_gone_and_not_damaged(tmp_path: Path) -> None:
    dcp.save(state_of_a_program(1), storage_writer=CkptWriter(tmp_path / "saved"))
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state_of_a_program(2), storage_reader=_RemovedBeforeItIsRead(tmp_path / "saved"))
    assert [type(error[0]) for error in caught.value.failures.values()] == [CheckpointGoneError]
