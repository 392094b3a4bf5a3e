"""Sharding of an optimizer's state, derived from the model's. Names follow Megatron-Core.

A state of a parameter has the parameter's shape, so it has the parameter's offset in its own global tensor, and is converted by the
parameter's factory if there is one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy
from dataclasses import replace

import torch

from ckpt.dist_checkpointing.dict_utils import nested_values
from ckpt.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedStateDict, ShardedTensorFactory, StateDict
from ckpt.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from ckpt.errors import ShapeMismatchError, ShardingError, logger_of
from ckpt.format.dtypes import is_dtensor
from ckpt.state.sharded_tensor import ShardedTensor

logger = logger_of(__name__)


def get_optim_param_to_id_map(optim_params_iter: Iterable[torch.Tensor]) -> dict[int, int]:
    """Map id() of each parameter to its number in the optimizer's state dict.

    Args:
        optim_params_iter: all parameters, in the order of the optimizer's groups. A repeated one keeps its first number. For a
            DTensor the id is that of its `_local_tensor`.
    """
    numbers: dict[int, int] = {}
    for number, parameter in enumerate(optim_params_iter):
        numbers.setdefault(id(_local(parameter)), number)
    return numbers


def get_param_id_to_sharded_param_map(
    model_sharded_state_dict: ShardedStateDict, optim_params_iter: Iterable[torch.Tensor]
) -> dict[int, ShardedTensor | ShardedTensorFactory]:
    """Map each parameter's number in the optimizer's state dict to its entry in the model's sharded state dict.

    Args:
        model_sharded_state_dict: nested in any way. Its sharded tensors and factories hold the parameters themselves, as
            `state_dict(keep_vars=True)` returns them; parameters that the optimizer does not have are left out.
        optim_params_iter: as for `get_optim_param_to_id_map`.
    """
    sharded, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
    numbers = get_optim_param_to_id_map(optim_params_iter)
    found = {numbers[id(tensor.data)]: tensor for tensor in nested_values(sharded) if id(tensor.data) in numbers}
    if numbers and not found:
        logger.warning(
            "none of the optimizer's %d parameters is in the model's sharded state dict: make that with keep_vars=True, so that it "
            "holds the parameters and not copies",
            len(numbers),
        )
    return found


def make_sharded_optimizer_tensor(
    model_param: ShardedTensor | ShardedTensorFactory, optim_param: torch.Tensor, prefix: str
) -> ShardedTensor | ShardedTensorFactory:
    """Shard an optimizer state as its parameter is sharded, under the key `<prefix>.<key of the parameter>`.

    Raises:
        ShapeMismatchError: the state and the parameter's local part differ in shape.
    """
    state, key = _local(optim_param), f"{prefix}.{model_param.key}"
    shape = _data_shape(model_param)
    if shape is not None and tuple(state.shape) != shape:
        raise ShapeMismatchError(
            f"{key}: the optimizer's state has shape {tuple(state.shape)}, the parameter {shape}; leave states of other shapes out "
            "with exclude_keys, and save them as plain values"
        )
    if isinstance(model_param, ShardedTensorFactory):
        return replace(model_param, key=key, data=state)
    return replace(model_param, key=key, data=state, dtype=state.dtype)


def optim_state_to_sharding_state(
    optim_state_dict: StateDict,
    id_to_sharded_param_map: Mapping[int, ShardedTensor | ShardedTensorFactory],
    exclude_keys: str | Collection[str] = (),
) -> None:
    """Shard an optimizer's state dict as its model is sharded, in place.

    Every state becomes a tensor `optimizer.state.<name of the state>.<key of the parameter>`. The parameter lists of the groups
    are not saved: they belong to this process.

    Args:
        optim_state_dict: of a torch optimizer, with `state` and `param_groups`.
        id_to_sharded_param_map: from `get_param_id_to_sharded_param_map`.
        exclude_keys: names of states to leave out, or one name.

    Raises:
        ShardingError: the model's sharded state dict lacks a parameter; the dict is unchanged then.
        ShapeMismatchError: a state and its parameter differ in shape; the dict is unchanged then.
    """
    excluded = {exclude_keys} if isinstance(exclude_keys, str) else set(exclude_keys)
    state = {
        number: {
            name: make_sharded_optimizer_tensor(
                _described(number, name, id_to_sharded_param_map), value, prefix=f"optimizer.state.{name}"
            )
            for name, value in states.items()
            if name not in excluded
        }
        for number, states in optim_state_dict["state"].items()
    }
    groups = deepcopy(optim_state_dict["param_groups"])
    for group in groups:
        group["params"] = LocalNonpersistentObject(group["params"])
    optim_state_dict["param_groups"] = groups
    optim_state_dict["state"] = state


def _described(
    number: int, name: str, sharded: Mapping[int, ShardedTensor | ShardedTensorFactory]
) -> ShardedTensor | ShardedTensorFactory:
    if number not in sharded:
        raise ShardingError(
            f"the optimizer keeps {name} for its parameter number {number}, which the model's sharded state dict does not describe "
            f"(it describes {len(sharded)} of them); make that with keep_vars=True, and of all parameters"
        )
    return sharded[number]


def _data_shape(parameter: ShardedTensor | ShardedTensorFactory) -> tuple[int, ...] | None:
    """Shape of the parameter on this rank; None for a factory without data."""
    if isinstance(parameter, ShardedTensor):
        return parameter.data_shape
    return None if parameter.data is None else tuple(parameter.data.shape)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a DTensor's `_local_tensor`: `to_local()` of a parameter makes a new object (torch 2.13)."""
    local: torch.Tensor = tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return local
