"""Variables of the environment in which a command's process imports torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def variables(wanted: Mapping[str, str]) -> Iterator[None]:
    """Set these variables inside the block. Others that the block sets stay."""
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            os.environ |= {} if value is None else {name: value}


def torch_variables(log_level: str = "ERROR") -> dict[str, str]:
    """Return the variables under which a process imports torch: without the device plugins that it loads by itself, and with few warnings.

    An installed plugin without its driver makes every plain `import torch` fail; `ckpt.memory.device.Device` imports plugins
    by name and says what is missing. Where no name server answers, torch's C++ parts warn of every connection between ranks.
    OpenMP's threads spin for some microseconds and then sleep, unless the user has set how they wait: beside other programs, threads that
    spin on keep the cores from those that they wait for (20 steps on two busy cores: 79 s, without spinning 13 s).

    Args:
        log_level: of the C++ parts, unless the user has set it.
    """
    given = {"TORCH_CPP_LOG_LEVEL": log_level, "OMP_WAIT_POLICY": "PASSIVE"}
    if "OMP_WAIT_POLICY" not in os.environ:
        given["GOMP_SPINCOUNT"] = "5000"
    return {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **{name: os.environ.get(name, value) for name, value in given.items()}}


def import_torch() -> None:
    """Import torch, under `torch_variables`."""
    with variables(torch_variables()):
        import torch  # noqa: F401
