"""Optimizers and schedulers of torch: saved, loaded by a fresh program, and trained on, the next steps are equal to the bit."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import ckpt
from ckpt import Checkpointer
from ckpt.errors import ConfigurationError
from ckpt.state.statefuls import OptimizerState
from tests.fidelity.same import same
from tests.support.covering import sampled

Make = Callable[[Any], torch.optim.Optimizer]


class Counting(torch.optim.SGD):
    """Keeps a counter and a tensor under a key of `state` that is no parameter."""

    def step(self, closure: Any = None) -> Any:
        shared = self.state["global"]
        shared["k"] = shared.get("k", 0) + 1
        shared.setdefault("ema", torch.zeros(3)).add_(1)
        return super().step(closure)


class Lookahead(torch.optim.SGD):
    """Keeps slow weights and a count in its own state dict, beside torch's."""

    def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.9) -> None:
        super().__init__(params, lr=lr, momentum=momentum)
        self.rounds = 0
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.rounds += 1
        if self.rounds % 3 == 0:
            for group, slow in zip(self.param_groups, self.slow, strict=True):
                for fast, kept in zip(group["params"], slow, strict=True):
                    kept.lerp_(fast.detach(), 0.5)
                    fast.data.copy_(kept)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": self.slow, "rounds": self.rounds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        rest = dict(state_dict)
        self.slow, self.rounds = rest.pop("slow"), rest.pop("rounds")
        super().load_state_dict(rest)


class Wrapping(torch.optim.Optimizer):
    """Holds another optimizer; its state dict is not of torch's form."""

    def __init__(self, params: Any) -> None:
        self.inner = torch.optim.AdamW(params, lr=0.05)
        super().__init__(self.inner.param_groups, {})
        self.calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        return self.inner.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "calls": self.calls}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict["inner"])
        self.calls = state_dict["calls"]


def _of_torch() -> Iterator[tuple[str, Make]]:
    for name, kind in vars(torch.optim).items():
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
            yield name, kind
    yield "SGD, momentum", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)
    yield "Adam, amsgrad", lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True)
    yield "Adam, tensor lr", lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1))
    yield "Adam, capturable", lambda p: torch.optim.Adam(p, lr=0.1, foreach=False)
    yield "RMSprop, centered", lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True)
    yield "LBFGS, line search", lambda p: torch.optim.LBFGS(p, line_search_fn="strong_wolfe", history_size=3)
    yield "a key of no parameter", lambda p: Counting(p, lr=0.1, momentum=0.9)
    yield "entries of its own", Lookahead
    yield "a form of its own", Wrapping


OPTIMIZERS = dict(_of_torch())


class Net(torch.nn.Module):
    """Two layers, or an embedding with sparse gradients or matrices alone, for the optimizers that want these."""

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.is_sparse = kind == "SparseAdam"
        if self.is_sparse:
            self.embedding = torch.nn.Embedding(5, 3, sparse=True)
        else:
            self.layers = torch.nn.Sequential(torch.nn.Linear(3, 4, bias=kind != "Muon"), torch.nn.Linear(4, 2, bias=kind != "Muon"))

    def forward(self, step: int) -> torch.Tensor:
        if self.is_sparse:
            out: torch.Tensor = self.embedding(torch.tensor([step % 5, (step + 1) % 5]))
        else:
            out = self.layers(torch.ones(2, 3) * (step % 3 + 1))
        return out.square().mean()


def train(net: Net, optimizer: torch.optim.Optimizer, first: int, last: int, scheduler: Any = None) -> list[Any]:
    found: list[Any] = []
    for step in range(first, last):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(step)
            loss.backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        if scheduler is not None:
            scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
        found.append([p.detach().clone() for p in net.parameters()])
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_fresh_program_goes_on_as_the_old_one(name: str, tmp_path: Path) -> None:
    net = Net(name, seed=1)
    optimizer = OPTIMIZERS[name](net.parameters())
    train(net, optimizer, 0, 4)
    with Checkpointer(tmp_path, model=net, optimizer=optimizer) as saving:
        saving.save(4)
    want = train(net, optimizer, 4, 14)
    fresh = Net(name, seed=2)
    its_optimizer = OPTIMIZERS[name](fresh.parameters())
    with Checkpointer(tmp_path, model=fresh, optimizer=its_optimizer) as loading:
        loading.restore()
    assert same(train(fresh, its_optimizer, 4, 14), want)


@sampled("strict", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_program_that_has_trained_on_goes_back(name: str, strict: bool, tmp_path: Path) -> None:
    """To before its first step, when the optimizer had no state, and to a later one."""
    net = Net(name, seed=1)
    optimizer = OPTIMIZERS[name](net.parameters())
    with Checkpointer(tmp_path, model=net, optimizer=optimizer) as checkpointer:
        for start in (0, 3):
            checkpointer.save(start)
            before = train(net, optimizer, start, start + 3)
            checkpointer.restore(start, strict=strict)
            assert same(train(net, optimizer, start, start + 3), before)


def _schedulers() -> Iterator[tuple[str, Callable[[torch.optim.Optimizer], Any]]]:
    yield "StepLR", lambda o: lr_scheduler.StepLR(o, 2)
    yield "MultiStepLR", lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 5, 8])
    yield "ConstantLR", lambda o: lr_scheduler.ConstantLR(o, total_iters=3)
    yield "LinearLR", lambda o: lr_scheduler.LinearLR(o, total_iters=6)
    yield "ExponentialLR", lambda o: lr_scheduler.ExponentialLR(o, 0.9)
    yield "PolynomialLR", lambda o: lr_scheduler.PolynomialLR(o, 9)
    yield "CosineAnnealingLR", lambda o: lr_scheduler.CosineAnnealingLR(o, 7)
    yield "CosineAnnealingWarmRestarts", lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3)
    yield "CyclicLR", lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3)
    yield "OneCycleLR", lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=30)
    yield "ReduceLROnPlateau", lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1)
    yield "LambdaLR", lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch)
    yield "MultiplicativeLR", lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9)
    yield "SequentialLR", lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], [4]
    )
    yield "ChainedScheduler", lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=3), lr_scheduler.MultiStepLR(o, [5])]
    )
    yield "SWALR", lambda o: torch.optim.swa_utils.SWALR(o, 0.05)


SCHEDULERS = dict(_schedulers())


def test_every_scheduler_of_torch_is_tried() -> None:
    of_torch = {
        name
        for name, kind in vars(lr_scheduler).items()
        if inspect.isclass(kind) and issubclass(kind, lr_scheduler.LRScheduler) and not name.startswith("_")
    }
    assert of_torch - {"LRScheduler"} <= SCHEDULERS.keys()


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_on_and_its_state_has_the_types_it_had(name: str, tmp_path: Path) -> None:
    net = Net("", seed=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scheduler = SCHEDULERS[name](optimizer)
    train(net, optimizer, 0, 4, scheduler)
    with Checkpointer(tmp_path, model=net, optimizer=optimizer, scheduler=scheduler) as saving:
        saving.save(4)
    want = train(net, optimizer, 4, 14, scheduler)
    fresh = Net("", seed=2)
    its_optimizer = torch.optim.SGD(fresh.parameters(), lr=0.1, momentum=0.9)
    its_scheduler = SCHEDULERS[name](its_optimizer)
    with Checkpointer(tmp_path, model=fresh, optimizer=its_optimizer, scheduler=its_scheduler) as loading:
        loading.restore()
    assert same(train(fresh, its_optimizer, 4, 14, its_scheduler), want)
    assert same(its_scheduler.state_dict(), scheduler.state_dict())


def test_hooks_of_an_optimizer_are_called(tmp_path: Path) -> None:
    net, seen = Net("", seed=1), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    optimizer.register_state_dict_post_hook(lambda optimizer, state: {**state, "epoch": 7})
    train(net, optimizer, 0, 2)
    with Checkpointer(tmp_path, model=net, optimizer=optimizer) as saving:
        saving.save(2)
    fresh = Net("", seed=2)
    other = torch.optim.SGD(fresh.parameters(), lr=0.1, momentum=0.9)
    other.register_load_state_dict_pre_hook(lambda optimizer, state: seen.append(state["epoch"]))
    other.register_load_state_dict_post_hook(lambda optimizer: seen.append("after"))
    with Checkpointer(tmp_path, model=fresh, optimizer=other) as loading:
        loading.restore()
    assert seen == [7, "after"]
    assert same(train(fresh, other, 2, 6), train(net, optimizer, 2, 6))


def test_a_group_that_is_added_later_is_saved(tmp_path: Path) -> None:
    def made(seed: int) -> tuple[Net, torch.optim.Optimizer]:
        net = Net("", seed)
        return net, torch.optim.AdamW(net.layers[1].parameters(), lr=0.1)

    net, optimizer = made(1)
    with Checkpointer(tmp_path, model=net, optimizer=optimizer) as saving:
        train(net, optimizer, 0, 2)
        saving.save(2)
        optimizer.add_param_group({"params": net.layers[0].parameters(), "lr": 0.01})
        train(net, optimizer, 2, 4)
        saving.save(4)
    fresh, other = made(2)
    with Checkpointer(tmp_path, model=fresh, optimizer=other) as loading:
        other.add_param_group({"params": fresh.layers[0].parameters(), "lr": 0.5})
        loading.restore()
    assert same(train(fresh, other, 4, 8), train(net, optimizer, 4, 8))


def test_one_optimizer_over_the_parameters_of_two_modules(tmp_path: Path) -> None:
    def made(seed: int) -> tuple[torch.nn.Module, torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        a, b = torch.nn.Linear(3, 2), torch.nn.Linear(2, 2)
        return a, b, torch.optim.Adam([*a.parameters(), *b.parameters()], lr=0.1)

    def steps(a: torch.nn.Module, b: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        for _ in range(3):
            optimizer.zero_grad()
            b(a(torch.ones(1, 3))).square().sum().backward()
            optimizer.step()
        return [*a.state_dict().values(), *b.state_dict().values()]

    a, b, optimizer = made(1)
    steps(a, b, optimizer)
    with Checkpointer(tmp_path, encoder=a, decoder=b, optimizer=optimizer) as saving:
        path = saving.save(3)
    fresh = made(2)
    with Checkpointer(tmp_path, encoder=fresh[0], decoder=fresh[1], optimizer=fresh[2]) as loading:
        loading.restore()
    assert same(steps(*fresh), steps(a, b, optimizer))
    names = ckpt.load(tmp_path / "checkpoint-00000003")["optimizer"]["param_groups"]
    assert list(names) == ["encoder.weight", "encoder.bias", "decoder.weight", "decoder.bias"], path


@pytest.mark.parametrize(("saved", "wanted"), [(0.1, torch.tensor(0.5)), (torch.tensor(0.1), 0.5)], ids=["number", "tensor"])
def test_a_learning_rate_comes_back_as_it_was_saved(saved: Any, wanted: Any, tmp_path: Path) -> None:
    net = Net("", seed=1)
    optimizer = torch.optim.Adam(net.parameters(), lr=saved)
    train(net, optimizer, 0, 2)
    with Checkpointer(tmp_path, model=net, optimizer=optimizer) as saving:
        saving.save(2)
    other = torch.optim.Adam(net.parameters(), lr=wanted)
    with Checkpointer(tmp_path, model=net, optimizer=other) as loading:
        loading.restore()
    assert same(other.param_groups[0]["lr"], saved)


def test_a_load_that_is_refused_leaves_everything_as_it_was(tmp_path: Path) -> None:
    """Parameters of one group here were saved with different options."""
    net = Net("", seed=1)
    first, second = net.layers
    optimizer = torch.optim.Adam([{"params": first.parameters()}, {"params": second.parameters(), "lr": 0.5}], lr=0.1)
    train(net, optimizer, 0, 2)
    with Checkpointer(tmp_path, model=net, optimizer=optimizer) as saving:
        saving.save(2)
    other = Net("", seed=2)
    its_optimizer = torch.optim.Adam(other.parameters(), lr=0.3)
    train(other, its_optimizer, 0, 1)
    before = [p.detach().clone() for p in other.parameters()], its_optimizer.state_dict()
    moments = [one["exp_avg"].clone() for one in its_optimizer.state.values()]
    says = pytest.raises(ConfigurationError, match="share a parameter group in this run")
    with Checkpointer(tmp_path, model=other, optimizer=its_optimizer) as loading, says:
        loading.restore()
    assert same([p.detach() for p in other.parameters()], before[0])
    assert same([one["exp_avg"] for one in its_optimizer.state.values()], moments)


def test_a_saved_state_without_entries_or_without_options_is_taken() -> None:
    """As other programs save one: an optimizer that keeps nothing has no `state`."""
    net = Net("", seed=1)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    train(net, optimizer, 0, 2)
    stateful = OptimizerState(optimizer, net)
    saved = stateful.state_dict()
    stateful.load_state_dict({"state": saved["state"]})
    assert len(optimizer.state) == len(list(net.parameters()))
    options = {name: {**one, "lr": 0.25} for name, one in saved["param_groups"].items()}
    stateful.load_state_dict({"param_groups": options})
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 0.25


class Shared(torch.optim.SGD):
    """Keeps a count under a key of `state` that comes before those of the parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.state["shared"] = {"k": torch.zeros(1)}


def test_the_state_of_an_optimizer_keeps_its_order(tmp_path: Path) -> None:
    net, fresh = Net("", seed=1), Net("", seed=2)
    optimizer, other = Shared(net.parameters()), Shared(fresh.parameters())
    train(net, optimizer, 0, 2)
    with Checkpointer(tmp_path, model=net, optimizer=optimizer) as saving:
        saving.save(2)
    with Checkpointer(tmp_path, model=fresh, optimizer=other) as loading:
        loading.restore()
    assert list(other.state_dict()["state"]) == list(optimizer.state_dict()["state"]) == ["shared", 0, 1, 2, 3]
