"""What `data=` may make, and how its position is kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

from ckpt.errors import ConfigurationError
from recipes.training.data import batches_of

HERE = __name__
NUM, BATCH = 10, 4


def dataset(rows: int = NUM) -> TensorDataset:
    return TensorDataset(torch.arange(rows), 100 + torch.arange(rows))


def loader(shuffle: bool = False, workers: int = 0, **named: Any) -> DataLoader[Any]:
    return DataLoader(dataset(), shuffle=shuffle, num_workers=workers, **named)


class Backwards(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(NUM)[::-1])

    def __len__(self) -> int:
        return NUM


def loader_with_sampler() -> DataLoader[Any]:
    return DataLoader(dataset(), sampler=Backwards())


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


def stream() -> DataLoader[Any]:
    return DataLoader(Stream())


class Kept:
    """Yields 0 to 4, from where a state says; draws a random number when it begins, as torch's loaders do."""

    def __init__(self, *, rank_batch_size: int, share: tuple[int, int]) -> None:
        self.given = rank_batch_size, share
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        torch.rand(1)
        return self._rest()

    def _rest(self) -> Iterator[int]:
        while self.at < 5:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Nothing(Kept):
    def __iter__(self) -> Iterator[int]:
        return iter(())


def made(target: str, share: tuple[int, int] = (0, 1), seed: int = 3, *, kept: bool = True, **keys: Any) -> Any:
    offered = {"batch_size": BATCH, "rank_batch_size": BATCH // share[1], "share": share, "seed": seed}
    offered |= {"device": torch.device("cpu"), "model": None}
    return batches_of({"_target_": f"{HERE}.{target}", **keys}, offered, is_kept=kept)


def drawn(batches: Any, num: int) -> list[list[int]]:
    found = []
    for _ in range(num):
        inputs, target = batches.next_batch()
        assert torch.equal(target, 100 + inputs)
        found.append(inputs.tolist())
    return found


def test_a_dataset_is_shuffled_and_a_loader_is_in_the_order_that_it_says() -> None:
    assert drawn(made("loader"), 3) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]
    epoch = [at for rows in drawn(made("dataset"), 5) for at in rows]
    assert sorted(epoch[:NUM]) == sorted(epoch[NUM:]) == list(range(NUM))
    assert epoch[:NUM] != epoch[NUM:] and epoch[:NUM] != sorted(epoch[:NUM])
    assert drawn(made("loader", shuffle=True), 5) == drawn(made("dataset"), 5)


def test_ranks_draw_the_parts_of_one_batch() -> None:
    whole = drawn(made("dataset"), 4)
    parts = [drawn(made("dataset", share=(number, 2)), 4) for number in range(2)]
    assert [first + second for first, second in zip(*parts, strict=True)] == whole


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("stop", [0, 1, 4, 5])
def test_a_loader_goes_on_with_the_very_next_sample_on_other_ranks_too(workers: int, stop: int) -> None:
    straight = drawn(made("dataset"), 9)
    first = made("loader", shuffle=True, workers=workers)
    drawn(first, stop)
    state = json.loads(json.dumps(first.state_dict()))
    assert state == {"position": BATCH * stop, "epoch": BATCH * stop // NUM, "seed": 3, "samples": NUM}
    resumed = made("loader", seed=7, shuffle=True, workers=workers)
    resumed.load_state_dict(state)
    assert drawn(resumed, 9 - stop) == straight[stop:]
    halves = [made("dataset", share=(number, 2)) for number in range(2)]
    for half in halves:
        half.load_changed([state] * 3)
    assert [a + b for a, b in zip(*(drawn(half, 3) for half in halves), strict=True)] == straight[stop : stop + 3]


def test_drawing_leaves_the_generators_of_the_run_alone() -> None:
    before = torch.get_rng_state()
    drawn(made("loader", shuffle=True), 5)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_position_in_other_data_is_refused() -> None:
    state = made("dataset").state_dict()
    with pytest.raises(ConfigurationError, match=r"the TensorDataset of data= differs .* \(samples 10, now 9\).*~components\.dataset"):
        made("dataset", rows=9).load_state_dict(state)


def test_a_loader_with_a_state_of_its_own_keeps_it_and_gets_what_it_names() -> None:
    first = made("Kept", share=(1, 2))
    assert first.loader.given == (2, (1, 2)) and first.sharing_pattern == "per_rank"
    assert [first.next_batch() for _ in range(7)] == [0, 1, 2, 3, 4, 0, 1]
    resumed = made("Kept")
    resumed.load_state_dict(first.state_dict())
    torch.manual_seed(5)  # the random generators are restored last
    assert [resumed.next_batch() for _ in range(3)] == [2, 3, 4]
    after = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(1), after), "the run that was not interrupted drew nothing either"
    assert resumed.fits({}) and resumed.next_batch() == 0
    with pytest.raises(ConfigurationError, match="Kept has kept a position for each of 2 ranks, and no method load_changed"):
        resumed.load_changed([{}, {}])


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("loader_with_sampler", r"a DataLoader has sampler=Backwards, batch_size=1: the run makes the order of samples"),
        ("stream", r"makes a DataLoader without state_dict and load_state_dict, whose position no checkpoint can keep: "),
        ("drawn", r"makes a NoneType; expected a dataset"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_what_can(target: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if target == "drawn":
        monkeypatch.setitem(globals(), "drawn", lambda: None)
    with pytest.raises(ConfigurationError, match=said):
        made(target)


def test_a_batch_size_that_is_not_the_run_s_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"batch_size=3: .* train\.batch_size over all ranks, 2 rows of each"):
        made("loader", share=(0, 2), batch_size=3)
    assert drawn(made("loader", share=(0, 2), batch_size=2), 1) == [[0, 1]]


def test_a_stream_can_be_trained_on_without_its_position() -> None:
    batches = made("stream", kept=False)
    assert [batches.next_batch().item() for _ in range(6)] == [0, 1, 2, 3, 4, 0]
    with pytest.raises(ConfigurationError, match="Nothing yields no batches"):
        made("Nothing").next_batch()
