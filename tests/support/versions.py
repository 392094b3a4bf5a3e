"""Run the tests with other versions of the dependencies, each set in an environment of its own: `.ci/versions [ROW...]` calls this.

Prints the table that docs/testing.md shows. Needs `uv` beside the Python that runs it, and room for one environment at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
UV = Path(sys.executable).with_name("uv")
ROOM_BYTES = 12 << 30
SHOWN = ("torch", "zarr", "tensorstore", "numpy")
"""Packages whose versions the table shows; the log has all."""


@dataclass(frozen=True)
class Row:
    """Versions to test with.

    Attributes:
        python: version of the interpreter, found by uv on this machine; a row whose interpreter is absent is not run.
        flags: of `uv pip install`.
        wanted: requirements beside the project and its extra `test`.
    """

    python: str
    flags: tuple[str, ...] = ("--upgrade",)
    wanted: tuple[str, ...] = ()


ROWS = {
    "lowest": Row("3.11", ("--resolution", "lowest-direct")),
    "pinned": Row("3.11", ("--constraint", "constraints.txt")),
    **{
        f"torch {minor}": Row("3.11", wanted=(f"torch=={minor}.*",))
        for minor in ("2.7", "2.8", "2.9", "2.10", "2.11", "2.12", "2.14")
    },
    "Python 3.12": Row("3.12"),
    "newest": Row("3.13"),
    "Python 3.14": Row("3.14"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", choices=[[], *ROWS], help="all, if none is given")
    parser.add_argument("--tests", nargs="*", default=["tests/unit"], help="paths for pytest")
    given = parser.parse_args()
    print("| row | Python | " + " | ".join(SHOWN) + " | tests | training |\n" + "|---" * (len(SHOWN) + 4) + "|")
    found = Counter(_run(name, ROWS[name], given.tests) for name in given.rows or ROWS)
    print(f"\n{found[True]} passed, {found[False]} failed, {found[None]} skipped")
    sys.exit(bool(found[False]) or not found[True])


def _run(name: str, row: Row, tests: list[str]) -> bool | None:
    """Print the table's row; return whether all went well, or None if there is no such Python here."""
    if shutil.disk_usage(CHECKOUT).free < ROOM_BYTES:
        sys.exit(
            f"{CHECKOUT} has less than {ROOM_BYTES >> 30} GiB free, which an environment with CUDA's packages can need"
        )
    with tempfile.TemporaryDirectory(dir=CHECKOUT, prefix=".versions-") as place:
        python = Path(place, "env", "bin", "python")
        interpreters = [os.environ["PATH"], *map(str, Path.home().glob(".pyenv/versions/*/bin"))]
        environment = {
            **os.environ,
            "PATH": os.pathsep.join(interpreters),
            "UV_CACHE_DIR": str(Path(place, "cache")),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

        def call(*command: object) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [str(part) for part in command], cwd=CHECKOUT, env=environment, capture_output=True, text=True
            )

        if call(UV, "python", "find", "--no-python-downloads", row.python).returncode:
            print(f"| {name} | {row.python} is not on this machine |{' |' * (len(SHOWN) + 2)}", flush=True)
            return None
        made = call(UV, "venv", "--no-python-downloads", "--python", row.python, python.parents[1])
        if not made.returncode:
            made = call(UV, "pip", "install", "--python", python, *row.flags, "-e", ".[test]", *row.wanted)
        if made.returncode:
            print(f"| {name} | cannot be installed: {made.stderr.strip().splitlines()[-1]} |", flush=True)
            return False
        shutil.rmtree(Path(place, "cache"), ignore_errors=True)
        installed = json.loads(call(UV, "pip", "list", "--python", python, "--format", "json").stdout)
        versions = {one["name"]: one["version"] for one in installed}
        print(f"{name}: {versions}", file=sys.stderr)
        tested = call(python, "-m", "pytest", "-q", "-n", "4", "-p", "no:cacheprovider", *tests)
        run = ("-m", "recipes.train", f"output_dir={place}/run", "save.every=10", "launch.nproc_per_node=2")
        trained = call(python, *run, "train.steps=20")
        if not trained.returncode:
            trained = call(python, *run, "train.steps=30", "resume=latest", "ckpt=tensorstore", "parallel=fsdp")
    for done in (tested, trained):
        if done.returncode:
            print(f"{name}:\n{done.stdout[-20_000:]}\n{done.stderr[-5_000:]}", file=sys.stderr)
    counts = re.search(r"(\d+ \w+(?:, \d+ \w+)*) in ", tested.stdout.splitlines()[-1] if tested.stdout else "")
    cells = (
        name,
        row.python,
        *(versions.get(package, "") for package in SHOWN),
        counts[1] if counts else "did not run",
        "failed" if trained.returncode else "passed",
    )
    print("| " + " | ".join(cells) + " |", flush=True)
    return not (tested.returncode or trained.returncode)


if __name__ == "__main__":
    main()
