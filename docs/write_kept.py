"""Write the tables of docs/kept.md from those of tests/fidelity, which tries each row: python docs/write_kept.py"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # run by path, from anywhere

from tests.fidelity.programs import CASES, NOT_RUN, Case
from tests.fidelity.table import Row, refused, tensors, values
from tests.fidelity.test_optimizers import OPTIMIZERS, SCHEDULERS

PAGE = Path(__file__).with_name("kept.md")
BEGIN = "<!-- written by docs/write_kept.py -->\n"


def page(text: str) -> str:
    """Return the page with the tables of today."""
    before, marker, _ = text.partition(BEGIN)
    assert marker, "the page has no place for the written part"
    kept = [one for one in tensors() if not one.refused]
    not_kept = [*refused(), *(one for one in tensors() if one.refused)]
    parts = [
        "## Values",
        _table(["kind", "limits"], _cells(values())),
        "## Tensors",
        _table(["tensors", "how"], _cells(kept)),
        "## Refused",
        "The error names the entry, and nothing is copied or written.",
        _table(["what", "give instead"], _cells(not_kept)),
        "## Objects",
        "Each was saved, loaded by a fresh program and by one that had trained on, and compared with what `torch.save` and "
        "`load_state_dict` give: equal states, and ten equal steps.",
        _table(["package", "version", "kept"], _of_packages()),
        "Refused by name:",
        _table(["object", "because of", "use"], _of_refused()),
        "Not run: " + "; ".join(f"{name} of pytorch_optimizer {why}" for name, why in NOT_RUN.items()) + ".",
    ]
    return before + BEGIN + "\n" + "\n\n".join(parts) + "\n"


def _cells(rows: Iterable[Row]) -> list[list[str]]:
    return [[row.kind, row.note] for row in rows]


def _of_packages() -> list[list[str]]:
    kept: dict[str, list[str]] = {"torch": [*OPTIMIZERS, *SCHEDULERS]}
    for case in CASES:
        if not case.refused:
            kept.setdefault(case.package, []).append(case.name)
    return [[name, _version(name), "; ".join(dict.fromkeys(objects))] for name, objects in kept.items()]


def _of_refused() -> list[list[str]]:
    return [[f"{case.package}: {case.name}", _because(case), case.instead] for case in CASES if case.refused]


def _because(case: Case) -> str:
    return case.refused.removeprefix(f"{case.name} ")


def _version(package: str) -> str:
    """The version that the tests run with."""
    pins = (PAGE.parents[1] / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in pins if "==" in line)[package.replace("_", "-")]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
