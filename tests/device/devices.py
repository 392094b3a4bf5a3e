"""The devices that the suite runs on: the CPU, a stand-in for an NPU (tests/npu_sim), and CUDA where there is one."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from ckpt.errors import DeviceUnavailableError
from ckpt.memory.device import Device
from tests.npu_sim import npu_sim_build
from tests.support.states import sized

STAND_IN = Path(npu_sim_build.__file__).parent
"""In front of sys.path, or on PYTHONPATH, it makes `torch_npu` importable."""

_COMMANDS = STAND_IN / "bin"
"""In front of PATH, for packages that ask the driver's tools."""

ADVERSARY = {"NPU_SIM_COPY_DELAY_US": "500000", "NPU_SIM_POISON": "1", "MASTER_ADDR": "127.0.0.1"}
"""For `run_ranks(environment=...)`: the stand-in begins a copy half a second late, unless somebody waits for it, and fills memory that is
new, or let go of, with a pattern. Whoever starts ranks on several hosts names the first one, and Accelerate asks for it."""

NPU = pytest.param("npu", marks=pytest.mark.npu)
CUDA = pytest.param("cuda", marks=pytest.mark.cuda)

_MADE_WITH: dict[str, dict[str, str]] = {
    "cpu": {"type": "cpu", "collectives": "gloo"},
    "npu": {"type": "npu", "collectives": "hccl", "plugin": "torch_npu"},
    "cuda": {"type": "cuda", "collectives": "nccl"},
}


def made(name: str, *, pinned_mib: int = 128) -> Device:
    """The product's object for a device, made as conf/device/<name>.yaml makes it; with less pinned memory, if that is said."""
    return sized(Device(**_MADE_WITH[name]), pinned_bytes=pinned_mib << 20)


@functools.cache
def why_absent(name: str) -> str:
    """Why tests of a device cannot run on this machine; "" if they can. Loads no plugin: that is for the ranks alone."""
    if name == "npu":
        return npu_sim_build.why_not()
    try:
        made(name).require()
    except DeviceUnavailableError as error:
        return str(error)
    return ""


def why_too_many(name: str, num_ranks: int) -> str:
    """Why so many ranks cannot have a device each; "" if they can. The stand-in has eight, or as NPU_SIM_DEVICES says."""
    if name == "cuda" and torch.cuda.device_count() < num_ranks:
        return f"{num_ranks} ranks need as many CUDA devices, and this machine has {torch.cuda.device_count()}"
    return ""


def shown_to(name: str, ranks: Sequence[int]) -> dict[str, str]:
    """The environment in which the ranks of a simulated host see devices of their own, and of no other host. The stand-in's
    are each process's own.
    """
    if name != "cuda":
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible.split(",")[rank] for rank in ranks)}


@functools.cache
def prepare(name: str) -> None:
    """Make a device ready for the ranks that start from now on: compile the stand-in, unless that has been done."""
    if name == "npu":
        npu_sim_build.build()


@functools.cache
def make_importable(name: str) -> None:
    """Let this process, a rank, find the plugin of a device, and the tools of its driver."""
    if name == "npu":
        sys.path.insert(0, str(STAND_IN))
        os.environ["PATH"] = f"{_COMMANDS}{os.pathsep}{os.environ['PATH']}"


def environment() -> dict[str, str]:
    """For a command that is to find the stand-in as it finds the real plugin, beside what its PYTHONPATH and PATH hold already."""
    paths = {"PYTHONPATH": STAND_IN, "PATH": _COMMANDS}
    return {name: os.pathsep.join(filter(None, (str(path), os.environ.get(name)))) for name, path in paths.items()}
