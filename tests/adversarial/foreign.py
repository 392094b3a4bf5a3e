"""What an attempt with a checkpoint from a stranger may do, and what must come of it. The crafts themselves are in foreign_crafts.py.

Each craft is one change to a sound checkpoint, signed again. Five attempts are made with it, each in a fresh process with a limit
on its address space and its time, and with every file it opens written down:

| attempt | held, if |
|---|---|
| load | it raises CorruptCheckpointError, or gives every bit that was saved |
| latest | an older sound checkpoint lies beside it: that one is loaded where the load was refused, and no other bits ever |
| verify | it finds a problem: all crafts but those that are said to be `sound` contradict themselves, or lead outside |
| inspect | it shows the checkpoint, or says one sentence |
| convert | it writes a sound checkpoint, or says one sentence |

And for all: no other exception, no file opened or changed outside of the checkpoint (or the new one), no program started, no
connection made.
"""

from __future__ import annotations

import importlib.util
import io
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from random import Random

from ckpt.cli.converting import ConvertKeys, LoadKeys, convert_on_ranks, run_of
from ckpt.cli.reading import InspectKeys, ReadingKeys, show, verify
from ckpt.errors import CheckpointError
from ckpt.format.manifest import MANIFEST_NAME
from ckpt.ranks.topology import Topology
from recipes.support.report import config_differences
from tests.adversarial import held_state
from tests.adversarial.crashes import Ranks
from tests.adversarial.driver import REPO, Case, Ended, Outcome, in_child
from tests.adversarial.shim import Orders

MEMORY_BYTES = 1 << 30
LATE_S = 20.0
ATTEMPTS = ("load", "latest", "verify", "inspect", "convert")
_SENTENCE = 2000
"""Letters; a list of a million names is no sentence."""


@dataclass(frozen=True)
class Craft:
    """One change to a checkpoint.

    Attributes:
        name: what is done.
        change: called with the folder of the checkpoint; outside of its root, at ../../secret, lies a copy of it.
        way: how the checkpoint was saved: a backend, or one of OTHER_WAYS.
        sound: verify may call it sound: it contradicts itself nowhere, or only to a library that reads it.
        forged: the load may give another value, for it is one that somebody may have saved.
        refused_as: the class of the error, where it is no CorruptCheckpointError; then the newest is not passed over either.
    """

    name: str
    change: Callable[[Path], None]
    way: str = "zarr"
    sound: bool = False
    forged: bool = False
    refused_as: str = "CorruptCheckpointError"


@dataclass(frozen=True)
class _Answer:
    """What an attempt came to.

    Attributes:
        kind: "went well", or the class of the error that was raised.
        text: its sentence; the id of what was loaded; what was printed.
    """

    kind: str
    text: str = ""


def crafted(folder: Path, way: str, names: list[str]) -> Iterator[Outcome]:
    """Attempt everything with crafts of one way to save."""
    from tests.adversarial.foreign_crafts import crafts

    pristine = folder / "pristine"
    _save(pristine, way)
    by_name = {craft.name: craft for craft in crafts()}
    for name in names:
        craft, place = by_name[name], folder / "tried"
        shutil.copytree(pristine, place, symlinks=True)
        (place / "out").mkdir()
        changed = in_child(craft.change, place / "root" / "checkpoint-2")
        if changed.how != "returned":
            yield Outcome("mistakes of the campaign", name, f"{changed.how}: {changed.value}")
        else:
            yield from _attempts(craft, place)
        shutil.rmtree(place)


def _attempts(craft: Craft, place: Path) -> Iterator[Outcome]:
    refused = False
    for attempt in ATTEMPTS:
        orders = Orders(place / "orders", trace=place / "trace")
        ended = in_child(
            _attempt, attempt, place, craft.way, orders=orders, memory_bytes=MEMORY_BYTES, timeout_s=LATE_S
        )
        if attempt == "load":
            refused = ended.how == "returned" and ended.value.kind == "CorruptCheckpointError"
        fell = _why_fell(craft, attempt, ended, refused) or why_outside(orders, _allowed(attempt, place))
        yield Outcome(f"crafts: {attempt}", f"{craft.way}: {craft.name}: {attempt}", fell)
        (place / "trace").unlink(missing_ok=True)


def _attempt(attempt: str, place: Path, way: str) -> _Answer:
    root, printed = place / "root", io.StringIO()
    sys.dont_write_bytecode = True  # of what is imported late
    try:
        with redirect_stdout(printed):
            text = _do(attempt, root, root / "checkpoint-2", place / "out" / "converted", _ranks_of(way))
    except CheckpointError as error:
        return _Answer(type(error).__name__, str(error))
    return _Answer("went well", text or printed.getvalue())


def _do(attempt: str, root: Path, path: Path, dst: Path, num_ranks: int) -> str:
    if attempt in ("load", "latest"):
        found = held_state.loaded(path if attempt == "load" else None, root, Topology.alone(), num_ranks)
        config_differences(found.config_text, {"step": 2})  # as a run that resumes does
        return found.checkpoint_id
    if attempt == "verify":
        return f"exit code {verify(ReadingKeys(str(path)))}"
    if attempt == "inspect":
        show(InspectKeys(str(path)))
        show(InspectKeys(str(path), json=True))
        return ""
    convert_on_ranks(
        run_of(ConvertKeys(src=str(path), dst=str(dst), to="zarr", load=LoadKeys())), Topology.alone()
    )
    return f"exit code {verify(ReadingKeys(str(dst)))}"


def _why_fell(craft: Craft, attempt: str, ended: Ended, refused: bool) -> str:
    if craft.forged and ended.how == "raised" and "is not what was saved" in ended.value:
        return ""
    if ended.how != "returned":
        return f"{ended.how}: {ended.value}"
    answer: _Answer = ended.value
    if not (answer.kind in _allowed_kinds(craft) or (attempt == "convert" and answer.kind != "CheckpointError")):
        return f"{answer.kind}: {answer.text}"
    if answer.kind != "went well" and (len(answer.text) > _SENTENCE or "\n" in answer.text):
        return f"this is not one sentence: {answer.text[:_SENTENCE]}"
    if attempt == "latest" and refused and answer != _Answer("went well", "1"):
        return f"it did not fall back: {answer}"
    if attempt == "verify" and answer == _Answer("went well", "exit code 0") and not craft.sound:
        return "verify calls it sound"
    return f"it wrote what verify refuses: {answer}" if (attempt, answer.text) == ("convert", "exit code 1") else ""


def _allowed_kinds(craft: Craft) -> set[str]:
    """A CheckpointError of no class of its own is an exception that nobody foresaw."""
    missing = {"MissingStateError"} if craft.sound else set()  # it may lack what this run wants
    return {"went well", "CorruptCheckpointError", craft.refused_as, *missing}


def why_outside(orders: Orders, allowed: list[Path]) -> str:
    """Which opened files, started programs and connections are none of what an attempt needs."""
    found = []
    for what, path in orders.traced():
        is_reading = what in ("read", "folder")
        inside = any(Path(path).is_relative_to(one) for one in (*allowed, *(_OF_PYTHON if is_reading else ())))
        if not inside and not (is_reading and _OF_THE_KERNEL.fullmatch(path)):
            found.append(f"{what} {path}")
    return f"reached outside: {', '.join(sorted(set(found)))}" if found else ""


def _allowed(attempt: str, place: Path) -> list[Path]:
    root = place / "root"
    inside = root / "checkpoint-2" if attempt in ("load", "convert") else root  # verify looks who shares a damaged file
    newer = [root / "checkpoint-1" / MANIFEST_NAME] if attempt == "load" else []  # is the loaded one the newest?
    return [inside, *newer, place / "out", *(Path(name) for name in ("/dev/null", "/dev/shm", "/memfd:"))]


def _libraries() -> tuple[Path, ...]:
    torch = importlib.util.find_spec("torch")
    assert torch is not None and torch.origin is not None
    site = Path(torch.origin).parents[1]
    folders = (sys.prefix, sys.base_prefix, site, REPO, "/usr", "/lib", "/lib64", "/etc", "/sys", "/dev/urandom")
    return tuple(Path(folder).resolve() for folder in folders)


_OF_PYTHON = _libraries()
_OF_THE_KERNEL = re.compile(
    r"/proc/(cpuinfo|meminfo|stat|sys/kernel/random/boot_id|(self|\d+)/(task/\d+/)?(maps|stat|statm|status|cgroup|mounts|mountinfo))"
)
"""What Python and its libraries read for themselves: modules, time zones, the number of processors."""


OTHER_WAYS = ("zarr, 2 ranks",)


def _ranks_of(way: str) -> int:
    return 2 if "2 ranks" in way else 1


def _save(place: Path, way: str) -> None:
    """Save a checkpoint, twice, and put a copy of the second one where no load should look."""
    root = place / "root"
    with Ranks(_ranks_of(way)) as ranks:
        for one in ranks.run(_save_both, root, way.partition(",")[0]):
            one.require_result()
    shutil.copytree(root / "checkpoint-2", place / "secret" / "checkpoint-2")


def _save_both(topology: Topology, root: Path, backend: str) -> None:
    for checkpoint_id in ("1", "2"):
        config = f"step: {checkpoint_id}\n"
        with held_state.trainer(topology, root, checkpoint_id, backend, config_text=config) as run:
            run.save_checkpoint(checkpoint_id=checkpoint_id)


def cases(seed: int, sample: int | None = None) -> list[Case]:
    """Cases for all crafts, or for some drawn by lot; a few crafts each, so that workers share them."""
    from tests.adversarial.foreign_crafts import crafts

    chosen = list(crafts())
    assert len({craft.name for craft in chosen}) == len(chosen), "two crafts have one name"
    if sample is not None:
        chosen = Random(f"{seed} crafts").sample(chosen, sample)
    by_way: dict[str, list[str]] = {}
    for craft in chosen:
        by_way.setdefault(craft.way, []).append(craft.name)
    return [
        Case("foreign:crafted", {"way": way, "names": names[at : at + 8]})
        for way, names in by_way.items()
        for at in range(0, len(names), 8)
    ]
