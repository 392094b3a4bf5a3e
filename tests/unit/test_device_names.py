"""Devices and their collectives have names in one file of code, and in the configs that choose them: all else works with any of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ckpt
import recipes.train

ROOTS = {"ckpt": Path(ckpt.__file__).parent, "recipes": Path(recipes.train.__file__).parent}
CONF = ROOTS["recipes"].parent / "conf"
NAME = re.compile(r"cuda|nccl|hccl|(?<![a-z])(npu|xpu|hpu)s?(?![a-z])|\bascend\b", re.IGNORECASE)
"""Also inside of other words, such as `is_cuda` and `torch_npu`; but not the three letters in "input" and "unpublished"."""

ALLOWED = {
    "ckpt/memory/device.py": "it is the file",
    "ckpt/engine/parameter_server.py": "it says what of somebody else's device layer is used, and on which devices",
    "recipes/benchmark/megatron_peer.py": "it runs somebody else's program, which is written for one kind of device, without any",
}


def named_in(text: str) -> list[str]:
    """The lines, with their numbers, in which a device has a name."""
    return [f"{number}: {line.strip()}" for number, line in enumerate(text.splitlines(), start=1) if NAME.search(line)]


@pytest.mark.parametrize("package", ROOTS)
def test_no_device_has_a_name_in_code_comments_or_docstrings_but_in_the_one_file(package: str) -> None:
    root = ROOTS[package]
    files = {f"{package}/{path.relative_to(root).as_posix()}": path for path in sorted(root.rglob("*.py"))}
    assert len(files) > 30
    found = {name: named_in(path.read_text()) for name, path in files.items() if name not in ALLOWED}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize("name", ALLOWED)
def test_a_file_that_may_name_devices_does(name: str) -> None:
    package, _, path = name.partition("/")
    assert named_in((ROOTS[package] / path).read_text()), f"{name} needs no exception any more"


def test_configs_name_devices_only_where_one_is_chosen() -> None:
    """By a file of `conf/device`, or in a command to type, as `device=<name>`."""
    named = set()
    for path in CONF.rglob("*.yaml"):
        if named_in(re.sub(r"\bdevice=[\w,]+", "", path.read_text())):
            named.add(path.relative_to(CONF).as_posix())
    assert named == {"device/cuda.yaml", "device/npu.yaml"}


@pytest.mark.parametrize(
    ("line", "is_named"),
    [
        ("if tensor.is_cuda:", True),
        ('backend = "nccl"', True),
        ("module = torch.npu", True),
        ("NPU_SIM = 1", True),
        ("to_npu()", True),
        ("inputs = outputs", False),
        ("the unpublished folder", False),
        ("NPUs and others", True),
        ("ascending = sorted(found)", False),
        ("an Ascend device", True),
    ],
)
def test_the_scan_finds_names_and_nothing_else(line: str, is_named: bool) -> None:
    assert bool(named_in(line)) is is_named
