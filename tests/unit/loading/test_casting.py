"""Loads into another floating-point type: `cast`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckpt
from ckpt import Checkpointer, StateComponent
from ckpt.errors import ConfigurationError, CorruptCheckpointError, MissingStateError, ShapeMismatchError
from ckpt.format.box import whole
from ckpt.loading import strategy
from ckpt.loading.strategy import Cast, ReadRequest, batches_of, readings_of
from ckpt.ranks.topology import Topology
from tests.support.covering import sampled
from tests.support.states import Fitted, coordinator, spreading

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn)


def net(seed: int, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 3)).to(dtype)


def trained(model: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(2, 7, dtype=next(model.parameters()).dtype)).sum().backward()
        optimizer.step()
    return optimizer


def converted(model: torch.nn.Module, dtype: torch.dtype) -> list[torch.Tensor]:
    return [tensor.to(dtype) for tensor in model.state_dict().values()]


@pytest.mark.parametrize("into", FLOATS)
@pytest.mark.parametrize("saved", FLOATS)
@sampled("load", ["direct", "two-stage"])
def test_a_model_takes_what_was_saved_in_another_type(load: Any, saved: torch.dtype, into: torch.dtype, tmp_path: Path) -> None:
    model, fresh = net(0).to(saved), net(1).to(into)
    with Checkpointer(tmp_path, model=model, save_rng=False) as saving:
        saving.save(1)
    with Checkpointer(tmp_path, model=fresh, save_rng=False, load=load) as loading:
        restored = loading.restore(cast=True)
    assert all(map(torch.equal, [t.float() for t in fresh.state_dict().values()], [t.float() for t in converted(model, into)]))
    names = f"{str(saved).removeprefix('torch.')} to {str(into).removeprefix('torch.')}"
    assert (f"converted from {names}" in restored.summary()) == (saved != into)


def test_without_cast_the_refusal_names_it_and_nothing_changes(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, model=net(0, torch.bfloat16), save_rng=False) as saving:
        saving.save(1)
    fresh, own = net(1), net(1)
    with Checkpointer(tmp_path, model=fresh, save_rng=False) as loading:
        with pytest.raises(ShapeMismatchError, match="bfloat16, this run asks for float32.*cast=True"):
            loading.restore()
        with pytest.raises(MissingStateError, match="cast=True"):
            loading.restore(strict=False)
    assert all(map(torch.equal, fresh.state_dict().values(), own.state_dict().values()))


def test_moments_keep_their_type_unless_the_optimizer_is_named(tmp_path: Path) -> None:
    model = net(0)
    optimizer = trained(model)
    with Checkpointer(tmp_path, model=model, optimizer=optimizer) as saving:
        saving.save(1)

    def loaded(cast: Any) -> dict[str, Any]:
        fresh = net(1, torch.bfloat16)
        own = torch.optim.AdamW(fresh.parameters())
        with Checkpointer(tmp_path, model=fresh, optimizer=own) as loading:
            loading.restore(cast=cast)
        assert all(map(torch.equal, fresh.state_dict().values(), converted(model, torch.bfloat16)))
        return own.state_dict()["state"][0]

    saved = optimizer.state_dict()["state"][0]
    for name, value in loaded(True).items():
        assert value.dtype == saved[name].dtype and torch.equal(value, saved[name])
    named = loaded(["model", "optimizer"])
    assert named["step"].dtype == torch.float32 and torch.equal(named["step"], saved["step"])
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(named[name], saved[name].bfloat16())


def test_a_state_dict_is_filled_in_its_own_type(tmp_path: Path) -> None:
    ckpt.save({"w": torch.arange(6.0), "n": torch.arange(3), "x": 1}, tmp_path / "one")
    into = {"w": torch.zeros(6, dtype=torch.bfloat16), "n": torch.zeros(3, dtype=torch.int64), "x": 0}
    memory = into["w"].data_ptr()  # type: ignore[attr-defined]
    ckpt.load(tmp_path / "one", into=into, cast=True)
    assert torch.equal(into["w"], torch.arange(6.0).bfloat16())  # type: ignore[arg-type]
    assert into["w"].data_ptr() == memory and into["x"] == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("saved", "into"),
    [(torch.int64, torch.float32), (torch.float32, torch.int32), (torch.int8, torch.int16), (torch.bool, torch.float32)],
)
def test_whole_numbers_are_not_converted(saved: torch.dtype, into: torch.dtype, tmp_path: Path) -> None:
    ckpt.save({"w": torch.ones(3).to(saved)}, tmp_path / "one")
    with pytest.raises(ShapeMismatchError, match=r"asks for \w+\. Restore with the data type it was saved in\.$"):
        ckpt.load(tmp_path / "one", into={"w": torch.zeros(3).to(into)}, cast=True)


@pytest.mark.parametrize(("cast", "said"), [("model", "keys of components"), (["other"], "which are model"), (1, "keys of components")])
def test_bad_values_are_refused(cast: Any, said: str, tmp_path: Path) -> None:
    with Checkpointer(tmp_path, model=net(0), save_rng=False) as run:
        run.save(1)
        with pytest.raises(ConfigurationError, match=said):
            run.restore(cast=cast)
    with pytest.raises(ConfigurationError, match="give into"):
        ckpt.load(tmp_path / "checkpoint-00000001", cast=True)


@pytest.mark.parametrize("required", [True, False])
def test_a_damaged_tensor_is_not_taken_for_a_converted_one(required: bool, tmp_path: Path) -> None:
    with Topology.alone() as alone:
        saved = StateComponent("a", Fitted({"w": torch.arange(5000.0)}), "replicated")
        other = StateComponent("b", Fitted({"w": torch.arange(4.0)}), "replicated")
        with coordinator(alone, tmp_path, [saved, other]) as saving:
            path = Path(saving.save_checkpoint(checkpoint_id=1))
        chunk = max((one for one in path.rglob("*") if one.is_file()), key=lambda one: one.stat().st_size)
        data = bytearray(chunk.read_bytes())
        data[len(data) // 2] ^= 1
        chunk.write_bytes(data)
        own = torch.zeros(5000, dtype=torch.float64)
        parts = [
            StateComponent("a", Fitted({"w": own}), "replicated", required=required),
            StateComponent("b", Fitted({"w": torch.zeros(4)}), "replicated"),
        ]
        with coordinator(alone, tmp_path, parts) as loading:
            if required:
                with pytest.raises(CorruptCheckpointError):
                    loading.load_checkpoint(path, cast=True)
            else:
                loading.load_checkpoint(path, cast=True)
                assert "a: failed" in loading.last_load.summary()  # type: ignore[union-attr]
                assert not own.any()


def test_an_optional_component_is_converted(tmp_path: Path) -> None:
    with Topology.alone() as alone:
        with coordinator(alone, tmp_path, [StateComponent("a", Fitted({"w": torch.arange(9.0)}), "replicated")]) as saving:
            saving.save_checkpoint(checkpoint_id=1)
        own = torch.zeros(9, dtype=torch.float16)
        part = StateComponent("a", Fitted({"w": own}), "replicated", required=False)
        with coordinator(alone, tmp_path, [part], strategy=spreading()) as loading:
            loading.load_checkpoint(cast=True)
        assert torch.equal(own, torch.arange(9.0).half())


@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=8),
    scratch=st.integers(1, 4096),
    most=st.integers(1, 20),
)
def test_batches_cover_every_element_once_and_fit_their_scratch_memory(shapes: list[list[int]], scratch: int, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strategy, "SCRATCH_BYTES", scratch)
        patch.setattr(strategy, "MOST_BATCHES", most)
        outs = [torch.full(shape, -1.0, dtype=torch.float64) for shape in shapes]
        wanted = [torch.arange(out.numel(), dtype=torch.bfloat16).view(out.shape) for out in outs]
        casts = [Cast(ReadRequest(str(n), str(n), whole(tuple(out.shape)), out), torch.bfloat16) for n, out in enumerate(outs)]
        for requests, convert in readings_of(batches_of(casts)):
            for request in requests:
                assert request.out.dtype == torch.bfloat16 and tuple(request.out.shape) == request.box.shape
                request.out.copy_(wanted[int(request.name)][request.box.slices])
            convert()
    assert all(torch.equal(out, want.double()) for out, want in zip(outs, wanted, strict=True))
