"""Processes that share a root: trainers, readers and verifiers beside retention; and clocks that go wrong between saves."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

from ckpt.cli.reading import InspectKeys, ReadingKeys, show, verify
from ckpt.errors import CheckpointError
from ckpt.ranks.topology import Topology
from tests.adversarial import held_state, shim
from tests.adversarial.driver import Case, Child, Outcome, in_child
from tests.adversarial.shim import Orders

_HOUR_S = 3600
_YEARS_S = 73 * 365 * 24 * _HOUR_S
CLOCKS: dict[str, list[tuple[str, int, int]]] = {
    # (id, how far the clock is ahead in seconds, how many runs there have been)
    "one hour back": [("1", 0, 0), ("2", -_HOUR_S, 0), ("3", -_HOUR_S, 0), ("4", -_HOUR_S, 0)],
    "one hour back, in another run": [("1", 0, 0), ("2", -_HOUR_S, 1), ("3", -_HOUR_S, 2), ("4", -_HOUR_S, 2)],
    "2099 and back": [("1", 0, 0), ("2", _YEARS_S, 1), ("3", 0, 2), ("4", 0, 2), ("5", 0, 3)],
    "back and forth": [
        ("1", 0, 0),
        ("2", -_HOUR_S, 0),
        ("3", _HOUR_S, 0),
        ("4", -_HOUR_S, 1),
        ("5", 0, 1),
        ("6", -1, 1),
    ],
    "stands still": [(str(number), -number, 0) for number in range(1, 6)],
}


def cases(rounds: int, sample: bool = False) -> list[Case]:
    """Cases for all of it, or a sample: one backend, and each clock with one of both ways to keep checkpoints.

    Args:
        rounds: how many saves each trainer makes beside which others read.
    """
    backends = ["zarr"] if sample else list(held_state.BACKENDS)
    found = [Case("neighbours:readers", {"backend": backend, "rounds": rounds}) for backend in backends]
    found += [Case("neighbours:trainers", {"backend": backend, "rounds": max(2, rounds // 4)}) for backend in backends]
    clocks = [
        (clock, keep_last)
        for number, clock in enumerate(CLOCKS)
        for keep_last in (((None, 2)[number % 2],) if sample else (None, 2))
    ]
    return found + [Case("neighbours:clock", {"clock": clock, "keep_last": keep_last}) for clock, keep_last in clocks]


def readers(folder: Path, backend: str, rounds: int) -> Iterator[Outcome]:
    """A trainer keeps one checkpoint; others load, verify and inspect for as long as it saves."""
    root = folder / "root"
    in_child(_train, root, backend, ["0"]).require_result()
    others = {
        "load": Child(_again_and_again, _load, root, folder / "over"),
        "verify": Child(_again_and_again, _verify, root, folder / "over"),
        "inspect": Child(_again_and_again, _inspect, root, folder / "over"),
    }
    trainer = in_child(_train, root, backend, [str(number) for number in range(1, rounds + 1)], 1)
    (folder / "over").touch()
    yield Outcome(
        "neighbours: save, keep_last=1", f"{backend}: saves", "" if trainer.how == "returned" else str(trainer.value)
    )
    for name, child in others.items():
        ended = child.ended()
        row = f"neighbours: {name} beside keep_last=1"
        for number, fell in enumerate(ended.value if ended.how == "returned" else [f"{ended.how}: {ended.value}"]):
            yield Outcome(row, f"{backend}: {name} number {number}", fell)


def trainers(folder: Path, backend: str, rounds: int) -> Iterator[Outcome]:
    """Two trainers in one root: allowed by a word, and otherwise the second one is told who is there."""
    row = "neighbours: two trainers in one root"
    root = folder / "root"
    ids = {who: [f"{who}-{number}" for number in range(rounds)] for who in "ab"}
    children = [Child(_train, root, backend, ids[who], None, True) for who in "ab"]
    fell = [f"{one.how}: {one.value}" for one in (child.ended() for child in children) if one.how != "returned"]
    yield Outcome(row, f"{backend}, shared: both save", "; ".join(fell))
    for checkpoint_id in ids["a"] + ids["b"]:
        found = in_child(_why_not_sound, root, checkpoint_id)
        yield Outcome(
            row, f"{backend}, shared: {checkpoint_id}", found.value if found.how == "returned" else str(found.value)
        )
    first = Child(_train_until, folder / "alone", backend, folder / "first", folder / "go")
    _await(folder / "first")
    second = in_child(_train, folder / "alone", backend, ["2"])
    (folder / "go").touch()
    first.ended().require_result()
    refused = second.how == "raised" and "CheckpointError" in _bases_in(second.value) and "in use" in second.value
    yield Outcome(
        row, f"{backend}: the second one is refused", "" if refused else f"the second one {second.how}: {second.value}"
    )


def clock(folder: Path, clock: str, keep_last: int | None) -> Iterator[Outcome]:
    """Save while the clock of day goes back and forth: the order of saves is that of the calls, whatever it says."""
    root, steps = folder / "root", CLOCKS[clock]
    orders = Orders(folder / "orders")
    fell = ""
    for run in dict.fromkeys(run for _, _, run in steps):
        ended = in_child(
            _save_by_clock, root, [(one, ahead) for one, ahead, its in steps if its == run], keep_last, orders
        )
        fell = fell or ("" if ended.how == "returned" else f"{ended.how}: {ended.value}")
    ids = [one for one, _, _ in steps]
    found = in_child(_ids_in, root)
    wanted = ids[-keep_last:] if keep_last else ids
    if not fell and found.value != (wanted, ids[-1]):
        fell = f"committed, in order, and loaded: {found.value}; expected {(wanted, ids[-1])}"
    yield Outcome("neighbours: clock", f"{clock}, keep_last={keep_last}", fell)


# What they do


def _train(root: Path, backend: str, ids: list[str], keep_last: int | None = None, shared: bool = False) -> None:
    options = {"shared_root": True} if shared else {}
    with held_state.Run(root, backend, keep_last=keep_last, **options) as run:
        for checkpoint_id in ids:
            run.save(checkpoint_id)


def _train_until(root: Path, backend: str, saved: Path, go: Path) -> None:
    with held_state.Run(root, backend) as run:
        run.save("1")
        saved.touch()
        _await(go)


def _again_and_again(act: object, root: Path, over: Path) -> list[str]:
    """Call until a file is there; return what was wrong with each call."""
    assert callable(act)
    found = []
    while not over.exists():
        found.append(act(root))
        time.sleep(0.005)  # leave the trainer some of the processor
    return found


def _load(root: Path) -> str:
    try:
        held_state.load(None, root, Topology.alone(), 1)
    except (AssertionError, CheckpointError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _verify(root: Path) -> str:
    printed = io.StringIO()
    with redirect_stdout(printed):
        code = verify(ReadingKeys(str(root), json=True))
    return "" if code == 0 else json.dumps([one["problems"] for one in json.loads(printed.getvalue())["checkpoints"]])


def _inspect(root: Path) -> str:
    with redirect_stdout(io.StringIO()) as printed:
        show(InspectKeys(str(root), json=True))
    problems = [one["problem"] for one in json.loads(printed.getvalue())["checkpoints"] if one["problem"]]
    return "; ".join(problems)


def _why_not_sound(root: Path, checkpoint_id: str) -> str:
    path = root / f"checkpoint-{checkpoint_id}"
    held_state.load(path, root, Topology.alone(), 1)
    return "; ".join(held_state.problems_of(path))


def _save_by_clock(root: Path, steps: list[tuple[str, int]], keep_last: int | None, orders: Orders) -> None:
    shim.use(orders)
    with held_state.Run(root, "zarr", keep_last=keep_last) as run:
        if root.exists():
            run.resume()
        for checkpoint_id, ahead_s in steps:
            orders.set_clock_back(-ahead_s)
            run.save(checkpoint_id)


def _ids_in(root: Path) -> tuple[list[str], str]:
    return [one.id for one in held_state.committed(root)], held_state.load(None, root, Topology.alone(), 1)


def _bases_in(text: str) -> str:
    """The last line of a traceback, with the family of the class that it names."""
    name = text.strip().splitlines()[-1].partition(":")[0]
    return f"{name} CheckpointError" if name.startswith("ckpt.errors.") else name


def _await(file: Path, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not file.exists():
        assert time.monotonic() < deadline, f"{file.name} did not come"
        time.sleep(0.005)
