"""Objects of public packages. A load gives them what torch.save and load_state_dict give; the next ten steps are equal to the bit."""

from __future__ import annotations

import importlib.util
import io
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt
from ckpt import Checkpointer
from ckpt.errors import ConfigurationError
from tests.fidelity.programs import CASES, NOT_RUN, Case, Program
from tests.fidelity.same import same
from tests.support.covering import sampled

STEPS, NEXT = range(4), range(4, 14)


def _installed(cases: list[Case]) -> Iterator[Any]:
    """Cases of packages that are here, and one that is skipped for each other package."""
    missing: set[str] = set()
    for case in cases:
        if importlib.util.find_spec(case.package) is not None:
            yield pytest.param(case, id=str(case))
        elif case.package not in missing:
            missing.add(case.package)
            reason = f"{case.package} is not installed; .ci/full has an environment with it"
            yield pytest.param(case, id=f"{case.package}: all", marks=pytest.mark.skip(reason=reason))


KEPT = list(_installed([case for case in CASES if not case.refused]))
REFUSED = list(_installed([case for case in CASES if case.refused]))

pytestmark = pytest.mark.filterwarnings("ignore")  # packages warn of what is theirs


def states_of(program: Program) -> dict[str, Any]:
    return {name: one.state_dict() for name, one in program.objects.items()}


def run(program: Program, steps: range) -> list[Any]:
    """With random numbers that follow from the steps: some optimizers draw NumPy's, which are no state of theirs."""
    for seed in (np.random.seed, random.seed, torch.manual_seed):
        seed(steps.start)
    return [program.step(number) for number in steps]


def torch_save(program: Program) -> bytes:
    file = io.BytesIO()
    torch.save(states_of(program), file)
    return file.getvalue()


def torch_load(file: bytes) -> Any:
    return torch.load(io.BytesIO(file), weights_only=False)


def give(program: Program, states: dict[str, Any]) -> None:
    for name, state in states.items():
        program.objects[name].load_state_dict(state)
    program.loaded()


def require_alike(ours: Program, theirs: Program) -> None:
    """Two programs that were given a state hold equal states, and go on alike."""
    mine = states_of(ours)
    for name, state in states_of(theirs).items():
        assert same(mine[name], state), name
    assert same(run(ours, NEXT), run(theirs, NEXT))


@sampled("kept", KEPT, 20)
def test_a_fresh_program_is_given_what_torch_would_give_it(kept: Case, tmp_path: Path) -> None:
    program, ours, theirs = kept.make(1), kept.make(2), kept.make(2)
    run(program, STEPS)
    file = torch_save(program)
    with Checkpointer(tmp_path, **program.objects, save_rng=False) as saving:
        saving.save(4)
    with Checkpointer(tmp_path, **ours.objects, save_rng=False) as loading:
        loading.restore()
        ours.loaded()
    give(theirs, torch_load(file))
    require_alike(ours, theirs)


@sampled("kept", KEPT, 12)
def test_a_state_dict_comes_back_as_torch_would_give_it(kept: Case, tmp_path: Path) -> None:
    program, ours, theirs = kept.make(1), kept.make(2), kept.make(2)
    run(program, STEPS)
    file = torch_save(program)
    ckpt.save(states_of(program), tmp_path / "states")
    loaded = ckpt.load(tmp_path / "states")
    assert same(loaded, torch_load(file))
    give(ours, loaded)
    give(theirs, torch_load(file))
    require_alike(ours, theirs)


@sampled("kept", KEPT, 12)
def test_a_program_that_has_trained_on_goes_back(kept: Case, tmp_path: Path) -> None:
    ours, theirs = kept.make(1), kept.make(1)
    run(ours, STEPS)
    run(theirs, STEPS)
    file = torch_save(theirs)
    with Checkpointer(tmp_path, **ours.objects, save_rng=False) as going_back:
        going_back.save(4)
        run(ours, NEXT)
        run(theirs, NEXT)
        going_back.restore(4)
        ours.loaded()
        give(theirs, torch_load(file))
        require_alike(ours, theirs)


@sampled("mode", ["sync", "async"])
@sampled("format", ["zarr", "tensorstore", "kimi-engine"])
@pytest.mark.parametrize("case", REFUSED)
def test_an_object_that_cannot_be_kept_is_refused_by_name(case: Case, format: str, mode: str, tmp_path: Path) -> None:
    program = case.make(1)
    run(program, STEPS)
    says = pytest.raises(ConfigurationError, match=f"(optimizer|scheduler|model).*{case.refused}")
    with says, Checkpointer(tmp_path, **program.objects, save_rng=False, format=format, mode=mode) as saving:
        saving.save(4)
    assert not list(tmp_path.glob("**/checkpoint-*"))


def test_every_optimizer_and_scheduler_of_a_package_of_many_is_tried() -> None:
    package = pytest.importorskip("pytorch_optimizer")
    of_package = {kind.__name__ for kind in package.optimizer.OPTIMIZER_LIST}
    tried = {case.name for case in CASES if case.package == "pytorch_optimizer"}
    assert of_package - tried == set(NOT_RUN)
