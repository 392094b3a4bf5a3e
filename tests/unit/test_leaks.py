"""The ranks of tests: one process serves case after case, until a case leaves something behind in it."""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ckpt
import ckpt.format.places
from ckpt.ranks.topology import Topology
from tests.support.ranks import run_ranks

_kept = []


def pid_of(topology: Topology) -> int:
    return os.getpid()


def _thread() -> None:
    threading.Thread(target=threading.Event().wait, daemon=True).start()


def _descriptor() -> None:
    _kept.append(os.open("/dev/null", os.O_RDONLY))


def _child() -> None:
    if os.fork() == 0:
        time.sleep(3)  # it outlives the process that it is a child of, and no longer
        os._exit(0)


def _environment() -> None:
    os.environ["CKPT_LEFT"] = "1"


def _handler() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _function() -> None:
    ckpt.format.places.is_inner_path = str


def _contents_of_a_list() -> None:
    _kept.append(-1)


def _standard_function() -> None:
    os.fsync = print


def _logger() -> None:
    logging.getLogger("ckpt").setLevel(logging.ERROR)


def _group() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def _module() -> None:
    sys.modules["made_up"] = types.ModuleType("made_up")


def _audit_hook() -> None:
    sys.addaudithook(print_nothing)


def print_nothing(event: str, args: object) -> None:
    pass


def does(topology: Topology, what: Callable[[], None]) -> int:
    what()
    return os.getpid()


def test_a_case_that_leaves_nothing_is_followed_by_the_next_in_the_same_processes() -> None:
    assert sorted(run_ranks(2, pid_of, process_group=True)) == sorted(run_ranks(2, pid_of))


@pytest.mark.parametrize(
    "what",
    [
        _thread,
        _descriptor,
        _child,
        _environment,
        _handler,
        _function,
        _contents_of_a_list,
        _standard_function,
        _logger,
        _group,
        _module,
        _audit_hook,
    ],
)
def test_a_case_that_leaves_something_is_the_last_of_its_process(what: Callable[[], None]) -> None:
    (used,) = run_ranks(1, does, what)
    assert run_ranks(1, pid_of) != [used]


def test_ranks_that_have_saved_and_loaded_serve_again(tmp_path: Path) -> None:
    first = run_ranks(2, _save_and_load, tmp_path, process_group=True)
    assert sorted(run_ranks(2, pid_of)) == sorted(first)


def _save_and_load(topology: Topology, root: Path) -> int:
    for _ in range(2):
        with ckpt.Checkpointer(root, model=torch.nn.Linear(2, 2), topology=topology) as checkpoints:
            checkpoints.save(checkpoints.restore() + 1)
    return os.getpid()


def test_each_case_begins_in_the_folder_of_its_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        assert run_ranks(1, moved) == [str(tmp_path / name)]
        (tmp_path / name).rmdir()


def moved(topology: Topology) -> str:
    before = os.getcwd()
    os.chdir("/")
    return before


def test_a_case_that_fails_is_the_last_of_its_processes() -> None:
    before = run_ranks(2, pid_of)
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        run_ranks(2, fails_on_rank_1)
    assert not {*before} & {*run_ranks(2, pid_of)}


def fails_on_rank_1(topology: Topology) -> None:
    _ = 1 // (1 - topology.rank)


def test_a_case_that_is_to_run_alone_gets_new_processes_that_serve_no_other() -> None:
    before = run_ranks(1, pid_of)
    alone = run_ranks(1, pid_of, is_only=True)
    assert alone != before and run_ranks(1, pid_of) == before


def drawn_and_warned(topology: Topology) -> tuple[float, float, int]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        warnings.warn("each case hears it", stacklevel=1)
    return random.random(), float(torch.rand(())), len(caught)


def test_random_numbers_and_warnings_are_those_of_a_new_process_each_time() -> None:
    assert run_ranks(1, drawn_and_warned) == run_ranks(1, drawn_and_warned)
    assert run_ranks(1, drawn_and_warned)[0][2] == 1
