"""Group instances and nodes of any shape: every member gets its own instance's bits back, and the manifest names them all."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt import SharingPattern, StateComponent
from ckpt.errors import CheckpointError, ConfigurationError, MissingStateError, ReplicationError, WorldSizeError
from ckpt.format.manifest import CheckpointManifest
from ckpt.ranks.topology import Topology
from ckpt.state.statefuls import ModelState, OptimizerState
from ckpt.storage.stored import read_manifest
from tests.support.covering import sampled
from tests.support.ranks import run_threads
from tests.support.states import Held, coordinator, random_bits, same_bits

Instances = tuple[tuple[int, ...], ...]
OLD, NEW = "old-machine-", "new-machine-"


@dataclass(frozen=True)
class World:
    """Ranks, where they live, and the groups they form.

    Attributes:
        host_of: number of each rank's host.
        groups: name -> a partition of the ranks.
    """

    host_of: tuple[int, ...]
    groups: Mapping[str, Instances]

    @property
    def size(self) -> int:
        return len(self.host_of)

    @property
    def nodes(self) -> Instances:
        """Ranks per host, in the order of their lowest ranks."""
        return _by_label(self.host_of)

    def hosts(self, start: str) -> list[str]:
        return [f"{start}{host}" for host in self.host_of]


def _by_label(labels: Sequence[int]) -> Instances:
    found: dict[int, list[int]] = {}
    for rank, label in enumerate(labels):
        found.setdefault(label, []).append(rank)
    return tuple(sorted(tuple(ranks) for ranks in found.values()))


@st.composite
def partitions(draw: st.DrawFn, world_size: int) -> Instances:
    """Blocks of neighbours, strides across them, or any partition at all."""
    kind = draw(st.sampled_from(["blocks", "strides", "any"]))
    if kind == "any":
        return _by_label(draw(st.lists(st.integers(0, 3), min_size=world_size, max_size=world_size)))
    parts = draw(st.integers(1, world_size))
    return _by_label([rank * parts // world_size if kind == "blocks" else rank % parts for rank in range(world_size)])


@st.composite
def hierarchies(draw: st.DrawFn, world_size: int) -> dict[str, Instances]:
    """Groups by name: independent ones, and one whose instances lie inside those of the one before."""
    outer, inner, other = (draw(partitions(world_size)) for _ in range(3))
    label = {rank: number for number, ranks in enumerate(outer) for rank in ranks}
    finer = {rank: number for number, ranks in enumerate(inner) for rank in ranks}
    nested = _by_label([label[rank] * world_size + finer[rank] for rank in range(world_size)])
    return {"outer": outer, "nested": nested, "other": other}


@st.composite
def worlds(draw: st.DrawFn, fewest: int, most: int) -> World:
    size = draw(st.integers(fewest, most))
    neighbours = draw(st.booleans())
    hosts = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    return World(tuple(sorted(hosts) if neighbours else hosts), draw(hierarchies(size)))


def declared(world: World) -> dict[str, tuple[str, str | None, Instances]]:
    """Component -> its pattern, its group, and the sets of ranks that hold one state."""
    each = tuple((rank,) for rank in range(world.size))
    by_group = {f"of-{name}": ("per_group", name, instances) for name, instances in world.groups.items()}
    return {"node": ("per_node", None, world.nodes), "rank": ("per_rank", None, each), **by_group}


def state_of(component: str, ranks: Sequence[int]) -> dict[str, Any]:
    """What a set of ranks holds: bits and a plain value that no other set of any component has."""
    seed = sum(3**rank for rank in ranks) * 31 + sum(component.encode())
    shape = (5 + len(ranks), 3)  # instances need not have equal shapes
    state: dict[str, Any] = {
        "w": random_bits(shape, torch.bfloat16, seed),
        "ranks": list(ranks),
        f"only.{min(ranks)}": seed,
    }
    if component == "of-outer":
        state["large"] = random_bits((130, 150 + len(ranks)), torch.float32, seed)  # an array of its own
    return state


def _components(topology: Topology, world: World, *, blank: bool) -> list[StateComponent]:
    found = []
    for key, (pattern, group, sets) in declared(world).items():
        state = state_of(key, next(ranks for ranks in sets if topology.rank in ranks))
        if blank:
            state = {k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else None for k, v in state.items()}
        found.append(
            StateComponent(
                key, Held(state), pattern, process_group_name=group, validate_replication=not blank and key != "rank"
            )
        )
    return found


def _groups(topology: Topology, groups: Mapping[str, Instances]) -> dict[str, list[int]]:
    """Each group as a rank gives it: the instance it is a member of."""
    return {name: list(next(i for i in instances if topology.rank in i)) for name, instances in groups.items()}


def _save(topology: Topology, root: Path, world: World) -> None:
    components = _components(topology, world, blank=False)
    made = coordinator(topology, root, components, process_groups=_groups(topology, world.groups))
    made.save_checkpoint(checkpoint_id="1")
    supposed = Topology.supposed(topology.rank, world.hosts(OLD), world.groups)
    for name in ("rank", "world_size", "nodes", "node_rank", "local_rank", "groups"):
        assert getattr(supposed, name) == getattr(topology, name), name


def _load(topology: Topology, root: Path, world: World) -> dict[str, dict[Any, Any] | None]:
    components = _components(topology, world, blank=True)
    coordinator(topology, root, components, process_groups=_groups(topology, world.groups)).load_checkpoint()
    return {one.key: one.stateful.loaded for one in components}  # type: ignore[attr-defined]


def _check_manifest(manifest: CheckpointManifest, world: World) -> None:
    assert manifest.topology == {
        "nodes": [list(ranks) for ranks in world.nodes],
        "groups": {name: [list(ranks) for ranks in instances] for name, instances in world.groups.items()},
    }
    for key, (pattern, group, sets) in declared(world).items():
        component = manifest.components[key]
        assert (component.sharing_pattern, component.group_name) == (pattern, group)
        assert component.replicated_across == (None if pattern == "per_rank" else list(range(world.size)))
        # A state of every set, written by one of its members.
        assert len(component.plain_in) == len(sets)
        writers = [component.plain_in[prefix] for prefix in sorted(component.plain_in)]
        assert all(writer in ranks for writer, ranks in zip(writers, sets, strict=True))
        assert len({name.split("/")[0] for name in manifest.arrays_of(key)}) == len(sets)


def _round_trip(world: World) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        run_threads(world.size, _save, root, world, hosts=world.hosts(OLD))
        _check_manifest(read_manifest(root / "checkpoint-1"), world)
        loaded = run_threads(world.size, _load, root, world, hosts=world.hosts(NEW))
    for rank, by_component in enumerate(loaded):
        for key, (_, _, sets) in declared(world).items():
            wanted, got = state_of(key, next(ranks for ranks in sets if rank in ranks)), by_component[key]
            assert got is not None and got.keys() == wanted.keys(), (rank, key)
            for name, value in wanted.items():
                same = same_bits(got[name], value) if isinstance(value, torch.Tensor) else got[name] == value
                assert same, (rank, key, name)


@given(world=worlds(4, 6))
@settings(max_examples=5, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
def test_every_member_gets_its_own_instance_s_bits_in_any_hierarchy_of_groups_and_nodes(world: World) -> None:
    _round_trip(world)


@pytest.mark.full
@given(world=worlds(6, 12))
@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
def test_many_more_hierarchies_round_trip(world: World) -> None:
    _round_trip(world)


def _load_sentence(topology: Topology, root: Path, world: World, key: str) -> str:
    pattern, group, _ = declared(world)[key]
    others = declared(world).keys() - {key}
    one = StateComponent(key, Held({}), pattern, process_group_name=group)
    try:
        coordinator(topology, root, [one], process_groups=_groups(topology, world.groups)).load_checkpoint(
            leave_out=others
        )
    except WorldSizeError as error:
        return str(error)
    return "loaded"


def test_the_same_number_of_ranks_in_other_instances_or_on_other_nodes_is_a_change(tmp_path: Path) -> None:
    """Twice four ranks: as blocks and as strides, the same sizes and the same numbers of instances and nodes."""
    blocks, strides = ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 2, 4, 6), (1, 3, 5, 7))
    saved = World((0,) * 4 + (1,) * 4, {"outer": blocks, "nested": blocks, "other": strides})
    run_threads(8, _save, tmp_path, saved, hosts=saved.hosts(OLD))
    turned = World((0, 1) * 4, {"outer": strides, "nested": strides, "other": strides})
    for key, says in {
        "of-outer": "saved by groups outer = [[0, 1, 2, 3], [4, 5, 6, 7]], this run has [[0, 2, 4, 6], [1, 3, 5, 7]]",
        "node": "saved by nodes of ranks [[0, 1, 2, 3], [4, 5, 6, 7]], this run has [[0, 2, 4, 6], [1, 3, 5, 7]]",
    }.items():
        assert all(
            says in said for said in run_threads(8, _load_sentence, tmp_path, turned, key, hosts=turned.hosts(OLD))
        )
    for key in ("of-other", "rank"):
        assert set(run_threads(8, _load_sentence, tmp_path, turned, key, hosts=turned.hosts(OLD))) == {"loaded"}


@pytest.mark.parametrize("name", ["../dp", "a/b", "", "d p"])
def test_a_group_whose_name_cannot_be_a_folder_is_refused(name: str) -> None:
    def name_it(topology: Topology) -> None:
        with pytest.raises(
            ConfigurationError, match="letters, digits, '_' and '-' only, for its instances are folders"
        ):
            topology.name_groups({name: [0, 1]})

    run_threads(2, name_it)


def test_a_run_that_is_only_supposed_agrees_on_nothing() -> None:
    with pytest.raises(AssertionError, match="only supposed"), Topology.supposed(0, ["a", "b"], {}).phase("write"):
        pass
    with pytest.raises(ConfigurationError, match="process group dp: rank 2 is in no instance of it"):
        Topology.supposed(0, ["a"] * 3, {"dp": [[0, 1]]})


# The pattern it was saved under, and the one that is declared


PATTERNS = [pattern.value for pattern in SharingPattern]
COMMON = ("global", "replicated", "sharded")


def _one(topology: Topology, pattern: str, state: dict[str, Any]) -> StateComponent:
    return StateComponent("x", Held(state), pattern, process_group_name="pair" if pattern == "per_group" else None)


def _save_under_each_and_load_under_each(topology: Topology, root: Path) -> None:
    pair = {"pair": [0, 1] if topology.rank < 2 else [2]}
    for pattern in PATTERNS:
        one = _one(topology, pattern, {"w": torch.arange(12.0)})
        coordinator(topology, root / pattern, [one], process_groups=pair).save_checkpoint(checkpoint_id="1")
    for saved, now in product(PATTERNS, PATTERNS):
        w = torch.full((12,), -1.0)
        made = coordinator(topology, root / saved, [_one(topology, now, {"w": w})], process_groups=pair)
        if saved == now or {saved, now} <= set(COMMON):
            made.load_checkpoint()
            assert same_bits(w, torch.arange(12.0)), (saved, now)
            continue
        with pytest.raises(MissingStateError) as caught:
            made.load_checkpoint()
        assert f"component x was saved as {saved} and is now declared {now}, so it is not clear whose" in str(
            caught.value
        )
        assert f"declare component x with sharing_pattern={saved}" in str(caught.value)
        assert torch.all(w == -1), "nothing may have been read"


def test_the_pattern_in_the_manifest_wins_or_a_changed_declaration_is_refused(tmp_path: Path) -> None:
    run_threads(3, _save_under_each_and_load_under_each, tmp_path)


# Grids of plain modules: data parallel times tensor parallel, data parallel times pipeline


GRIDS = {"dp x tp": (2, 4), "dp x tp, wide": (4, 2), "dp x pp": (2, 4), "dp x pp, wide": (4, 2)}
"""Ranks along the data axis and along the inner one; inner neighbours are next to each other."""
STEPS = 3


class Grid:
    """One rank of eight, whose module is plain tensors: a slice of each layer, or some of the layers.

    Ranks of one inner position hold equal bits; those of one data position read the same samples.
    """

    def __init__(self, topology: Topology, shape: str) -> None:
        self.dp, self.inner = GRIDS[shape]
        self.data, self.at = divmod(topology.rank, self.inner)
        self.groups = {
            "dp": [self.at + self.inner * data for data in range(self.dp)],
            "inner": [self.data * self.inner + at for at in range(self.inner)],
        }
        self.module = self._module(shape)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.1)
        self.dataset = Held({"position": 0, "order": torch.arange(6) + 10 * self.data})
        self.generator = torch.Generator().manual_seed(topology.rank)
        self.rng = Held({"bytes": self.generator.get_state()})

    def _module(self, shape: str) -> torch.nn.Module:
        if "tp" in shape:  # columns of one layer
            module: torch.nn.Module = torch.nn.Linear(6, 8 // self.inner)
        else:  # the layers of a stage, by their names in the whole
            names = [str(self.at + self.inner * turn) for turn in range(8 // self.inner)]
            module = torch.nn.ModuleDict({name: torch.nn.Linear(6, 2) for name in names})
        with torch.no_grad():
            for number, parameter in enumerate(module.parameters()):
                parameter.copy_(random_values(parameter.shape, 100 * self.at + number))
        return module

    def train(self) -> None:
        """A step whose gradients are averaged over the data axis already: equal where the module is."""
        step = self.dataset.state["position"]
        for number, parameter in enumerate(self.module.parameters()):
            parameter.grad = random_values(parameter.shape, 7000 + 100 * step + 10 * self.at + number)
        self.optimizer.step()
        self.dataset.state["position"] += 1
        torch.rand(3, generator=self.generator)
        self.rng.state["bytes"] = self.generator.get_state()

    def components(self, group: str, *, validate: bool = True) -> list[StateComponent]:
        grouped = {"sharing_pattern": "per_group", "process_group_name": group, "validate_replication": validate}
        return [
            StateComponent("model", ModelState(self.module), **grouped),  # type: ignore[arg-type]
            StateComponent("optimizer", OptimizerState(self.optimizer, self.module), **grouped),  # type: ignore[arg-type]
            StateComponent("dataset", self.dataset, "per_group", process_group_name="inner"),
            StateComponent("rng", self.rng, "per_rank"),
        ]

    def scramble(self) -> None:
        """What a new process has: other values in the module, no optimizer state, the data at their start."""
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.fill_(float("nan"))
        self.optimizer.state.clear()
        self.dataset.state = {"position": 0, "order": torch.full((6,), -1)}
        self.rng.state = {"bytes": torch.zeros_like(self.rng.state["bytes"])}

    def bits(self) -> dict[str, torch.Tensor]:
        optimizer = OptimizerState(self.optimizer, self.module).state_dict()["state"]
        state = {f"{name}.{field}": value for name, fields in optimizer.items() for field, value in fields.items()}
        model = {name: value.clone() for name, value in self.module.state_dict().items()}
        rest = {"order": self.dataset.state["order"], "rng": self.rng.state["bytes"]}
        return model | {name: value.clone() for name, value in (state | rest).items()}


def random_values(shape: torch.Size, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _train_save_and_go_on(topology: Topology, root: Path, shape: str) -> None:
    grid = Grid(topology, shape)
    for _ in range(STEPS):
        grid.train()
    made = coordinator(topology, root, grid.components("dp"), process_groups=grid.groups)
    made.save_checkpoint(checkpoint_id="3", validate=True)
    saved = grid.bits()
    grid.train()
    straight = grid.bits()
    grid.scramble()
    made.load_checkpoint()
    assert grid.dataset.loaded is not None and grid.rng.loaded is not None
    grid.dataset.state |= {"position": grid.dataset.loaded["position"]}
    grid.generator.set_state(grid.rng.loaded["bytes"])
    for wanted in (saved, straight):
        got = grid.bits()
        assert got.keys() == wanted.keys()
        assert all(same_bits(got[name], value) for name, value in wanted.items())
        grid.train()


@sampled("shape", ["dp x tp", "dp x pp, wide", "dp x tp, wide", "dp x pp"], 2)
def test_a_grid_of_plain_modules_goes_on_to_the_bit_with_the_group_whose_members_are_equal(
    tmp_path: Path, shape: str
) -> None:
    run_threads(8, _train_save_and_go_on, tmp_path, shape)
    manifest = read_manifest(tmp_path / "checkpoint-3")
    dp, inner = GRIDS[shape]
    assert manifest.topology["groups"]["dp"] == [[at + inner * data for data in range(dp)] for at in range(inner)]
    prefixes = {name.partition("/")[0] for name in manifest.arrays_of("model")}
    assert prefixes == {f"dp-{at:04d}" for at in range(inner)}
    assert len(manifest.components["rng"].ranks) == 8
    assert len(manifest.components["dataset"].plain_in) == dp


def _declare_the_wrong_group(topology: Topology, root: Path, shape: str) -> str:
    grid = Grid(topology, shape)
    grid.train()
    with pytest.raises(ReplicationError) as caught:
        made = coordinator(topology, root, grid.components("inner"), process_groups=grid.groups)
        made.save_checkpoint(checkpoint_id="3")
    return str(caught.value)


@pytest.mark.parametrize("shape", GRIDS)
def test_a_group_whose_members_hold_different_parts_is_refused_before_anything_is_written(
    tmp_path: Path, shape: str
) -> None:
    said = run_threads(8, _declare_the_wrong_group, tmp_path, shape)
    assert len(set(said)) == 1
    members = ", ".join(str(rank) for rank in range(GRIDS[shape][1]))
    assert f"component model should be the same on ranks {members}, but differs from rank 0 in " in said[0]
    assert "Choose another sharing_pattern" in said[0]
    assert list(tmp_path.iterdir()) == []


def _load_on_another_grid(topology: Topology, root: Path, shape: str) -> str:
    grid = Grid(topology, shape)
    with pytest.raises(CheckpointError) as caught:
        coordinator(topology, root, grid.components("dp"), process_groups=grid.groups).load_checkpoint()
    return str(caught.value)


def test_another_grid_is_refused_by_the_instances_of_both(tmp_path: Path) -> None:
    run_threads(8, _train_save_and_go_on, tmp_path, "dp x tp")
    said = run_threads(8, _load_on_another_grid, tmp_path, "dp x tp, wide")
    assert len(set(said)) == 1
    assert "component model is per_group and was saved by groups dp = [[0, 4], [1, 5], [2, 6], [3, 7]]" in said[0]
    assert "this run has [[0, 2, 4, 6], [1, 3, 5, 7]]. Run with the same groups" in said[0]
