"""The command `bisect`: the first checkpoint at which two runs differ. `python -m recipes.bisect` goes on from it, by replays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckpt.catalog.committed import look
from ckpt.cli.arguments import argued, argument
from ckpt.cli.comparing import as_json, listed, of_configs
from ckpt.cli.config_text import values_of
from ckpt.cli.reading import committed_in
from ckpt.cli.tables import counted, print_json, show
from ckpt.errors import CheckpointNotFoundError, ConfigurationError
from ckpt.format.places import Place, as_place, step_of
from ckpt.interop.comparing import Difference, compare
from ckpt.interop.registry import source_at
from ckpt.loading.direct import DirectLoad
from ckpt.loading.sources import CheckpointSource
from ckpt.ranks.topology import Topology
from ckpt.storage.stored import noticing_removal, read_manifest


@dataclass
class BisectKeys:
    """The keys of the command."""

    run: str = argued("the folder of a run, or of its checkpoints, or their address")
    bad: str = argued("that of the run to explain")
    all: bool = argued("print all differences, not the first twenty", default=False)
    json: bool = argued("print only JSON", default=False)


def bisect(keys: BisectKeys) -> int:
    """Compare the checkpoints that both runs have, print the first difference, and return 0 if there is none, else 1.

    Raises:
        CheckpointNotFoundError: a folder has no checkpoints, or the two have no step in common.
    """
    run, bad = (checkpoints_of(as_place(given, name), name) for name, given in (("run", keys.run), ("bad", keys.bad)))
    equal, step, differences = first_difference(run, bad)
    if step is None and equal is None:
        raise CheckpointNotFoundError(f"{keys.run} and {keys.bad} have no step in common")
    configs = [] if step is None else list(of_configs(*(values_of(opened(steps[step]).config_text) for steps in (run, bad))))
    sentence = _sentence(equal, step, differences)
    if keys.json:
        result = {"run": keys.run, "bad": keys.bad, "equal": step is None, "equal_up_to": equal, "differ_at": step}
        print_json(result | {"sentence": sentence, "differences": as_json(differences), "config": as_json(configs)})
        return 0 if step is None else 1
    show(sentence)
    if configs:
        show("", "configs; a is run, b is bad", *listed(configs, all=keys.all))
    if differences:
        show("", f"step {step}; a is run, b is bad", *listed(differences, all=keys.all))
    return 0 if step is None else 1


def _sentence(equal: int | None, step: int | None, differences: list[Difference]) -> str:
    if step is None:
        return f"the runs are equal up to step {equal}, the last checkpoint that both have"
    components = ", ".join(sorted({difference.component.partition("/")[0] for difference in differences}))
    between = "the first that both have" if equal is None else f"and are equal at step {equal}, the one before"
    return f"the runs differ at step {step}, {between}: {counted(len(differences), 'difference')}, in {components}"


def steps_at(root: Place) -> dict[int, Place]:
    """Return step -> checkpoint of a folder of checkpoints, the first step first; those whose id is no step are left out."""
    steps = ((step_of(commit.id), commit.path) for commit in committed_in(root))
    return dict(sorted((step, path) for step, path in steps if step is not None))


def checkpoints_of(folder: Place, name: str, found_at: Callable[[Place], dict[int, Place]] = steps_at) -> dict[int, Place]:
    """Return step -> checkpoint of a run.

    Args:
        folder: of the run, or of its checkpoints.
        name: of the argument.
        found_at: finds those of a folder of checkpoints.

    Raises:
        CheckpointNotFoundError: there are none.
        ConfigurationError: the folder is that of a checkpoint.
    """
    if look(folder) is not None:
        raise ConfigurationError(f"{folder} is a checkpoint, and no run: give the folder that it is in, or compare two checkpoints by diff")
    below = folder / "checkpoints"
    root = below if isinstance(below, Path) and below.is_dir() else folder
    if not (found := found_at(root)):
        raise CheckpointNotFoundError(
            f"{folder} is no run: neither it nor its folder checkpoints holds a checkpoint; give {argument(name, '<the folder of a run>')}"
        )
    return found


def first_difference(run: Mapping[int, Place], bad: Mapping[int, Place]) -> tuple[int | None, int | None, list[Difference]]:
    """Compare common checkpoints, the oldest first; return the last equal step, the first that differs, and what differs there."""
    equal = None
    for step in sorted(run.keys() & bad.keys()):
        if differences := compared(run[step], bad[step]):
            return equal, step, differences
        equal = step
    return equal, None, []


def compared(a: Place, b: Place) -> list[Difference]:
    """Return the differences of what retention has left of both. Checkpoints that recorded the same digests are equal, and not read."""
    with noticing_removal(a), noticing_removal(b):
        one, other = read_manifest(a), read_manifest(b)
        is_recorded = all(component.checksum for component in one.components.values())
        if is_recorded and (one.components, one.arrays) == (other.components, other.arrays):
            return []
        removed = {*one.removed, *other.removed}
        return [found for found in compare(opened(a), opened(b)) if found.component.partition("/")[0] not in removed]


def opened(checkpoint: Place) -> CheckpointSource:
    """Open a checkpoint for reading, by this process alone."""
    return source_at(checkpoint, Topology.alone(), DirectLoad())
