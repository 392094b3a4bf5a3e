from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import ConfigurationError
from ckpt.ranks.topology import Topology
from recipes.training.data import SampleLoader, shuffled
from recipes.training.text import DEFAULT_BYTES, Corpus, TextData, TextLoader, Windows

CONTEXT = 7
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five files of together 1,000 bytes, some in folders, one empty; byte i of the row is i modulo 251."""
    row = bytes(i % 251 for i in range(1000))
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "a").write_bytes(row[:3])
    (tmp_path / "b").write_bytes(b"")
    (tmp_path / "c").write_bytes(row[3:500])
    (tmp_path / "deep" / "d").write_bytes(row[500:501])
    (tmp_path / "deep" / "er" / "e").write_bytes(row[501:])
    (tmp_path / ".hidden").write_bytes(b"x" * 99)
    return tmp_path


def loader(folder: Path, *, dispatch: bool = True, batch_size: int = 4, seed: int = 0) -> TextLoader:
    data = TextData(path=str(folder), dispatch=dispatch)
    return data.loader(
        context=CONTEXT, batch_size=batch_size, seed=seed, topology=Topology.alone(), device=CPU, share=(0, 1)
    )


def batches(source: TextLoader, num: int) -> list[list[list[int]]]:
    """Rows of whole windows: the tokens, and the last one that is only a target."""
    drawn = (source.next_batch() for _ in range(num))
    return [torch.cat([tokens, following[:, -1:]], dim=1).tolist() for tokens, following in drawn]


def in_order(folder: Path, seed: int) -> SampleLoader:
    return SampleLoader(Windows(TextData(path=str(folder)).corpus, 8), 4, (0, 1), seed, CPU)


def test_files_are_one_row_of_bytes_in_the_order_of_their_names(folder: Path) -> None:
    corpus = TextData(path=str(folder)).corpus
    assert corpus.num_bytes == 1000
    assert corpus.read(0, 1000) == bytes(i % 251 for i in range(1000))


@given(start=st.integers(0, 999), length=st.integers(0, 999))
def test_any_piece_of_the_row_is_found_over_the_borders_of_files(
    tmp_path_factory: pytest.TempPathFactory, start: int, length: int
) -> None:
    folder = tmp_path_factory.getbasetemp() / "pieces"
    row = bytes(i % 251 for i in range(1000))
    if not folder.exists():
        folder.mkdir()
        for number, (begin, end) in enumerate([(0, 1), (1, 2), (2, 400), (400, 999), (999, 1000)]):
            (folder / f"{number}").write_bytes(row[begin:end])
    length = min(length, 1000 - start)
    assert TextData(path=str(folder)).corpus.read(start, length) == row[start : start + length]


@given(num=st.integers(1, 300), key=st.text(max_size=5))
def test_shuffling_is_a_permutation(num: int, key: str) -> None:
    assert sorted(shuffled(at, num, key) for at in range(num)) == list(range(num))


def test_shuffling_differs_from_key_to_key_and_moves_nearly_everything() -> None:
    first, second = ([shuffled(at, 1000, key) for at in range(1000)] for key in ("0/0", "0/1"))
    assert sum(a == b for a, b in zip(first, second, strict=True)) < 10
    assert sum(at == a for at, a in enumerate(first)) < 10


def test_an_epoch_shows_every_window_once(folder: Path) -> None:
    samples = in_order(folder, seed=5)
    for epoch in range(2):
        starts = sorted(samples.dataset[samples.sample(epoch * 125 + i)].tolist() for i in range(125))
        assert starts == sorted([(8 * window + i) % 251 for i in range(8)] for window in range(125))


def test_a_step_takes_the_next_samples_of_the_global_order(folder: Path) -> None:
    source = loader(folder, batch_size=4)
    samples = in_order(folder, seed=0)
    steps = [[samples.dataset[samples.sample(4 * step + i)].tolist() for i in range(4)] for step in range(40)]
    assert batches(source, 40) == steps


@pytest.mark.parametrize("dispatch", [True, False], ids=["dispatched", "own"])
@pytest.mark.parametrize("stop", [0, 3, 31, 32, 62, 63], ids=lambda stop: f"after {stop} of 31.25 steps an epoch")
def test_a_restored_position_goes_on_with_the_very_next_sample(folder: Path, dispatch: bool, stop: int) -> None:
    straight = batches(loader(folder, dispatch=dispatch), 70)
    first = loader(folder, dispatch=dispatch)
    assert batches(first, stop) == straight[:stop]
    state = json.loads(json.dumps(first.state_dict()))
    resumed = loader(folder, dispatch=dispatch)
    resumed.load_state_dict(state)
    assert batches(resumed, 70 - stop) == straight[stop:]


def test_the_position_says_the_epoch(folder: Path) -> None:
    source = loader(folder)
    batches(source, 32)
    assert (source.state_dict()["position"], source.state_dict()["epoch"]) == (128, 1)


def test_the_order_of_the_saved_run_wins_over_another_seed(folder: Path) -> None:
    straight = batches(loader(folder, seed=1), 10)
    first = loader(folder, seed=1)
    batches(first, 5)
    resumed = loader(folder, seed=2)
    resumed.load_state_dict(first.state_dict())
    assert batches(resumed, 5) == straight[5:]


def test_the_loader_says_who_holds_its_state(folder: Path) -> None:
    assert loader(folder, dispatch=True).sharing_pattern == "global"
    assert loader(folder, dispatch=False).sharing_pattern == "per_rank"


def test_another_text_is_not_taken_for_the_saved_one(folder: Path) -> None:
    state = loader(folder).state_dict()
    (folder / "c").write_bytes((folder / "c").read_bytes()[::-1])
    with pytest.raises(ConfigurationError, match=r"differs from the checkpoint's .*~components\.dataset"):
        loader(folder).load_state_dict(state)


def test_a_copy_of_the_text_elsewhere_is_the_same_text(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    copy = tmp_path_factory.mktemp("copy")
    (copy / "deep" / "er").mkdir(parents=True)
    for name in ("a", "b", "c", "deep/d", "deep/er/e"):
        (copy / name).write_bytes((folder / name).read_bytes())
    loader(copy).load_state_dict(loader(folder).state_dict())


def test_one_file_can_be_the_text(folder: Path) -> None:
    assert TextData(path=str(folder / "c")).corpus.num_bytes == 497


def test_the_default_text_is_the_standard_library_and_bounded() -> None:
    corpus = TextData().corpus
    assert DEFAULT_BYTES <= corpus.num_bytes < DEFAULT_BYTES + (1 << 20)
    assert all(path.suffix == ".py" and "site-packages" not in path.parts for path in corpus.files)
    assert "import " in corpus.read(0, 20_000).decode(errors="replace")


def test_a_path_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="data.path=.*nowhere: there is no such file or folder"):
        TextData(path=str(tmp_path / "nowhere"))


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(ConfigurationError, match="holds no text"):
        TextData(path=str(tmp_path))


def test_a_text_shorter_than_one_sample_is_refused_with_the_length_that_is_needed(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"1234567")
    with pytest.raises(
        ConfigurationError, match="holds 7 bytes of text, .* model.context=7 needs at least 8: .*data.path"
    ):
        loader(tmp_path)


def test_a_broken_link_is_no_text(folder: Path) -> None:
    (folder / "broken").symlink_to(folder / "nowhere")
    assert TextData(path=str(folder)).corpus.num_bytes == 1000


def test_a_file_that_shrinks_under_the_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(100))
    corpus = Corpus(tmp_path, [(tmp_path / "text", 100)])
    (tmp_path / "text").write_bytes(bytes(50))
    with pytest.raises(ConfigurationError, match="text has changed during the run"):
        corpus.read(40, 20)
