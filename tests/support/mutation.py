"""How many small faults the tests of the default run find: `python -m tests.support.mutation 42 21` tries 42 of them, drawn with seed 21.

Each is one change that cosmic-ray makes to a line of a part below, in a copy of the checkout; the tests of that part then run there until
one fails. A fault that no test finds is listed. Needs the extra `mutants`.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

REPO = Path(__file__).parents[2]


@dataclass(frozen=True)
class Part:
    """Modules, as patterns in ckpt/, and the tests of the default run that are about them, the fastest first."""

    modules: tuple[str, ...]
    tests: tuple[str, ...]


PARTS = {
    "planning": Part(
        ("planning/plan.py", "saving/saver.py"),
        (
            "unit/planning/test_plan.py",
            "unit/test_coordinator.py",
            "distributed/test_patterns.py",
            "distributed/test_reshard.py",
            "distributed/test_elastic.py",
            "distributed/test_small_tensors.py",
        ),
    ),
    "flattening and sharing": Part(
        ("state/flatten.py", "state/sharing.py", "state/replication.py", "saving/prepared_save.py"),
        (
            "unit/state/test_flatten.py",
            "unit/state/test_sharing.py",
            "unit/state/test_replication.py",
            "distributed/test_patterns.py",
            "distributed/test_ties.py",
            "distributed/test_groups_nodes.py",
            "distributed/test_any_state.py",
        ),
    ),
    "manifest": Part(
        ("format/manifest.py", "format/manifest_parsing.py", "format/consistency.py"),
        (
            "unit/format/test_manifest.py",
            "unit/format/test_crafted_records.py",
            "unit/catalog/test_verify.py",
            "unit/test_coordinator.py",
            "unit/catalog/test_incremental.py",
        ),
    ),
    "agreement": Part(
        ("ranks/agreement.py", "ranks/heartbeat.py", "ranks/topology.py"),
        (
            "unit/ranks/test_topology.py",
            "unit/ranks/test_failure_detector.py",
            "distributed/test_agreement.py",
            "distributed/test_faults.py",
            "distributed/test_fault_matrix.py",
        ),
    ),
    "saves": Part(
        (
            "saving/saver.py",
            "saving/prepared_save.py",
            "saving/checkpoint_root.py",
            "saving/writing.py",
            "saving/background/background.py",
            "saving/manifest_writer.py",
        ),
        (
            "unit/test_coordinator.py",
            "unit/catalog/test_incremental.py",
            "distributed/test_faults.py",
            "distributed/test_kept_saves.py",
            "distributed/test_fault_matrix.py",
            "distributed/test_async_faults.py",
        ),
    ),
    "loads": Part(
        (
            "loading/loader.py",
            "loading/strategy.py",
            "loading/direct.py",
            "loading/two_stage/two_stage.py",
            "loading/two_stage/spread_blocks.py",
            "loading/direct.py",
            "loading/compatibility.py",
        ),
        (
            "unit/test_coordinator.py",
            "unit/catalog/test_verify.py",
            "distributed/test_validation_levels.py",
            "distributed/test_elastic.py",
            "distributed/test_two_stage.py",
            "distributed/test_any_state.py",
        ),
    ),
}


@dataclass(frozen=True)
class Fault:
    """One changed line of a module, whose text is given before and after."""

    part: str
    module: Path
    line: int
    text: str
    changed: str

    def __str__(self) -> str:
        was = self.text.splitlines()[self.line - 1].strip()
        now = self.changed.splitlines()[self.line - 1].strip()
        return f"{self.part}: {self.module}:{self.line}: {was}\n    -> {now}"


def drawn(count: int, seed: int) -> list[Fault]:
    """As many faults of each part, drawn from all that there are."""
    random_ = random.Random(seed)
    found: list[Fault] = []
    for name, part in PARTS.items():
        by_line: dict[tuple[Path, int], list[tuple[str, int]]] = {}
        for module, line, operator, occurrence in _places(part):
            by_line.setdefault((module, line), []).append((operator, occurrence))
        lines = random_.sample(sorted(by_line), len(by_line))  # each line is as likely as any other
        faults = filter(None, (_fault(name, *at, *random_.choice(by_line[at])) for at in lines))
        found += itertools.islice(faults, count // len(PARTS))
    return found


def _places(part: Part) -> Iterator[tuple[Path, int, str, int]]:
    """Module, line, operator and occurrence of each change that can be made."""
    for module in sorted(path for pattern in part.modules for path in (REPO / "ckpt").glob(pattern)):
        text = module.read_text()
        words, nodes = _said(text), list(ast_nodes(get_ast(text)))
        for name in sorted(plugins.operator_names()):
            if plugins.get_operator(name).arguments():
                continue  # it has to be told what to change
            operator = plugins.get_operator(name)()
            places = [place for node in nodes for place in operator.mutation_positions(node)]
            for occurrence, ((line, _), _) in enumerate(places):
                if line not in words:
                    yield module, line, name, occurrence


def _fault(part: str, module: Path, line: int, operator: str, occurrence: int) -> Fault | None:
    """The change; None: it changes nothing, or the text is no Python afterwards."""
    text = module.read_text()
    changed = mutate_code(text, plugins.get_operator(operator)(), occurrence)
    with suppress(SyntaxError):
        if changed is not None and ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text)):
            return Fault(part, module.relative_to(REPO), line, text, changed)
    return None


def _said(text: str) -> set[int]:
    """Lines of docstrings, annotations and imports, where a change is none of behaviour."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        is_words = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_type = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        if is_words or is_type or isinstance(node, ast.Import | ast.ImportFrom):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        if isinstance(node, ast.FunctionDef):
            for one in [*node.args.args, *node.args.kwonlyargs]:
                lines.update([one.annotation.lineno] if one.annotation and one.annotation.lineno != node.lineno else [])
    return lines


@dataclass(frozen=True)
class Outcome:
    """Of the tests of a part, run once.

    Attributes:
        failed: the ids of those that failed; "it hung" if all together took too long.
    """

    failed: tuple[str, ...]
    seconds: float


def _run(part: Part, copy: Path, timeout_s: float, options: Sequence[str]) -> Outcome:
    began = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "--tb=no", *options]
    command += [f"tests/{one}" for one in part.tests if (copy / "tests" / one).exists()]  # another state may lack one
    try:
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return Outcome(("it hung",), time.monotonic() - began)
    assert done.returncode in (0, 1, 2, 4), done.stdout + done.stderr
    said = [line.split(" ")[1] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    failed = said or (["it could not be run"] if done.returncode else [])
    return Outcome(tuple(failed), time.monotonic() - began)


class Trials:
    """Runs of tests in copies of the checkout, one run in each at a time."""

    def __init__(self, folder: Path, tests: Path, jobs: int) -> None:
        self._copies: Queue[Path] = Queue()
        for number in range(jobs):
            self._copies.put(_copied(folder / str(number), tests))

    def without_fault(self, part: Part) -> Outcome:
        with self._copy() as copy:
            return _run(part, copy, 900.0, [])

    def with_fault(self, fault: Fault, part: Part, timeout_s: float, left_out: Sequence[str]) -> Outcome:
        with self._copy() as copy:
            (copy / fault.module).write_text(fault.changed)
            try:
                return _run(part, copy, timeout_s, ["-x", *(f"--deselect={one}" for one in left_out)])
            finally:
                (copy / fault.module).write_text(fault.text)

    @contextmanager
    def _copy(self) -> Iterator[Path]:
        """One in which nothing else runs."""
        copy = self._copies.get()
        try:
            yield copy
        finally:
            self._copies.put(copy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("seed", type=int)
    parser.add_argument("--tests", type=Path, default=REPO / "tests", help="those of another state of the project")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    faults = drawn(given.count, given.seed)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.jobs) as jobs:
        trials = Trials(Path(folder), given.tests, given.jobs)
        sound = {name: jobs.submit(trials.without_fault, part) for name, part in PARTS.items()}
        running = []
        for name, trial in sound.items():
            outcome = trial.result()
            print(f"{name}: without a fault its tests take {outcome.seconds:.0f} s", flush=True)
            for one in outcome.failed:
                print(f"  left out, for it fails without a fault, too: {one}", flush=True)
            most_s = 60 + 4 * outcome.seconds
            running += [
                (fault, jobs.submit(trials.with_fault, fault, PARTS[name], most_s, outcome.failed))
                for fault in faults
                if fault.part == name
            ]
        found: Counter[str] = Counter()
        for fault, trial in running:
            outcome = trial.result()
            found[fault.part] += bool(outcome.failed)
            told = f"found after {outcome.seconds:.0f} s by {outcome.failed[0]}" if outcome.failed else "NOT FOUND"
            print(f"{told}\n  {fault}", flush=True)
    drawn_of = Counter(fault.part for fault in faults)
    for name in PARTS:
        print(f"{name}: {found[name]} of {drawn_of[name]}")
    print(f"in all {found.total()} of {len(faults)}, seed {given.seed}")


def _copied(copy: Path, tests: Path) -> Path:
    for name in ("ckpt", "recipes", "conf"):
        shutil.copytree(REPO / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(tests, copy / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(REPO / name, copy / name)
    return copy


if __name__ == "__main__":
    main()
