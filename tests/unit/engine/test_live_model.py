"""A rollout's live model: one version at a time for who reads it, and refusals before a byte moves."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from ckpt.engine import LiveModel, WeightVersion
from ckpt.engine.wire.layout import WeightLayout
from ckpt.errors import CheckpointError, MissingStateError, ReplicationError, ShapeMismatchError
from ckpt.state.statefuls import ModelState
from tests.support.engines import NEVER, TIED, MixedModel, Published, live_model, put, require_same
from tests.support.states import Held

SOON_S = 10.0


def version(step: int) -> WeightVersion:
    return WeightVersion(step, f"{step:032x}")


def layout_of(published: Published) -> WeightLayout:
    layout = WeightLayout(4096, [0], published.tied_names)
    for name, tensor in published:
        layout.add(name, tensor.dtype, tensor.shape)
    return layout


def whole(step: int) -> list[tuple[str, torch.Tensor]]:
    """As a receive buffer yields the weights of a step: contiguous, the alias last."""
    published = Published(MixedModel(step))
    found = {name: tensor.contiguous() for name, tensor in published}
    return [*found.items(), *((alias, found[first]) for alias, first in published.tied_names.items())]


def layout_like(**kinds: tuple[torch.dtype, tuple[int, ...]]) -> WeightLayout:
    layout = WeightLayout(256, [0])
    for name, (dtype, shape) in kinds.items():
        layout.add(name, dtype, shape)
    return layout


def test_a_model_becomes_each_version_in_the_memory_that_it_has() -> None:
    live = live_model()
    before = {name: tensor.data_ptr() for name, tensor in live.state_dict().items()}
    view = live.state_dict()["embed.weight"][3:5]
    for step in (1, 2, 3):
        live.check(layout_of(Published(MixedModel(step))))
        live.load(iter(whole(step)), version(step))
        require_same(live.state_dict(), MixedModel(step).state_dict())
        assert live.version == version(step)
        with live.reading() as held:
            assert held == version(step)
    assert {name: tensor.data_ptr() for name, tensor in live.state_dict().items()} == before
    assert torch.equal(view.view(torch.int32), MixedModel(3).state_dict()["embed.weight"][3:5].view(torch.int32))


class Counting(torch.nn.Module):
    """Many tensors that all hold one number, so that two versions at once are seen."""

    def __init__(self, number: float = -1.0, count: int = 40) -> None:
        super().__init__()
        for index in range(count):
            put(self, f"w{index}", torch.full((257,), number))


def test_a_reader_never_sees_two_versions() -> None:
    module = Counting()
    live = LiveModel(ModelState(module))
    done = threading.Event()
    seen: list[set[Any]] = []

    def read() -> None:
        while not done.is_set():
            with live.reading() as held:
                numbers = {float(value) for tensor in module.state_dict().values() for value in tensor[::64]}
                seen.append(numbers | {-1.0 if held is None else float(held.step)})
                assert live.version == held

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for step in range(1, 40):
        live.load(Counting(float(step)).state_dict().items(), version(step))
    done.set()
    for reader in readers:
        reader.join(SOON_S)
    assert seen and all(len(numbers) == 1 for numbers in seen)
    assert live.version == version(39)


def test_an_update_waits_for_who_reads_and_who_comes_then_waits_for_the_update() -> None:
    live = LiveModel(ModelState(Counting()))
    loaded, late = threading.Event(), []

    def load() -> None:
        live.load(Counting(1.0).state_dict().items(), version(1))
        loaded.set()

    def read() -> None:
        with live.reading() as held:
            late.append(held)

    with live.reading() as held:
        assert held is None
        update = threading.Thread(target=load)
        update.start()
        deadline = time.monotonic() + SOON_S
        while not live._waiting and time.monotonic() < deadline:
            time.sleep(0.001)
        reader = threading.Thread(target=read)
        reader.start()
        assert not loaded.wait(0.2) and late == []
        with live.reading() as again:
            assert again is None, "a thread that reads goes on to read"
        assert not loaded.is_set() and live.version is None
    assert loaded.wait(SOON_S)
    for thread in (update, reader):
        thread.join(SOON_S)
    assert late == [version(1)]


def test_readers_one_behind_the_other_do_not_keep_an_update_out() -> None:
    live = LiveModel(ModelState(Counting()))
    done = threading.Event()
    began = threading.Barrier(3)

    def read(pause_s: float) -> None:
        with live.reading():
            began.wait(SOON_S)
            time.sleep(pause_s)
        while not done.is_set():
            with live.reading():
                time.sleep(0.02)

    readers = [threading.Thread(target=read, args=(pause_s,)) for pause_s in (0.01, 0.02)]
    for reader in readers:
        reader.start()
    began.wait(SOON_S)
    update = threading.Thread(target=live.load, args=(Counting(1.0).state_dict().items(), version(1)), daemon=True)
    update.start()
    update.join(SOON_S)
    done.set()
    for reader in readers:
        reader.join(SOON_S)
    assert live.version == version(1)


def test_a_reader_that_raises_reads_no_more() -> None:
    live = LiveModel(ModelState(Counting()))
    with pytest.raises(ZeroDivisionError), live.reading():
        1 / 0  # noqa: B018
    live.load(Counting(1.0).state_dict().items(), version(1))
    assert live.version == version(1)


def test_after_a_copy_that_failed_nobody_reads_until_the_weights_have_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ckpt.engine.live_model as module

    live = LiveModel(ModelState(Counting()))
    live.load(Counting(1.0).state_dict().items(), version(1))

    def failing(*_: object) -> None:
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="the device is gone"):
        patch.setattr(module, "wait_for_all", failing)
        live.load(Counting(2.0).state_dict().items(), version(2))
    with live.reading() as held:
        assert held == version(1), "the device went before the first copy"

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from [*Counting(2.0).state_dict().items()][:20]
        raise RuntimeError("the device is gone")

    with pytest.raises(RuntimeError, match="the device is gone"):
        live.load(broken(), version(2))
    assert live.version is None
    with pytest.raises(CheckpointError, match="parts of two versions.*send the weights again"), live.reading():
        raise AssertionError("a torn model was read")
    live.load(Counting(3.0).state_dict().items(), version(3))
    with live.reading() as held:
        assert held == version(3)
        require_same(live.state_dict(), Counting(3.0).state_dict())


def test_weights_that_fit_pass_the_check_whether_tied_names_are_sent_or_not() -> None:
    live = live_model()
    published = Published(MixedModel(1))
    assert published.tied_names == TIED
    live.check(layout_of(published))
    published.tied_names = {}
    live.check(layout_of(published))
    live.load([(name, tensor.contiguous()) for name, tensor in published], version(1))
    require_same(live.state_dict(), MixedModel(1).state_dict())


def test_names_that_one_side_alone_has_are_refused() -> None:
    live = LiveModel(Held({"a": torch.zeros(2), "b": torch.zeros(3)}))
    floats = torch.float32
    with pytest.raises(MissingStateError, match=r"1 \(b\) not sent, none not in the model; build both from the same"):
        live.check(layout_like(a=(floats, (2,))))
    with pytest.raises(MissingStateError, match=r"none not sent, 1 \(c\) not in the model"):
        live.check(layout_like(a=(floats, (2,)), b=(floats, (3,)), c=(floats, (1,))))
    many = {f"x{number}": (floats, (1,)) for number in range(5)}
    with pytest.raises(MissingStateError, match=r"2 \(a, b\) not sent, 5 \(x0, x1, x2, \.\.\.\) not in the model"):
        live.check(layout_like(**many))
    with pytest.raises(MissingStateError, match="none not sent, 1 .head. not in the model"):
        layout = WeightLayout(256, [0], {"head": "a"})
        layout.add("a", floats, (2,))
        layout.add("b", floats, (3,))
        live.check(layout)


def test_another_shape_or_type_is_refused_with_both_and_a_cast_is_offered_where_there_is_one() -> None:
    live = LiveModel(Held({"a": torch.zeros(2, 3, dtype=torch.bfloat16), "n": torch.tensor(5)}))
    number = (torch.int64, ())
    with pytest.raises(ShapeMismatchError, match=r"^a: the trainers send bfloat16 \[3, 2\], .* bfloat16 \[2, 3\]$"):
        live.check(layout_like(a=(torch.bfloat16, (3, 2)), n=number))
    offer = r"send float32 \[2, 3\], .* bfloat16 \[2, 3\]; cast what is sent with rollout_dtype=bfloat16, or make"
    with pytest.raises(ShapeMismatchError, match=offer):
        live.check(layout_like(a=(torch.float32, (2, 3)), n=number))
    for dtype in (torch.float8_e4m3fn, torch.int16):
        with pytest.raises(ShapeMismatchError, match=r"bfloat16 \[2, 3\]$"):
            live.check(layout_like(a=(dtype, (2, 3)), n=number))
    with pytest.raises(
        ShapeMismatchError, match=r"n: the trainers send int32 \[\], the rollout's model has int64 \[\]$"
    ):
        live.check(layout_like(a=(torch.bfloat16, (2, 3)), n=(torch.int32, ())))


class Tied(torch.nn.Module):
    """`b` is `a`, by memory, or by declaration alone."""

    def __init__(self, *, by_memory: bool) -> None:
        super().__init__()
        put(self, "b", torch.full((5,), -1.0))
        put(self, "a", self.get_parameter("b") if by_memory else torch.full((5,), -1.0))
        if not by_memory:
            self.tied_names = {"b": "a"}


@pytest.mark.parametrize("by_memory", [True, False])
@pytest.mark.parametrize("sent", ["a", "b"])
def test_a_tied_weight_is_there_under_all_names_whichever_of_them_is_sent(sent: str, by_memory: bool) -> None:
    live = LiveModel(ModelState(Tied(by_memory=by_memory)))
    live.check(layout_like(**{sent: (torch.float32, (5,))}))
    live.load([(sent, torch.arange(5.0))], version(1))
    require_same(live.state_dict(), {"a": torch.arange(5.0), "b": torch.arange(5.0)})


def test_names_that_are_one_tensor_here_have_to_come_with_one_value() -> None:
    live = LiveModel(ModelState(Tied(by_memory=True)))
    both = {"a": (torch.float32, (5,)), "b": (torch.float32, (5,))}
    live.check(layout_like(**both))
    live.load([("a", torch.arange(5.0)), ("b", torch.arange(5.0))], version(1))
    with pytest.raises(ReplicationError, match="a and b are one tensor in the rollout's model, .* different values"):
        live.load([("a", torch.arange(5.0)), ("b", torch.ones(5))], version(2))
    with live.reading() as held:
        assert held == version(1)
        require_same(live.state_dict(), {"a": torch.arange(5.0), "b": torch.arange(5.0)})


def test_a_model_whose_weights_want_gradients_is_changed_without_history() -> None:
    module = torch.nn.Linear(3, 2)
    live = LiveModel(ModelState(module))
    weights = [("weight", torch.ones(2, 3)), ("bias", torch.zeros(2))]
    live.load(weights, version(1))
    assert module.weight.requires_grad and module.weight.is_leaf and module.weight.grad_fn is None
    module(torch.ones(3)).sum().backward()
    assert torch.equal(module.weight.grad, torch.ones(2, 3))


def test_plain_values_beside_the_weights_are_no_weights() -> None:
    live = LiveModel(Held({"a": torch.zeros(2), "calls": 7, "nested": {"b": torch.zeros(1), "name": "x"}}))
    live.check(layout_like(**{"a": (torch.float32, (2,)), "nested.b": (torch.float32, (1,))}))
    live.load([("a", torch.ones(2)), ("nested.b", torch.full((1,), 3.0))], version(1))
    assert live.state_dict()["nested"]["b"].item() == 3.0 and live.state_dict()["calls"] == 7


def test_many_threads_may_read_at_once() -> None:
    live = live_model()
    together = threading.Barrier(4)

    def read() -> None:
        with live.reading():
            together.wait(SOON_S)

    with ExitStack() as stack:
        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
            stack.callback(thread.join, SOON_S)
    assert not together.broken and not live._inside


def test_a_model_holds_no_version_before_the_first_update() -> None:
    live = live_model()
    assert live.version is None
    require_same(live.state_dict(), MixedModel(NEVER).state_dict())
