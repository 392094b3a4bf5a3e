"""Tensors that are more than values: classes, gradients, strides; those that are refused; and what a program has set in torch."""

from __future__ import annotations

import ast
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import ckpt
from ckpt import Checkpointer
from ckpt.errors import ConfigurationError
from ckpt.state import tensor_classes
from tests.fidelity.same import same
from tests.fidelity.test_kinds import Kept, as_torch_gives_it, through_checkpointer
from tests.support.covering import sampled

BACKENDS = ("zarr", "tensorstore", "kimi-engine")


class Tagged(torch.Tensor):
    """Wraps nothing; instances may have attributes."""


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_classes, "_allowed", set())
    assert ckpt.keep_tensor_class(TwoTensor) is TwoTensor


def two(begin: float) -> Any:
    return TwoTensor(torch.arange(6.0) + begin, torch.arange(6.0) * 10 + begin)


def tagged() -> torch.Tensor:
    tensor = torch.arange(4.0).as_subclass(Tagged)
    vars(tensor)["box"] = ("xyxy", 3)
    return tensor


KEPT: dict[str, Callable[[], Any]] = {
    "parameter": lambda: torch.nn.Parameter(torch.arange(3.0)),
    "frozen parameter": lambda: torch.nn.Parameter(torch.arange(3), requires_grad=False),
    "leaf with gradient": lambda: torch.arange(3.0).requires_grad_(),
    "result with gradient": lambda: torch.arange(3.0).requires_grad_() * 2,
    "by columns": lambda: torch.linalg.qr(torch.arange(16.0).view(4, 4) + torch.eye(4))[0],
    "transposed": lambda: torch.arange(6).view(2, 3).t(),
    "channels last": lambda: torch.arange(120.0).view(1 + 1, 3, 4, 5).to(memory_format=torch.channels_last),
    "subclass": tagged,
    "conjugated": lambda: torch.complex(torch.arange(3.0), torch.ones(3)).conj(),
    "negative": lambda: torch.complex(torch.arange(3.0), torch.ones(3)).conj().imag,
    "view": lambda: torch.arange(100.0)[5:90:7],
    "expanded": lambda: torch.arange(3.0)[:, None].expand(3, 4),
    "overlapping": lambda: torch.arange(5.0).as_strided((3, 3), (1, 1)),
    "no dimension": lambda: torch.tensor(7, dtype=torch.int16),
    "no elements": lambda: torch.empty(0, 3),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_tensor_comes_back_as_torch_gives_it(name: str, tmp_path: Path) -> None:
    state = {"t": KEPT[name](), "list": [1, KEPT[name]()], "n": 1}
    want = as_torch_gives_it(state)
    assert same(through_checkpointer(state, {}, tmp_path), want)
    ckpt.save(state, tmp_path / "given")
    assert same(ckpt.load(tmp_path / "given"), want)


def test_a_class_that_the_program_has_not_imported_becomes_a_tensor_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ckpt.save({"t": tagged()}, tmp_path / "one")
    monkeypatch.delitem(globals(), "Tagged")
    assert same(ckpt.load(tmp_path / "one")["t"], torch.arange(4.0))
    assert "Tagged is a torch.Tensor now" in caplog.text


def test_tensors_of_one_shape_keep_orders_of_their_own(tmp_path: Path) -> None:
    state = {"q": torch.arange(64.0).view(8, 8).t(), "g": torch.ones(8, 8)}
    ckpt.save(state, tmp_path / "one")
    assert same(ckpt.load(tmp_path / "one"), state)


def test_attributes_of_an_empty_dictionary_are_kept(tmp_path: Path) -> None:
    empty: OrderedDict[str, Any] = OrderedDict()
    vars(empty)["t"] = torch.ones(1)
    ckpt.save({"o": empty}, tmp_path / "one")
    assert same(ckpt.load(tmp_path / "one"), {"o": empty})


def test_an_object_that_holds_a_result_with_gradient_is_given_a_new_tensor(tmp_path: Path) -> None:
    saved, own = torch.arange(3.0).requires_grad_(), torch.zeros(3).requires_grad_() * 1
    found = through_checkpointer({"t": saved}, {"t": own}, tmp_path)["t"]
    assert found.is_leaf and found is not own and same(found, saved)


class Two(torch.nn.Module):
    def __init__(self, begin: float) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(two(begin))
        self.b = torch.nn.Parameter(torch.zeros(2) + begin)


@sampled("mode", ["sync", "async"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wrapper_of_tensors_is_refused_by_name_before_a_byte_is_copied(backend: str, mode: Any, tmp_path: Path) -> None:
    refused = pytest.raises(ConfigurationError, match=r"model: w is a .*TwoTensor, which wraps other tensors.*keep_tensor_class")
    with Checkpointer(tmp_path, model=Two(0), format=backend, mode=mode) as saving, refused:
        saving.save(1)
    assert not list(tmp_path.rglob("*manifest*"))


@sampled("mode", ["sync", "async"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.usefixtures("allowed")
def test_a_wrapper_of_an_allowed_class_is_saved_as_what_it_wraps(backend: str, mode: Any, tmp_path: Path) -> None:
    model, fresh = Two(1), Two(5)
    with Checkpointer(tmp_path, model=model, own=Kept({"t": [two(2)], "z": 1}), format=backend, mode=mode) as saving:
        saving.save(1)
    own, memory = Kept({}), fresh.w.a.data_ptr()
    with Checkpointer(tmp_path, model=fresh, own=own, format=backend) as loading:
        loading.restore()
    assert same(fresh.state_dict(), model.state_dict())
    assert fresh.w.a.data_ptr() == memory
    assert same(own.value, {"t": [two(2)], "z": 1})


@pytest.mark.usefixtures("allowed")
def test_a_wrapper_whose_class_is_not_allowed_at_the_load_stops_it_before_anything_is_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Checkpointer(tmp_path, model=torch.nn.Linear(2, 2), own=Kept({"t": two(2)})) as saving:
        saving.save(1)
    monkeypatch.setattr(tensor_classes, "_allowed", set())
    fresh = torch.nn.Linear(2, 2)
    before = fresh.weight.detach().clone()
    refused = pytest.raises(ConfigurationError, match=r"TwoTensor.*not imported, or does not allow.*keep_tensor_class")
    with Checkpointer(tmp_path, model=fresh, own=Kept({})) as loading, refused:
        loading.restore()
    assert torch.equal(fresh.weight, before)


def test_a_class_of_a_function_is_refused_by_the_name_of_the_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_classes, "_allowed", set())

    @ckpt.keep_tensor_class
    class Inner(TwoTensor):  # type: ignore[misc]
        pass

    with pytest.raises(ConfigurationError, match=r"state: x is a .*Inner, which a load would not find"):
        ckpt.save({"x": Inner(torch.ones(2), torch.ones(2))}, tmp_path / "one")
    with pytest.raises(ConfigurationError, match=r"has no __tensor_flatten__"):
        ckpt.keep_tensor_class(Tagged)


def lazy() -> Any:
    return torch.nn.LazyLinear(3).weight


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "coo": (lambda: torch.eye(3).to_sparse(), "layout torch.sparse_coo"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "layout torch.sparse_csr"),
    "bsr": (lambda: torch.eye(4).to_sparse_bsr((2, 2)), "layout torch.sparse_bsr"),
    "mkldnn": (lambda: torch.eye(3).to_mkldnn(), "layout torch._mkldnn"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.arange(4.0), 0.1, 0, torch.qint8), "quantized"),
    "meta": (lambda: torch.empty(3, device="meta"), "on the device meta"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
    "jagged": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "wraps other tensors"),
    "lazy": (lazy, "not initialized yet"),
    "zeros without memory": (lambda: torch._efficientzerotensor(3), "without memory"),
    "bits": (lambda: torch.zeros(4, dtype=torch.uint8).view(torch.bits8), "torch.bits8"),
}


@sampled("mode", ["sync", "async"])
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, for kinds that it has on trial
def test_a_tensor_without_memory_of_its_own_is_refused_by_name(name: str, mode: Any, tmp_path: Path) -> None:
    make, why = REFUSED[name]
    refused = pytest.raises(ConfigurationError, match=rf"(?s)deep.*odd.*{why}")
    with Checkpointer(tmp_path, own=Kept({"n": 1, "deep": [{"odd": make()}]}), mode=mode) as saving, refused:
        saving.save(1)
    assert not list(tmp_path.rglob("*manifest*"))


def test_attributes_of_a_dictionary_that_has_none_are_refused(tmp_path: Path) -> None:
    counter = Counter("ab")
    vars(counter)["extra"] = 1
    with pytest.raises(ConfigurationError, match=r"state: c is a Counter with attributes"):
        ckpt.save({"c": counter}, tmp_path / "one")


def test_a_key_that_is_not_kept_is_refused_by_the_name_of_its_dictionary(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"state: inner: a key is a builtins.object"):
        ckpt.save({"inner": {object(): torch.ones(1)}}, tmp_path / "one")


class Asked(Kept):
    """Is changed when it is asked for its state, as loaders with workers are."""

    asked = 0

    def state_dict(self) -> Any:
        self.asked += 1
        return super().state_dict()


def test_an_object_is_given_what_was_saved_without_being_asked_for_its_own(tmp_path: Path) -> None:
    saved = {"position": 8, "generator": torch.arange(5, dtype=torch.uint8)}
    with Checkpointer(tmp_path, own=Kept(saved)) as saving:
        saving.save(1)
    own = Asked({"position": 0, "generator": torch.zeros(5, dtype=torch.uint8)})
    with Checkpointer(tmp_path, own=own) as loading:
        loading.restore()
        assert own.asked == 0
    assert same(own.value, saved)


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SETTINGS: dict[str, Callable[[], Any]] = {
    "default device": default_device,
    "default dtype": default_dtype,
    "inference": torch.inference_mode,
    "no grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic": deterministic,
    "anomaly": torch.autograd.detect_anomaly,
}


@pytest.mark.parametrize("setting", SETTINGS)
@sampled("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_what_a_program_has_set_in_torch_changes_nothing(backend: str, setting: str, tmp_path: Path) -> None:
    def run() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).bfloat16()
        return model, torch.optim.AdamW(model.parameters())

    state = {"t": torch.arange(5, dtype=torch.int8), "p": torch.nn.Parameter(torch.ones(2)), "x": 1.5}
    (model, optimizer), (model_b, optimizer_b) = run(), run()
    model(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    own = Kept({})
    with SETTINGS[setting](), Checkpointer(tmp_path, model=model, optimizer=optimizer, own=Kept(state), format=backend) as saving:
        saving.save(1)
    loading = Checkpointer(tmp_path, model=model_b, optimizer=optimizer_b, own=own, format=backend)
    with SETTINGS[setting](), loading:
        loading.restore()
    assert same(model_b.state_dict(), model.state_dict())
    assert same(optimizer_b.state_dict(), optimizer.state_dict())
    assert same(own.value, state)
    assert not any(tensor.is_inference() for tensor in (own.value["t"], optimizer_b.state[next(model_b.parameters())]["exp_avg"]))


def test_no_tensor_is_made_where_the_program_has_set_the_default_device() -> None:
    makers = {"empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn", "randint", "empty_strided", "as_tensor", "linspace"}
    left = []
    for path in sorted(Path(ckpt.__file__).parent.rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.func.attr not in makers:
                continue
            if ast.unparse(call.func.value) == "torch" and {"device", None}.isdisjoint(one.arg for one in call.keywords):
                left.append(f"{path.name}:{call.lineno} torch.{call.func.attr}")
    assert not left
