"""For the whole suite: how hypothesis runs, which folder comes first, and that tests of an absent device are skipped, saying why."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from ckpt.ranks.addresses import LOOPBACK, interface_of
from tests.conf.configs import parsed_once
from tests.device.devices import why_absent
from tests.support.pace import pace_at_start

# Torch asks a name server who is at the other end of each connection, but of one on loopback; an answer that gets lost costs 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1")
if (loopback := interface_of(LOOPBACK)) is not None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)  # on which engines listen, too
os.environ.pop("COLUMNS", None)  # which pytest-xdist sets: tables are as wide as where no terminal bounds them
# A test that names an object store and gives no server must reach none, and no machine that hands out credentials.
for name in ("AWS_ENDPOINT_URL", "AWS_METADATA_ENDPOINT", "AWS_CONTAINER_CREDENTIALS_FULL_URI"):
    os.environ[name] = "http://127.0.0.1:9"
os.environ |= {"AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "nothing", "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true"}
torch.set_num_threads(1)  # several wait for each other in loops: beside one more process that takes ten times as long
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what it puts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what we start shall hear Ctrl-C

gc.disable()  # until all is collected: a third of that time would be the collector's, which finds nothing

settings.register_profile("any machine", deadline=None)  # how long an example takes says nothing on a busy machine
settings.load_profile("any machine")


def pytest_report_header() -> str:
    return f"deadlines: those of a quiet machine, times {pace_at_start():.1f}"


_HERE = Path(__file__).parent
_HEAVIEST_FIRST = ("adversarial", "e2e", "clusters", "servers", "device", "conf", "fidelity", "simulation", "unit")
"""So that what is left at the end is small, and no worker is left alone with a long file."""
_LONGEST_IN_FULL = ("test_layouts.py", "test_async_layouts.py", "test_async_training.py", "test_kill.py")


@pytest.fixture(scope="module")
def collected() -> None:
    """For tests that count threads or descriptors: what earlier modules have left to the collector, such as locks, is let go of before."""
    gc.collect()


def pytest_collection_finish() -> None:
    """The collector looks at what tests make alone: all imported modules are there by now, and stay."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _parsed_once() -> Iterator[None]:
    """Hydra reads each file of conf/ once, for all commands that run in this process."""
    with parsed_once():
        yield


_LEVELS = {name: logging.getLogger(name).level for name in (None, "ckpt")}


@pytest.fixture(autouse=True)
def _levels_as_at_the_start() -> None:
    """What a test hears in `caplog` does not follow from the tests before it: a command in this process sets Hydra's levels, for good."""
    for name, level in _LEVELS.items():
        logging.getLogger(name).setLevel(level)


def _places(folder_of: Mapping[Path, str]) -> dict[Path, tuple[int, bool]]:
    """Return where each test file comes: a file whose ranks wait for each other, and one that calculates, take turns; long ones first."""
    files = sorted(folder_of, key=lambda file: (file.name not in _LONGEST_IN_FULL, -file.stat().st_size))
    waiting = [file for file in files if folder_of[file] == "distributed"]
    others = [file for folder in _HEAVIEST_FIRST for file in files if folder_of[file] == folder]
    return {file: (n, turn is others) for turn in (waiting, others) for n, file in enumerate(turn)}


@pytest.hookimpl(trylast=True)  # when those that do not run are out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = _places({item.path: item.path.relative_to(_HERE).parts[0] for item in items})
    items.sort(key=lambda item: place[item.path])
    for item in items:
        for name in ("npu", "cuda"):
            if item.get_closest_marker(name) is not None and (reason := why_absent(name)):
                item.add_marker(pytest.mark.skip(reason=reason))
