"""Tensors that are more than values: of other classes than torch's own, with gradients, or laid out in another order than by rows.

All are saved as plain tensors. A step of a path tells a load what to make (`ckpt.state.flatten`): `as[...]`, the last one, of a tensor
with memory of its own; `wrapper[...]` of one that wraps other tensors, of which each is a leaf. A load makes only classes that its process
has imported, and wrappers of those that are allowed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
import torch

from ckpt.errors import ConfigurationError
from ckpt.format.dtypes import STORABLE, torch_dtype, zarr_name
from ckpt.format.manifest import ArrayEntry
from ckpt.format.strict_json import Refused, Shape
from ckpt.state.plain import from_json, imported, refusing_values, to_json

_AS, _WRAPPER = "as[", "wrapper["
_PACKAGES = ("torchao",)
"""Packages whose wrappers are kept: quantized weights and optimizer states, all of whose state is in `__tensor_flatten__`."""
_allowed: set[type] = set()
_Class = TypeVar("_Class", bound=type[torch.Tensor])

_log = logging.getLogger("ckpt")


def keep_tensor_class(kind: _Class) -> _Class:
    """Let checkpoints keep tensors of a class that wraps other tensors, as these. A decorator, too. Classes of torchao are kept anyway.

    The class has torch's `__tensor_flatten__`, whose context is plain, and `__tensor_unflatten__`. A load finds it by module and name,
    so call this in each program that saves or loads them.

    Raises:
        ConfigurationError: it has no such methods.

    Example:
        >>> @ckpt.keep_tensor_class
        ... class Scaled(torch.Tensor):
        ...     def __tensor_flatten__(self):
        ...         return ["values", "scale"], {"bits": 8}
        ...     @classmethod
        ...     def __tensor_unflatten__(cls, parts, context, shape, strides):
        ...         return cls(parts["values"], parts["scale"], **context)
    """
    if not (hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")):
        raise ConfigurationError(f"{_name(kind)} has no __tensor_flatten__ and __tensor_unflatten__, by which it would be kept")
    _allowed.add(kind)
    return kind


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a class that wraps other tensors, and is kept as these."""
    return type(tensor) not in _PLAIN and _is_allowed(type(tensor))


def parts_of(tensor: Any, label: str) -> tuple[str, dict[str, torch.Tensor]]:
    """Return the step `wrapper[...]` of a tensor for which `is_wrapper` holds, and the tensors in it by attribute.

    Raises:
        ConfigurationError: what it holds beside tensors is not plain, or a load would not find its class.
    """
    kind = type(tensor)
    if imported(kind.__module__, kind.__qualname__) is not kind:
        raise ConfigurationError(f"{label} is a {_name(kind)}, which a load would not find; define it at the top level of its module")
    names, context = tensor.__tensor_flatten__()
    made_by = (kind.__module__, kind.__qualname__, to_json(context, f"{label}.__tensor_flatten__()"))
    looks = (list(tensor.shape), list(tensor.stride()), isinstance(tensor, torch.nn.Parameter), tensor.requires_grad)
    return f"wrapper{json.dumps([*made_by, *looks])}", {name: getattr(tensor, name) for name in names}


def is_wrapper_step(container: str) -> bool:
    """Whether a container of a path is a tensor that wraps others."""
    return container.startswith(_WRAPPER)


def wrapped(container: str, parts: Mapping[str, Any]) -> Any:
    """Make a tensor of its step and its parts; of parts that are no tensors, such as those that are not read yet, a dictionary.

    Raises:
        ConfigurationError: this process does not have the class, or does not allow it.
    """
    spec = tuple[str, str, Any, Shape, list[int], bool, bool]
    module, name, context, shape, strides, is_parameter, wants_gradient = msgspec.json.decode(container[len("wrapper") :], type=spec)
    if not all(isinstance(part, torch.Tensor) for part in parts.values()):
        return dict(parts)
    kind = imported(module, name)
    if not (isinstance(kind, type) and _is_allowed(kind)):
        raise ConfigurationError(
            f"the checkpoint holds tensors of the class {module}.{name}, which this program has not imported, or does not allow; import "
            f"{module} before the load, and give a class of your own to ckpt.keep_tensor_class"
        )
    try:
        made = kind.__tensor_unflatten__(dict(parts), from_json(context), torch.Size(shape), tuple(strides))  # type: ignore[attr-defined]
    except Exception as error:  # of any package
        raise Refused(f"a {module}.{name} cannot be made of what was saved: {error!r:.200}") from error
    return torch.nn.Parameter(made, requires_grad=wants_gradient) if is_parameter else made.requires_grad_(wants_gradient)


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether a `torch.Tensor` is nothing but values on the host: what `require_dense` and `kind_step` find out, in less time."""
    return (
        tensor.is_cpu
        and not tensor.requires_grad
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized)
        and tensor.is_contiguous()
        and (tensor.data_ptr() != 0 or tensor.numel() == 0)
        and tensor.dtype in STORABLE
    )


def without_plain_kind(path: Sequence[Any]) -> Sequence[Any]:
    """Return a path without a last step that says no more of a tensor than its kind of device."""
    if not is_kind_step(path[-1]):
        return path
    module, name, wants_gradient, _, order, _ = _of_step(path[-1])
    return path if (module, name) != ("torch", "Tensor") or wants_gradient or order else path[:-1]


def kind_step(tensor: torch.Tensor, label: str) -> tuple[str, str] | None:
    """Return the step `as[...]` of a tensor with memory of its own; None for a `torch.Tensor` on the host, by rows, without gradient.

    Raises:
        ConfigurationError: an attribute of an instance is not plain.
    """
    kind, order = type(tensor), [] if tensor.is_contiguous() else _order(tensor)
    if kind is torch.Tensor and tensor.is_cpu and not tensor.requires_grad and not order:
        return None
    attributes = {} if kind in _PLAIN else to_json(dict(vars(tensor)), label)
    return _step_of(kind, tensor.requires_grad, attributes, order, tensor.device.type)


def saved_kind(is_parameter: bool, wants_gradient: bool, order: list[int]) -> tuple[str, str] | None:
    """Return the step `as[...]` of a tensor that another program saved, for a load on the host. `order`: of dimensions in memory."""
    if not (is_parameter or wants_gradient or order):
        return None
    return _step_of(torch.nn.Parameter if is_parameter else torch.Tensor, wants_gradient, {}, order, "cpu")


def _step_of(kind: type, wants_gradient: bool, attributes: Any, order: list[int], device: str) -> tuple[str, str]:
    return "", f"as{json.dumps([kind.__module__, kind.__qualname__, wants_gradient, attributes, order, device])}"


def kind_in(path: Sequence[Any]) -> tuple[str, str] | None:
    """Return the step `as[...]` that a path ends in; None: it ends in another."""
    return path[-1] if path and is_kind_step(path[-1]) else None


def is_kind_step(part: Any) -> bool:
    """Whether a part of a path, or of one in JSON, is such a step."""
    return type(part) in (tuple, list) and len(part) == 2 and type(part[1]) is str and part[1].startswith(_AS)


def as_kind(value: Any, step: tuple[str, str]) -> Any:
    """Give a tensor the class that it was saved with, in the same memory; a `torch.Tensor` where this process does not have the class."""
    module, name, wants_gradient, attributes, _, _ = _of_step(step)
    if not isinstance(value, torch.Tensor):
        return value
    kind = imported(module, name)
    if type(value) is kind and value.requires_grad == wants_gradient:
        return value
    if not (isinstance(kind, type) and issubclass(kind, torch.Tensor)) or _dispatches(kind):
        _log.warning("a tensor of the class %s.%s is a torch.Tensor now: this program has not imported the class", module, name)
        kind = torch.Tensor
    wants_gradient = wants_gradient and (value.is_floating_point() or value.is_complex())
    value = value.detach()
    if kind is torch.nn.Parameter:
        return torch.nn.Parameter(value, requires_grad=wants_gradient)
    if kind is not torch.Tensor:
        value = value.as_subclass(kind)
        vars(value).update(msgspec.convert(from_json(attributes), dict[str, Any]))
    return value.requires_grad_(wants_gradient)


def leaf_of(step: tuple[str, str] | None) -> tuple[bool, bool]:
    """Whether a tensor is a parameter, and whether it requires a gradient. What is of a class of a program is neither."""
    module, name, wants_gradient, *_ = _of_step(step) if step is not None else ("torch", "Tensor", False)
    kind = imported(module, name)
    return kind is torch.nn.Parameter, wants_gradient and kind in _PLAIN


def empty_tensor(entry: ArrayEntry, path: Sequence[Any] = (), device: torch.device | str | None = None) -> torch.Tensor:
    """Allocate a tensor to read into, laid out as the saved one was.

    Args:
        device: None: of the kind on which it was, if the program uses such a one; otherwise on the host.

    Raises:
        CorruptCheckpointError: its path is invalid.
        DeviceMemoryError: the device is out of memory.
    """
    dtype = torch_dtype(entry.dtype)
    if path and is_kind_step(path[-1]):
        with refusing_values("a path in plain.json"):
            *_, order, saved_on = _of_step(path[-1])
            if device is None and saved_on != "cpu":
                in_use = torch.accelerator.current_accelerator(check_available=True)
                device = in_use if in_use is not None and in_use.type == saved_on else None
            if order:
                if sorted(order) != list(range(len(entry.shape))):
                    raise Refused(f"{order!r:.80} is no order of {len(entry.shape)} dimensions")
                made = torch.empty([entry.shape[dim] for dim in order], dtype=dtype, device=device or "cpu")
                return made.permute([order.index(dim) for dim in range(len(order))])
    return torch.empty(entry.shape, dtype=dtype, device=device or "cpu")


def require_dense(tensor: torch.Tensor, name: str) -> None:
    """Refuse a tensor whose elements are not memory of its own.

    Raises:
        ConfigurationError: it is sparse, nested, quantized, of MKL-DNN, without data, or of a class that wraps other tensors.
    """
    kind = type(tensor)
    if kind not in _PLAIN:
        if torch.nn.parameter.is_lazy(tensor):
            raise _no_memory(name, "not initialized yet", "run the model once before the save")
        if _dispatches(kind):
            advice = "give those, or a tensor made of it, or give its class to ckpt.keep_tensor_class"
            raise _no_memory(name, f"a {_name(kind)}, which wraps other tensors", advice)
    if tensor.layout is not torch.strided:
        raise _no_memory(name, f"of the layout {tensor.layout}", "give to_dense() of it, or its parts")
    if tensor.is_quantized:
        raise _no_memory(name, "quantized", "give int_repr() of it, and scale and zero point")
    if tensor.is_meta:
        raise _no_memory(name, "on the device meta, where it has no values", "materialize the model first")
    if tensor.is_nested:
        raise _no_memory(name, "nested", "give its parts, by unbind()")
    if not tensor.data_ptr() and tensor.numel():
        raise _no_memory(name, "without memory, such as the zeros of a gradient", "give clone() of it")
    try:
        zarr_name(tensor.dtype)
    except ConfigurationError as error:
        raise ConfigurationError(f"{name}: {error}") from None


def _no_memory(name: str, what: str, advice: str) -> ConfigurationError:
    return ConfigurationError(f"{name} is {what}, which is not kept: {advice}, or leave it out")


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _order(tensor: torch.Tensor) -> list[int]:
    """Return the dimensions in the order of memory, the slowest first, of a tensor whose elements fill it; [] for others."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return order if tensor.permute(order).is_contiguous() else []


@lru_cache(maxsize=1024)
def _of_step(step: tuple[str, str]) -> tuple[str, str, bool, Any, list[int], str]:
    """Return module, class, whether it asks for gradients, attributes, order of dimensions, kind of device."""
    return msgspec.json.decode(step[1][len("as") :], type=tuple[str, str, bool, Any, list[int], str])


def _is_allowed(kind: type) -> bool:
    is_of_package = kind.__module__.partition(".")[0] in _PACKAGES and imported(kind.__module__, kind.__qualname__) is kind
    return (kind in _allowed or is_of_package) and hasattr(kind, "__tensor_unflatten__") and issubclass(kind, torch.Tensor)


def _dispatches(kind: type[torch.Tensor]) -> bool:
    return hasattr(kind, "__tensor_flatten__") or kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
