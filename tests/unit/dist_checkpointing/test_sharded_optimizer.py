"""An optimizer's state, sharded as its model is."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ckpt.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensorFactory,
    apply_factories,
)
from ckpt.dist_checkpointing.optimizer import (
    get_optim_param_to_id_map,
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
    optim_state_to_sharding_state,
)
from ckpt.errors import ShapeMismatchError, ShardingError
from ckpt.ranks.topology import Topology
from ckpt.state.sharded_tensor import ShardedTensor
from tests.support.ranks import run_ranks
from tests.support.states import same_bits


class Trained:
    """A layer, rank 1 of 3 along its rows, after one step of Adam; its bias goes through a factory."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(3, 4)
        self.optimizer = torch.optim.Adam(self.layer.parameters(), lr=0.5)
        self.layer(torch.arange(6.0).view(2, 3)).sum().backward()
        self.optimizer.step()

    def sharded(self) -> dict[str, Any]:
        return {
            "layers": [
                {"weight": ShardedTensor.from_rank_offsets("w", self.layer.weight, (0, 1, 3), replica_id=(0, 2))}
            ],
            "bias": ShardedTensorFactory("b", self.layer.bias, _halves, torch.cat),
            "buffer": ShardedTensor.from_rank_offsets("buffer", torch.arange(2.0)),
            "rng": ShardedObject("rng", 1, (1,), (0,)),
        }

    def map(self) -> dict[int, ShardedTensor | ShardedTensorFactory]:
        return get_param_id_to_sharded_param_map(self.sharded(), self.layer.parameters())


def _halves(key: str, data: torch.Tensor, replica_id: Any, run: slice | None) -> dict[str, ShardedTensor]:
    assert run is None
    return {
        name: ShardedTensor.from_rank_offsets(key, part, (0, number, 2), replica_id=replica_id)
        for number, (name, part) in enumerate(zip(("upper", "lower"), data.chunk(2), strict=True))
    }


def test_parameters_are_numbered_as_the_optimizer_does() -> None:
    """S1.64: one that comes twice keeps its first number."""
    a, b = torch.nn.Parameter(torch.arange(2.0)), torch.nn.Parameter(torch.arange(2.0))
    assert get_optim_param_to_id_map([a, b, a]) == {id(a): 0, id(b): 1}


def test_the_model_describes_the_parameters_of_the_optimizer_and_no_more() -> None:
    """S1.64: tensors and factories, at any depth; buffers and objects are left out."""
    trained = Trained()
    found = trained.map()
    assert {number: one.key for number, one in found.items()} == {0: "w", 1: "b"}
    assert found[0].data is trained.layer.weight
    assert isinstance(found[1], ShardedTensorFactory)


def test_a_model_that_holds_copies_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """S1.64: the state dict was made without keep_vars=True."""
    trained = Trained()
    copies = {"w": ShardedTensor.from_rank_offsets("w", trained.layer.weight.detach())}
    with caplog.at_level(logging.WARNING, logger="ckpt"):
        assert get_param_id_to_sharded_param_map(copies, trained.layer.parameters()) == {}
        assert get_param_id_to_sharded_param_map(copies, []) == {}
    (record,) = caplog.records
    assert "none of the optimizer's 2 parameters is in the model's sharded state dict" in record.message


@pytest.mark.parametrize("exclude_keys", ["step", ("step",), ["step", "nope"], {"step"}])
def test_states_lie_where_their_parameters_lie(exclude_keys: Any) -> None:
    """S1.64: each is a tensor of its own, by name and parameter; groups are matters of the process (S1.65)."""
    trained = Trained()
    state = trained.optimizer.state_dict()
    groups = state["param_groups"]
    wanted = {number: dict(states) for number, states in state["state"].items()}
    optim_state_to_sharding_state(state, trained.map(), exclude_keys)
    assert {number: set(states) for number, states in state["state"].items()} == {
        0: {"exp_avg", "exp_avg_sq"},
        1: {"exp_avg", "exp_avg_sq"},
    }
    moment = state["state"][0]["exp_avg"]
    assert (moment.key, moment.global_shape, moment.global_offset) == ("optimizer.state.exp_avg.w", (12, 3), (4, 0))
    assert (moment.replica_id, moment.axis_fragmentations) == ((0, 2), (3, 1))
    assert moment.data is wanted[0]["exp_avg"]
    apply_factories(state)
    lower = state["state"][1]["exp_avg_sq"]["lower"]
    assert (lower.key, lower.global_offset) == ("optimizer.state.exp_avg_sq.b", (2,))
    assert same_bits(lower.data, wanted[1]["exp_avg_sq"][2:])
    assert state["param_groups"][0]["params"].unwrap() == [0, 1]
    assert state["param_groups"][0]["lr"] == 0.5
    assert groups[0]["params"] == [0, 1], "the groups given are another's, and stay"


def test_the_name_of_a_state_is_excluded_whole_not_as_a_part_of_a_word() -> None:
    """S1.64: "exp_avg" leaves exp_avg_sq in, and "step" is one name although it is a collection of letters."""
    trained = Trained()
    state = trained.optimizer.state_dict()
    for states in state["state"].values():
        states["t"] = torch.zeros_like(states["exp_avg"])
    optim_state_to_sharding_state(state, trained.map(), ("step", "exp_avg"))
    assert set(state["state"][0]) == {"exp_avg_sq", "t"}
    state["state"] = {0: {"t": torch.zeros(4, 3)}}
    optim_state_to_sharding_state(state, trained.map(), "step")
    assert set(state["state"][0]) == {"t"}


def test_a_state_of_another_type_or_of_a_run_follows_its_parameter() -> None:
    """S1.64: moments may be float32 beside a bfloat16 parameter, and flattened where the parameter's description is."""
    run = ShardedTensor.from_rank_offsets_flat(
        "w", torch.arange(5, dtype=torch.bfloat16), (4, 3), (0, 1, 3), flattened_range=slice(2, 7)
    )
    moment = make_sharded_optimizer_tensor(run, torch.arange(5.0), "optimizer.state.exp_avg")
    assert isinstance(moment, ShardedTensor)
    assert (moment.key, moment.dtype, moment.flattened_range) == (
        "optimizer.state.exp_avg.w",
        torch.float32,
        slice(2, 7),
    )
    assert moment.box == run.box


@pytest.mark.parametrize("number", [0, 1])
def test_a_state_of_another_shape_is_refused_and_the_state_dict_is_as_it_was(number: int) -> None:
    """S1.64: a step count, say, whether the parameter has a factory or not."""
    trained = Trained()
    state = trained.optimizer.state_dict()
    state["state"] = {number: dict(sorted(state["state"][number].items()))}
    shape = ("(4, 3)", "(4,)")[number]
    with pytest.raises(
        ShapeMismatchError, match=r"^optimizer.state.step.[wb]: the optimizer's state has shape \(\), "
    ) as raised:
        optim_state_to_sharding_state(state, trained.map())
    assert f"the parameter {shape}; leave states of other shapes out with exclude_keys" in str(raised.value)
    assert isinstance(state["state"][number]["exp_avg"], torch.Tensor)
    assert state["param_groups"][0]["params"] == [0, 1]


def test_a_state_of_a_parameter_that_the_model_does_not_describe_is_refused() -> None:
    """S1.64: unless all of it is left out."""
    trained = Trained()
    state = trained.optimizer.state_dict()
    described = {0: trained.map()[0]}
    with pytest.raises(
        ShardingError, match="^the optimizer keeps exp_avg for its parameter number 1, which the model's"
    ):
        optim_state_to_sharding_state(state, described, "step")
    assert not isinstance(state["param_groups"][0]["params"], LocalNonpersistentObject)
    optim_state_to_sharding_state(state, described, ("step", "exp_avg", "exp_avg_sq"))
    assert state["state"] == {0: {}, 1: {}}


def _match_dtensors(topology: Topology) -> list[Any]:
    mesh = init_device_mesh("cpu", (topology.world_size,))
    parameter = torch.nn.Parameter(distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0)]))
    local = parameter._local_tensor
    piece = ShardedTensor.from_rank_offsets("w", local, (0, topology.rank, topology.world_size))
    (found,) = get_param_id_to_sharded_param_map({"w": piece}, [parameter]).values()
    moment = make_sharded_optimizer_tensor(found, parameter.detach() + 1, "m")
    assert moment.data is not None
    assert not isinstance(moment.data, DTensor)
    return [found is piece, moment.data.tolist(), moment.global_offset]


def test_a_dtensor_is_known_by_its_local_part() -> None:
    """S1.64: with FSDP2 the model's sharded state dict holds the local tensors, the optimizer the DTensors."""
    assert run_ranks(2, _match_dtensors, process_group=True) == [
        [True, [[1, 2, 3], [4, 5, 6]], (0, 0)],
        [True, [[7, 8, 9], [10, 11, 12]], (2, 0)],
    ]


def test_the_module_is_an_attribute_of_its_package() -> None:
    """As in Megatron-Core. In a process of its own, because an import of the module anywhere makes it one."""
    program = "from ckpt import dist_checkpointing; print(dist_checkpointing.optimizer.optim_state_to_sharding_state.__name__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "optim_state_to_sharding_state\n"), done.stderr
