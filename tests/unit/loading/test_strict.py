"""What a load does where checkpoint and run differ: `strict` says what is an error, `required` whose error stops the load."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import CheckpointCoordinator, StateComponent
from ckpt.errors import CheckpointError, CorruptCheckpointError, MissingStateError, ShapeMismatchError, WorldSizeError
from ckpt.loading.report import ComponentReport, LoadReport, Misfits, Status
from ckpt.ranks.topology import Topology
from ckpt.state.statefuls import OptimizerState
from tests.support.ranks import run_threads
from tests.support.states import BACKENDS, Fitted, Held, coordinator, global_index, same_bits

ALONE = Topology.alone()
LARGE = (200, 100)  # 80 kB: an array of its own
Parts = dict[str, Any]


def made(root: Path, topology: Topology = ALONE, *, optional: tuple[str, ...] = (), backend: str = "zarr", **parts: Any) -> CheckpointCoordinator:  # fmt: skip # noqa: E501
    """A coordinator of components that are given as dictionaries, statefuls, or (stateful, pattern)."""
    components = []
    for key, part in parts.items():
        stateful, pattern = part if isinstance(part, tuple) else (part, "replicated")
        stateful = Held(stateful) if isinstance(stateful, dict) else stateful
        components.append(StateComponent(key, stateful, pattern, required=key not in optional))
    return coordinator(topology, root, components, backend=backend)


def save(root: Path, **parts: Any) -> None:
    made(root, **parts).save_checkpoint(checkpoint_id="1")


def load(coordinator: CheckpointCoordinator, *, strict: bool = True) -> dict[str, ComponentReport]:
    coordinator.load_checkpoint(strict=strict)
    assert coordinator.last_load is not None
    return {report.key: report for report in coordinator.last_load.components}


def test_a_tensor_that_does_not_fit_keeps_its_value_where_the_load_is_not_strict(tmp_path: Path) -> None:
    save(tmp_path, model={"a": global_index((6, 5)), "b": global_index((4,)), "c": global_index((3,))})
    held = Fitted({"a": torch.full((5, 6), -1.0), "b": torch.full((4,), -1.0, dtype=torch.float64), "c": torch.zeros(3)})
    with pytest.raises(ShapeMismatchError, match=r"model: a: the checkpoint holds global shape \[6, 5\]"):
        load(made(tmp_path, model=held))
    assert held.loaded is None
    report = load(made(tmp_path, model=held), strict=False)["model"]
    assert torch.all(held.state["a"] == -1) and torch.all(held.state["b"] == -1)
    assert same_bits(held.state["c"], global_index((3,)))
    assert report.status is Status.PARTLY
    assert report.misfits == Misfits(
        unfit={
            "a": "found float32 [6, 5], expected float32 [5, 6]",
            "b": "found float32 [4], expected float64 [4]: give cast=True",
        }
    )
    assert (report.restored, report.wanted) == (3, 37)


def test_a_plain_value_that_was_not_saved_stays_where_the_load_is_not_strict(tmp_path: Path) -> None:
    """Else an object that is no module gets what was saved."""
    save(tmp_path, scheduler={"step": 7, "best": {"loss": 1.5}})
    held = Held({"step": 0, "best": None, "warmup": {"steps": 100}})
    assert load(made(tmp_path, scheduler=held))["scheduler"].misfits == Misfits()
    assert held.loaded == {"step": 7, "best": {"loss": 1.5}}
    report = load(made(tmp_path, scheduler=held), strict=False)["scheduler"]
    assert held.loaded == {"step": 7, "best": {"loss": 1.5}, "warmup": {"steps": 100}}
    assert (report.restored, report.wanted, report.misfits.only_wanted) == (2, 3, ("warmup.steps",))


def test_a_value_where_a_tensor_is_wanted_does_not_fit(tmp_path: Path) -> None:
    save(tmp_path, x={"step": 3, "in": {"a": 1, "t": global_index((4,))}, "w": global_index((2,))})
    held = Fitted({"step": torch.tensor(0.0), "in": torch.tensor(0.0), "w": torch.zeros(2)})
    report = load(made(tmp_path, x=held), strict=False)["x"]
    assert report.misfits.unfit == {"step": "found a plain value, expected a tensor"}
    assert (report.misfits.only_saved, report.misfits.only_wanted) == (("in.t",), ("in",))
    assert held.loaded == {"step": held.state["step"], "in": held.state["in"], "w": held.state["w"]}
    assert same_bits(held.state["w"], global_index((2,)))


@pytest.mark.parametrize("required", [True, False])
def test_a_component_of_which_nothing_matches_is_not_taken_for_restored(tmp_path: Path, required: bool) -> None:
    save(tmp_path, model=torch.nn.Linear(3, 2), other={"n": 1})
    optional = () if required else ("model",)
    model = torch.nn.Embedding(5, 7)
    coordinator = made(tmp_path, optional=optional, model=model, other={"n": 0})
    if required:
        with pytest.raises(
            MissingStateError, match="component model: nothing of it matches: only in the checkpoint: bias"
        ):
            load(coordinator, strict=False)
        return
    report = load(coordinator, strict=False)["model"]
    assert report.status is Status.SKIPPED
    assert str(report).startswith(
        "model: skipped: nothing of it matches: only in the checkpoint: bias; does not fit: weight"
    )


@pytest.mark.parametrize("strict", [True, False])
def test_a_load_that_restores_nothing_at_all_is_an_error(tmp_path: Path, strict: bool) -> None:
    save(tmp_path, model={"w": global_index((3,))})
    coordinator = made(tmp_path, optional=("ema",), ema={"w": torch.zeros(3)})
    with pytest.raises(MissingStateError, match="nothing could be restored: ema: skipped: not in the checkpoint"):
        load(coordinator, strict=strict)


def test_a_load_whose_every_component_fails_at_the_end_is_an_error_too(tmp_path: Path) -> None:
    save(tmp_path, cache={"x": 1})
    coordinator = made(tmp_path, optional=("cache",), cache=Refusing({"x": 0}, refuses=True))
    with pytest.raises(MissingStateError, match="nothing could be restored: cache: failed: RuntimeError: no room"):
        load(coordinator)


def test_a_component_that_was_saved_empty_is_restored_empty(tmp_path: Path) -> None:
    save(tmp_path, cache={}, model={"w": global_index((3,))})
    reports = load(made(tmp_path, cache={}, model={"w": torch.zeros(3)}), strict=False)
    assert (reports["cache"].status, reports["cache"].fraction) == (Status.RESTORED, 1.0)


def test_a_component_that_only_the_checkpoint_has_is_refused_unless_the_load_is_not_strict(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, model={"w": global_index((3,))}, optimizer={"m": global_index((4,))}, ema={"w": torch.ones(3)})
    held = Held({"w": torch.zeros(3)})
    with pytest.raises(
        MissingStateError,
        match=r"components only in the checkpoint: optimizer, ema; this run has model\. Give each its object, or leave it out on ",
    ):
        load(made(tmp_path, model=held))
    assert held.loaded is None, "nothing was read"
    reports = load(made(tmp_path, model=held), strict=False)
    assert reports["model"].status is Status.RESTORED and same_bits(held.state["w"], global_index((3,)))
    assert [str(reports[key]) for key in ("optimizer", "ema")] == [
        "optimizer: skipped: only in the checkpoint",
        "ema: skipped: only in the checkpoint",
    ]
    assert "component optimizer: skipped: only in the checkpoint" in caplog.text


def test_components_that_are_left_out_on_purpose_are_restored_neither_here_nor_missed(tmp_path: Path) -> None:
    save(tmp_path, model={"w": global_index((3,))}, optimizer={"m": global_index((4,))}, ema={"w": torch.ones(3)})
    held = Held({"w": torch.zeros(3)}), Held({"w": torch.zeros(3)})
    coordinator = made(tmp_path, model=held[0], ema=held[1])
    coordinator.load_checkpoint(leave_out=["optimizer", "ema"])
    assert coordinator.last_load is not None
    assert [one.key for one in coordinator.last_load.components] == ["model"]
    assert same_bits(held[0].state["w"], global_index((3,))) and held[1].loaded is None


def test_an_optional_component_that_does_not_match_is_left_out_whole_in_a_strict_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, model={"w": global_index((3,))}, ema=torch.nn.Linear(3, 2))
    ema = torch.nn.Linear(3, 2, bias=False)
    ema.extra = torch.nn.Linear(1, 1)
    before = {name: tensor.clone() for name, tensor in ema.state_dict().items()}
    coordinator = made(tmp_path, optional=("ema", "old"), ema=ema, old={"x": 1}, model={"w": torch.zeros(3)})
    reports = load(coordinator)
    assert {key: report.status.value for key, report in reports.items()} == {
        "ema": "skipped",
        "old": "skipped",
        "model": "restored",
    }
    assert reports["ema"].misfits == Misfits(("bias",), ("extra.weight", "extra.bias"))
    assert all(same_bits(tensor, before[name]) for name, tensor in ema.state_dict().items())
    assert caplog.messages == [
        "component ema: skipped: only in the checkpoint: bias; only wanted: extra.weight, extra.bias",
        "component old: skipped: not in the checkpoint",
    ]
    assert coordinator.last_load is not None
    assert coordinator.last_load.summary().splitlines()[2] == "model: restored, all 3 elements"


def trained(module: torch.nn.Linear) -> OptimizerState:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module(torch.ones(1, module.in_features)).sum().backward()
    optimizer.step()
    return OptimizerState(optimizer, module)


def fresh(module: torch.nn.Linear) -> OptimizerState:
    return OptimizerState(torch.optim.AdamW(module.parameters(), lr=0.5), module)


def test_an_optimizer_that_prepared_for_a_load_that_failed_has_no_state(tmp_path: Path) -> None:
    linear = torch.nn.Linear(3, 2)
    save(tmp_path, optimizer=trained(linear), model={"w": global_index((3,))})
    optimizer = fresh(linear)
    with pytest.raises(ShapeMismatchError, match="model: w"):
        load(made(tmp_path, optimizer=optimizer, model=Fitted({"w": torch.zeros(4)})))
    assert not optimizer.optimizer.state
    assert load(made(tmp_path, optimizer=optimizer, model={"w": torch.zeros(3)}))["optimizer"].status is Status.RESTORED


def test_an_optional_optimizer_that_does_not_fit_keeps_just_the_state_it_had(tmp_path: Path) -> None:
    save(tmp_path, optimizer=trained(torch.nn.Linear(3, 2)), model={"w": global_index((3,))})
    module = torch.nn.Linear(4, 2)
    optimizer = fresh(module)
    optimizer.optimizer.state[module.weight]["exp_avg"] = torch.full((2, 4), 7.0)
    coordinator = made(tmp_path, optional=("optimizer",), optimizer=optimizer, model={"w": torch.zeros(3)})
    report = load(coordinator)["optimizer"]
    assert str(report).startswith("optimizer: skipped: state.weight.exp_avg: the checkpoint holds global shape [2, 3]")
    assert list(optimizer.optimizer.state) == [module.weight]
    assert list(optimizer.optimizer.state[module.weight]) == ["exp_avg"]
    assert torch.all(optimizer.optimizer.state[module.weight]["exp_avg"] == 7)


def test_an_optimizer_with_a_new_parameter_goes_on_with_the_others_in_a_lenient_load(tmp_path: Path) -> None:
    saved = trained(torch.nn.Linear(3, 2))
    save(tmp_path, optimizer=saved)
    module = torch.nn.Linear(3, 2)
    module.extra = torch.nn.Parameter(torch.zeros(4))
    optimizer = fresh(module)
    with pytest.raises(MissingStateError, match=r"only wanted: 7 \(param_groups\.extra\.lr, "):
        load(made(tmp_path, optimizer=optimizer))
    report = load(made(tmp_path, optimizer=optimizer), strict=False)["optimizer"]
    assert report.misfits.only_wanted[0] == "param_groups.extra.lr"
    assert optimizer.optimizer.param_groups[0]["lr"] == 0.1
    assert module.extra not in optimizer.optimizer.state
    before = saved.optimizer.state[saved.optimizer.param_groups[0]["params"][0]]
    for field, value in optimizer.optimizer.state[module.weight].items():
        assert same_bits(value, before[field])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def chunk_of(root: Path, component: str, backend: str) -> Path:
    if backend == "safetensors":
        return root / "checkpoint-1" / component / "rank-00000-float32.safetensors"
    if backend != "ocdbt":
        return root / "checkpoint-1" / component / "w" / "c" / "0" / "0"
    return max((root / "checkpoint-1" / "arrays.ocdbt").rglob("*"), key=lambda p: p.stat().st_size * p.is_file())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("required", [True, False])
def test_a_damaged_component_is_an_error_if_required_and_otherwise_reported_and_left_as_it_was(
    tmp_path: Path, backend: str, required: bool
) -> None:
    # The damaged one alone has an array of its own, so it is its bytes that are hit in OCDBT's one file too.
    save(tmp_path, ema={"w": global_index(LARGE), "n": 1}, model={"w": global_index((3,))}, backend=backend)
    flip(chunk_of(tmp_path, "ema", backend))
    ema, model = Held({"w": torch.full(LARGE, -1.0), "n": 0}), Held({"w": torch.zeros(3)})
    coordinator = made(tmp_path, optional=() if required else ("ema",), ema=ema, model=model)
    if required:
        with pytest.raises(CorruptCheckpointError, match="ema: w: bytes"):
            load(coordinator)
        return
    for strict in (True, False):
        report = load(coordinator, strict=strict)["ema"]
        assert report.status is Status.FAILED
        assert report.reason.startswith("ema: w: bytes")
        assert ema.loaded is None and torch.all(ema.state["w"] == -1)
        assert same_bits(model.state["w"], global_index((3,)))


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
@pytest.mark.parametrize(
    "file", ["ema/plain.json", "ema/w/zarr.json", "ema/w/c/0/0", "ema/rank-00000-float32.safetensors"]
)
@pytest.mark.parametrize("rank_1_has_it", [False, True])
def test_damage_in_any_file_of_an_optional_component_is_that_components(
    tmp_path: Path, damage: Callable[[Path], None], file: str, rank_1_has_it: bool
) -> None:
    state = {"w": global_index(LARGE), "n": 1}
    backend = "safetensors" if file.endswith("safetensors") else "zarr"
    save(tmp_path, ema=state, model={"w": global_index((3,))}, backend=backend)
    damage(tmp_path / "checkpoint-1" / file)

    def load_on(topology: Topology) -> tuple[str, bool]:
        model = Held({"w": torch.zeros(3)})
        coordinator = made(tmp_path, topology, optional=("ema",), ema={"w": torch.zeros(LARGE), "n": 0}, model=model)
        status = load(coordinator)["ema"].status.value
        return status, same_bits(model.state["w"], global_index((3,)))

    assert run_threads(2 if rank_1_has_it else 1, load_on) == [("failed", True)] * (1 + rank_1_has_it)
    with pytest.raises(CorruptCheckpointError):
        load(made(tmp_path, ema={"w": torch.zeros(LARGE), "n": 0}, model={"w": torch.zeros(3)}))


class Refusing(Held):
    def __init__(self, state: Parts, *, refuses: bool) -> None:
        super().__init__(state)
        self.refuses = refuses

    def load_state_dict(self, state_dict: Parts) -> None:
        if self.refuses:
            raise RuntimeError("no room")
        super().load_state_dict(state_dict)


@pytest.mark.parametrize("required", [True, False])
def test_an_object_that_refuses_its_state_on_one_rank_stops_all_or_is_reported_by_all(
    tmp_path: Path, required: bool
) -> None:
    def load_on(topology: Topology) -> tuple[str, bool]:
        cache, model = Refusing({"x": 0}, refuses=topology.rank == 1), Held({"w": torch.zeros(3)})
        coordinator = made(tmp_path, topology, optional=() if required else ("cache",), cache=cache, model=model)
        try:
            said = str(load(coordinator)["cache"])
        except CheckpointError as error:
            said = str(error)
        return said, model.loaded is not None

    save(tmp_path, cache={"x": 1}, model={"w": global_index((3,))})
    if required:
        failed = "load of checkpoint-1 failed in phase apply on rank 1: cache: RuntimeError: no room"
        assert [said for said, _ in run_threads(3, load_on)] == [failed] * 3
    else:
        assert run_threads(3, load_on) == [("cache: failed: RuntimeError: no room (rank 1)", True)] * 3


def save_per_rank(topology: Topology, root: Path) -> None:
    cache = {"w": torch.full((4,), float(topology.rank)), **({"extra": torch.ones(2)} if topology.rank == 1 else {})}
    module = torch.nn.ParameterDict(cache)
    made(root, topology, cache=(module, "per_rank"), model={"w": global_index((3,))}).save_checkpoint(checkpoint_id="1")


def test_a_mismatch_on_one_rank_leaves_an_optional_component_out_on_all(tmp_path: Path) -> None:
    def load_on(topology: Topology) -> tuple[str, list[float]]:
        module = torch.nn.ParameterDict({"w": torch.full((4,), -1.0)})
        coordinator = made(
            tmp_path, topology, optional=("cache",), cache=(module, "per_rank"), model={"w": torch.zeros(3)}
        )
        return str(load(coordinator)["cache"]), module["w"].tolist()

    run_threads(2, save_per_rank, tmp_path)
    assert run_threads(2, load_on) == [("cache: skipped: only in the checkpoint: extra", [-1.0] * 4)] * 2


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("declared", ["per_rank", "global"])
def test_copies_of_other_ranks_or_another_pattern_are_skipped_where_that_is_allowed(
    tmp_path: Path, required: bool, declared: str
) -> None:
    def load_on(topology: Topology, strict: bool) -> str:
        cache, model = Held({"w": torch.full((4,), -1.0)}), Held({"w": torch.zeros(3)})
        coordinator = made(
            tmp_path, topology, optional=() if required else ("cache",), cache=(cache, declared), model=model
        )
        try:
            report = load(coordinator, strict=strict)["cache"]
        except (WorldSizeError, MissingStateError) as error:
            return str(error)
        assert cache.loaded is None and torch.all(cache.state["w"] == -1)
        assert same_bits(model.state["w"], global_index((3,)))
        return str(report)

    run_threads(2, save_per_rank, tmp_path)
    why = "is per_rank and was saved by 2 ranks, this run has 3" if declared == "per_rank" else "was saved as per_rank"
    for strict in (True, False):
        said = run_threads(3, load_on, strict)
        assert len(set(said)) == 1
        start = "load of checkpoint-1: component cache" if required and strict else "cache: skipped:"
        assert said[0].startswith(f"{start} {why}")


def test_elements_are_summed_over_ranks_and_only_all_of_them_are_called_all(tmp_path: Path) -> None:
    save(tmp_path, model={"w": global_index((999,)), "n": 1})

    def load_on(topology: Topology) -> str:
        state = {"w": torch.zeros(999), "n": 0, **({"new": torch.zeros(1)} if topology.rank == 2 else {})}
        return str(load(made(tmp_path, topology, model=state), strict=False)["model"])

    assert run_threads(3, load_on) == ["model: partly restored, 3,000 of 3,001 elements (99%); only wanted: new"] * 3


def test_a_summary_names_five_keys_and_counts_the_rest() -> None:
    misfits = Misfits(tuple("abcdefg"), ("x",), {"y": "found int8 [2], expected int8 [3]"})
    part = ComponentReport("model", Status.PARTLY, restored=1_000_000, wanted=1_066_240, misfits=misfits)
    changed = ComponentReport("rng", Status.RESTORED, restored=12, wanted=12, changed=True)
    absent = ComponentReport("ema", Status.SKIPPED, "component ema is not there")
    report = LoadReport("/c/checkpoint-1", "1", 0.5, 10, 20, "", components=(part, changed, absent))
    assert report.summary().splitlines() == [
        "model: partly restored, 1,000,000 of 1,066,240 elements (93%); only in the checkpoint: 7 (a, b, c, d, e and 2 more); "
        "only wanted: x; does not fit: y (found int8 [2], expected int8 [3])",
        "rng: restored, all 12 elements, adapted to these ranks",
        "ema: skipped: is not there",
    ]


@pytest.mark.parametrize(("number", "said"), [(0, "0 elements"), (1, "1 element"), (1_200, "all 1,200 elements")])
def test_a_number_of_elements_is_english(number: int, said: str) -> None:
    assert str(ComponentReport("m", Status.RESTORED, restored=number, wanted=number)) == f"m: restored, {said}"


def test_nothing_is_logged_of_components_that_are_wholly_restored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, model={"w": global_index((3,))})
    with caplog.at_level(logging.INFO):
        load(made(tmp_path, model={"w": torch.zeros(3)}), strict=False)
    assert caplog.messages == []


@pytest.mark.parametrize("owner_of", [lambda n: n // 20, lambda n: n % 3, lambda n: 2], ids=["runs", "in turn", "one"])
def test_what_no_rank_of_a_sharded_component_claims_is_named_however_the_others_share_the_rest(
    tmp_path: Path, owner_of: Callable[[int], int]
) -> None:
    everything = {f"t{number:02}": global_index((number,)) for number in range(60)}
    save(tmp_path, model=(everything, "sharded"))
    left = {"t00", "t17", "t59"}

    def load_own(topology: Topology) -> tuple[str, Misfits]:
        mine = {
            name: torch.zeros_like(tensor)
            for number, (name, tensor) in enumerate(everything.items())
            if owner_of(number) == topology.rank and name not in left
        }
        one = made(tmp_path, topology, model=(mine, "sharded"))
        with pytest.raises(MissingStateError) as refusal:
            one.load_checkpoint()
        report = load(one, strict=False)["model"]
        assert all(torch.equal(tensor, everything[name]) for name, tensor in mine.items())
        return str(refusal.value), report.misfits

    for said, misfits in run_threads(3, load_own):
        assert "t00" in said and "t17" in said and "t59" in said and "t01" not in said
        assert misfits == Misfits(("t00", "t17", "t59"))
