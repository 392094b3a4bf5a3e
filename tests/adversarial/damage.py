"""Damage to any file of a checkpoint, as a disk or a careless hand does it: the digests are not computed anew.

Each try damages one file of the newer of two checkpoints, and asks a fresh process for three things:

* `verify` names a problem;
* a load of the damaged one raises CorruptCheckpointError (CheckpointNotFoundError where the manifest is no file any more), or gives every
  bit that was saved: not every load needs every file;
* a load of the newest gives the bits of the one or of the other.

What lies beside the checkpoints in the root (owner files, reasons) holds no digests: with any bytes in it, loads and saves succeed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random

from ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from ckpt.format.manifest import MANIFEST_NAME
from ckpt.ranks.topology import Topology
from ckpt.saving.save_settings import SaveSettings
from tests.adversarial import held_state
from tests.adversarial.driver import Case, Outcome, in_child

_LATE_S = 30.0

Damage = Callable[[Path, Path, Random], None]
"""Called with a file, another one of the same checkpoint, and what draws by lot."""


def _flip(file: Path, other: Path, random: Random) -> None:
    data = bytearray(file.read_bytes())
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    file.write_bytes(data)


def _cut(file: Path, other: Path, random: Random) -> None:
    os.truncate(file, random.randrange(file.stat().st_size))


def _empty(file: Path, other: Path, random: Random) -> None:
    os.truncate(file, 0)


def _extend(file: Path, other: Path, random: Random) -> None:
    os.truncate(file, file.stat().st_size + random.choice((1, 8, 4096)))


def _zero(file: Path, other: Path, random: Random) -> None:
    data = bytearray(file.read_bytes())
    at = random.randrange(len(data))
    data[at : at + 512] = bytes(len(data[at : at + 512]))
    file.write_bytes(data if data != file.read_bytes() else bytes(len(data)) + b"\0")


def _swap(file: Path, other: Path, random: Random) -> None:
    mine, its = file.read_bytes(), other.read_bytes()
    file.write_bytes(its if its != mine else its + b"\n")
    other.write_bytes(mine)


def _remove(file: Path, other: Path, random: Random) -> None:
    file.unlink()


def _take_older(file: Path, other: Path, random: Random) -> None:
    """The file of the same name of the checkpoint before: as long, well formed, and stale."""
    older = Path(str(file).replace("/checkpoint-2/", "/checkpoint-1/"))
    stale = older.read_bytes() if older.is_file() else b"stale"
    file.write_bytes(stale if stale != file.read_bytes() else stale + b" ")


def _make_folder(file: Path, other: Path, random: Random) -> None:
    file.unlink()
    file.mkdir()


def _make_fifo(file: Path, other: Path, random: Random) -> None:
    file.unlink()
    os.mkfifo(file)


def _link_to_itself(file: Path, other: Path, random: Random) -> None:
    file.unlink()
    file.symlink_to(file.name)


def _link_to_nothing(file: Path, other: Path, random: Random) -> None:
    file.unlink()
    file.symlink_to("nothing")


DAMAGES: dict[str, Damage] = {
    "a bit flipped": _flip,
    "cut": _cut,
    "empty": _empty,
    "longer": _extend,
    "zeros": _zero,
    "swapped": _swap,
    "removed": _remove,
    "that of the checkpoint before": _take_older,
    "a folder": _make_folder,
    "a FIFO": _make_fifo,
    "a link to itself": _link_to_itself,
    "a link to nothing": _link_to_nothing,
}
_DEEP = b'{"run_id": ' + b"[" * 100_000
SAVES = {
    **{backend: {} for backend in held_state.BACKENDS},
    **{f"{backend}, incremental": {"saves": SaveSettings(incremental=True)} for backend in held_state.BACKENDS},
}


def cases(seed: int, flips: int, sample: int | None = None) -> list[Case]:
    """A case for each way to save: every damage to every file.

    Args:
        flips: how many more bits are flipped.
        sample: so many ways, drawn by lot, share the damages, and each befalls one file.
    """
    ways = Random(f"{seed} damage").sample(list(SAVES), sample or len(SAVES))
    tries = 1 if sample is not None else 0
    made = []
    for number, way in enumerate(ways):
        own = list(DAMAGES) if sample is None else list(DAMAGES)[number::sample]
        given = {"way": way, "seed": f"{seed} {way}", "tries": tries, "flips": flips, "damages": own}
        made.append(Case("damage:checkpoint", given))
    return [*made, Case("damage:beside", {"seed": str(seed), "together": sample is not None})]


def checkpoint(folder: Path, way: str, tries: int, flips: int, seed: str, damages: Sequence[str]) -> Iterator[Outcome]:
    """Damage files of a checkpoint: each damage befalls `tries` of them, or all if that is 0."""
    root, row, random = folder / "root", f"damage: {way}", Random(seed)
    in_child(_save_two, root, way).require_result()
    whole = folder / "whole"
    shutil.copytree(root, whole, symlinks=True)
    newer = root / "checkpoint-2"
    files = sorted(path.relative_to(newer) for path in newer.rglob("*") if path.is_file())
    chosen = [(how, file) for how in damages for file in (random.sample(files, tries) if tries else files)]
    chosen += [("a bit flipped", random.choice(files)) for _ in range(flips)]
    for how, file in chosen:
        other = random.choice([one for one in files if one != file])
        DAMAGES[how](newer / file, newer / other, random)
        found = in_child(_why_fell, root, str(file) == MANIFEST_NAME, timeout_s=_LATE_S)
        yield Outcome(
            row, f"{row}: {file} is {how}", found.value if found.how == "returned" else f"{found.how}: {found.value}"
        )
        for one in (file, other):
            _restore(whole / "checkpoint-2" / one, newer / one)


def beside(folder: Path, seed: str, together: bool) -> Iterator[Outcome]:
    """Any bytes in the small files beside checkpoints: all of them in one root, or each in one of its own."""
    row, whole = "damage: beside checkpoints", folder / "whole"
    in_child(_save_two, whole, "zarr").require_result()
    contents = [b"", b"{", b"[]", b"5", b'{"run_id": 5}', b"\xff" * 50, Random(seed).randbytes(5000), _DEEP]
    for number, chosen in enumerate([contents] if together else [[one] for one in contents]):
        root = folder / f"root-{number}"
        shutil.copytree(whole, root, symlinks=True)
        for at, data in enumerate(chosen):
            (root / f".unpublished-3{at}-00000000").mkdir()
            (root / f".unpublished-3{at}-00000000.owner.json").write_bytes(data)
            (root / f".unpublished-4{at}-00000000.owner.json").write_bytes(data)
            (root / f".quarantined-5{at}-00000000.reason.txt").write_bytes(data)
        found = in_child(_why_disturbed, root, timeout_s=_LATE_S)
        fell = found.value if found.how == "returned" else f"{found.how}: {found.value}"
        yield Outcome(row, f"{row}: {' and '.join(repr(data[:20]) for data in chosen)}", fell)


def _save_two(root: Path, way: str) -> None:
    backend = way.partition(",")[0]
    for checkpoint_id in ("1", "2"):
        options = {"config_text": f"step: {checkpoint_id}\n", **SAVES[way]}
        with held_state.trainer(Topology.alone(), root, checkpoint_id, backend, **options) as run:
            run.save_checkpoint(checkpoint_id=checkpoint_id)


def _why_fell(root: Path, is_manifest: bool) -> str:
    newer = root / "checkpoint-2"
    if not held_state.problems_of(newer):
        return "verify finds nothing wrong"
    try:
        held_state.load(newer, root, Topology.alone(), 1)
    except CorruptCheckpointError:
        pass
    except CheckpointNotFoundError:
        if not is_manifest:
            raise
    return "" if held_state.load(None, root, Topology.alone(), 1) in ("1", "2") else "latest is another one"


def _why_disturbed(root: Path) -> str:
    assert held_state.load(None, root, Topology.alone(), 1) == "2"
    for checkpoint_id in ("8", "9"):  # what is not said to be this run's is nobody's as soon as it is stale
        with held_state.trainer(Topology.alone(), root, checkpoint_id, "zarr", stale_s=0.0) as run:
            run.save_checkpoint(checkpoint_id=checkpoint_id)
    left = [name for name in os.listdir(root) if name.startswith(".unpublished")]
    return f"two saves later there is still {', '.join(left)}" if left else ""


def _restore(whole: Path, file: Path) -> None:
    if file.is_dir() and not file.is_symlink():
        file.rmdir()
    else:
        file.unlink(missing_ok=True)
    shutil.copyfile(whole, file)
