"""`torch.distributed.checkpoint` with our writer and reader, in one process."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import ckpt
from ckpt.errors import CheckpointExistsError, CheckpointGoneError, ConfigurationError, CorruptCheckpointError
from ckpt.integrations.dcp import CkptReader, CkptWriter
from tests.support.states import ALL_DTYPES, random_bits, same_bits

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled, )?unavailable or uninitialized")


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


def nested_state() -> dict[str, Any]:
    return {
        "z": {"b": torch.arange(3), "a": {"n": 1, "t": torch.arange(2.0)}},
        "list": [torch.arange(2), 5, {"y": torch.arange(4), "x": None}],
        "numbers": [1, [2]],
        "tuple": (
            torch.arange(5),
            "a",
            {"c": torch.arange(6.0), "d": (torch.nn.Parameter(torch.ones(2)), float("inf"))},
        ),
        "parameter": torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).t()),
        "list of tuples": [(torch.arange(7), 1), 2],
        "deque": deque([torch.arange(8)], 3),
        "a.b": torch.zeros(0, 3),
        "numbered": {1: torch.arange(3), 2: "two"},
    }


def saved_both_ways(state: dict[str, Any], folder: Path) -> tuple[dcp.StorageReader, dcp.StorageReader]:
    dcp.save(state, checkpoint_id=folder / "dcp")
    dcp.save(state, storage_writer=CkptWriter(folder / "ckpt"))
    return dcp.FileSystemReader(folder / "dcp"), CkptReader(folder / "ckpt")


@pytest.mark.parametrize("keys", [None, {"z"}, {"z.a"}, {"list", "tuple"}])
def test_all_or_a_part_is_loaded_without_a_state_dict_as_by_dcps_reader(tmp_path: Path, keys: set[str] | None) -> None:
    expected, found = (
        _load_state_dict_from_keys(keys, storage_reader=one) for one in saved_both_ways(nested_state(), tmp_path)
    )
    assert described(found) == described(expected)


@pytest.mark.parametrize("saved_by", ["Checkpointer", "ckpt.save"])
def test_what_others_of_this_package_saved_is_nested_as_dcp_would_save_it(tmp_path: Path, saved_by: str) -> None:
    class Holder:
        def state_dict(self) -> dict[str, Any]:
            return nested_state()

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError("it is not loaded")

    model = torch.nn.Linear(2, 1)
    state = {"model": model.state_dict(), "holder": nested_state()}
    if saved_by == "ckpt.save":
        ckpt.save(state, tmp_path / "ckpt")
    else:
        with ckpt.Checkpointer(tmp_path, model=model, holder=Holder(), save_rng=False, on_sigterm=False) as checkpoints:
            checkpoints.save(1)
    path = next(tmp_path.glob("c*"))
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    expected = _load_state_dict_from_keys({"model", "holder"}, storage_reader=dcp.FileSystemReader(tmp_path / "dcp"))
    assert described(_load_state_dict_from_keys({"model", "holder"}, storage_reader=CkptReader(path))) == described(
        expected
    )


def test_containers_that_dcp_does_not_enter_come_back_with_their_tensors(tmp_path: Path) -> None:
    for reader in saved_both_ways(nested_state(), tmp_path):
        into = {"tuple": (), "list of tuples": [], "deque": None}
        dcp.load(into, storage_reader=reader)
        assert described(into) == described({key: nested_state()[key] for key in into})


def test_a_planner_that_does_not_flatten_gives_back_dictionaries(tmp_path: Path) -> None:
    state = {"w": torch.arange(3), "options": {"lr": 0.1, "more": {}}, "none": {}, "pair": (torch.arange(2), 1)}
    flat: dict[str, Any] = {"flatten_state_dict": False, "flatten_sharded_tensors": False}
    dcp.save(state, storage_writer=CkptWriter(tmp_path / "saved"), planner=dcp.DefaultSavePlanner(**flat))
    into = {"w": torch.zeros(3, dtype=torch.int64), "options": None, "none": None, "pair": None}
    dcp.load(into, storage_reader=CkptReader(tmp_path / "saved"), planner=dcp.DefaultLoadPlanner(**flat))
    assert described(into) == described(state)


@pytest.mark.parametrize(
    ("state", "options", "said"),
    [
        ({"v": (1, {torch.arange(2)})}, {}, r"state: v\[1\]\[0\] is a tensor inside of a set"),
        ({"v": (torch.arange(2), slice(1))}, {}, r"state: v\.1 is a builtins\.slice, which is neither"),
        (
            {"v": (torch.arange(2),), "v.0": torch.arange(3)},
            {},
            r"two entries of the state dict have the joined key 'v\.0'",
        ),
        ({"v": (torch.eye(2).to_sparse(),)}, {}, r"state: v\.0 is of the layout torch\.sparse_coo, which is not kept"),
        (
            {"m": {"w": torch.arange(2)}},
            {"flatten_state_dict": False},
            "state: m is a dict that holds tensors, and the planner does not",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused_in_a_true_sentence(
    tmp_path: Path, state: dict[str, Any], options: dict[str, bool], said: str
) -> None:
    with pytest.raises(CheckpointException, match=said):
        dcp.save(state, storage_writer=CkptWriter(tmp_path / "saved"), planner=dcp.DefaultSavePlanner(**options))
    assert not (tmp_path / "saved").exists()


def described(value: Any) -> list[tuple[str, ...]]:
    """All of a value in order: types, keys, and the bits of tensors."""
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        return [(kind, str(value.dtype), str(value.tolist()))]
    if isinstance(value, dict):
        return [(kind, *map(repr, value))] + [line for one in value.values() for line in described(one)]
    if isinstance(value, list | tuple | deque):
        return [(kind, str(len(value)))] + [line for one in value for line in described(one)]
    return [(kind, repr(value))]


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
