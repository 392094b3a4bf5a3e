"""What an installation brings along, and that README, CI and the packages say the same."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from ckpt.version import __version__
from tests.support.doc_scripts import doc_script

CHECKOUT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())


def test_readme_shows_one_line_for_the_main_job_and_one_for_the_tests() -> None:
    script = "source .ci/commands.sh; readme_command main; echo --; readme_command tests"
    main, tests = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=CHECKOUT, capture_output=True, text=True, check=True
    ).stdout.split("--\n")
    assert re.fullmatch(r"python3 -m venv \.venv && .*pip install .* && .*python -m recipes\.train\n", main)
    assert re.fullmatch(r"python3 -m venv \.venv && .*pip install .*\[test\].* && .*python -m pytest -n 4\n", tests)
    assert main.splitlines()[0] in (CHECKOUT / "README.md").read_text()


def test_a_command_that_readme_does_not_show_fails_with_its_name() -> None:
    script = "source .ci/commands.sh; readme_command nope"
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=CHECKOUT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "README.md shows no command below <!-- command: nope -->\n"


@pytest.mark.parametrize(
    "package", sorted({path.parent.relative_to(CHECKOUT) for path in CHECKOUT.glob("ckpt/*/**/*.py")} | {Path("tests/support")}), ids=str
)
def test_a_package_lists_its_files_once_and_no_others(package: Path) -> None:
    guide = ast.get_docstring(ast.parse((CHECKOUT / package / "__init__.py").read_text())) or ""
    rows = re.findall(r"^    (\S.*?)(?:   |  )", guide, flags=re.MULTILINE)
    listed = [name for row in rows for name in row.split(", ")]
    files = [path.stem for path in (CHECKOUT / package).glob("*.py") if path.stem != "__init__"]
    folders = [f"{path.parent.name}/" for path in (CHECKOUT / package).glob("*/__init__.py")]
    assert sorted(listed) == sorted(files + folders)


def test_the_handbook_has_a_row_for_each_package() -> None:
    page = (CHECKOUT / "docs" / "architecture.md").read_text()
    packages = {path.parent.name for path in CHECKOUT.glob("ckpt/*/__init__.py")}
    assert set(re.findall(r"^\| `(\w+)`", page, flags=re.MULTILINE)) == packages | {"coordinator", "errors"}


def test_every_dependency_is_pinned_to_a_tested_version() -> None:
    pinned = {
        canonical(line.split("==")[0])
        for line in (CHECKOUT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    }
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [*PROJECT["project"]["dependencies"], *(one for extra in extras.values() for one in extra)]
    assert {canonical(re.split(r"[<>=;\[ ]", one)[0]) for one in wanted} - pinned == set()


def test_the_handbook_names_the_lowest_version_of_every_dependency() -> None:
    page = (CHECKOUT / "docs" / "testing.md").read_text().partition("## Versions")[2].partition("## How it is fast")[0]
    for one in map(Requirement, PROJECT["project"]["dependencies"]):
        (lowest,) = (bound.version for bound in one.specifier if bound.operator == ">=")
        assert one.specifier.contains(version(one.name), prereleases=True)
        assert re.search(rf"\| {lowest}(\.0)* [|(]|{one.name} {lowest}(\.0)*\b", page), f"{one.name} {lowest}"


def test_the_citation_names_the_version_and_the_license_of_the_package() -> None:
    citation = yaml.safe_load((CHECKOUT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (__version__, PROJECT["project"]["license"])


def test_torch_npu_is_brought_in_by_its_own_extra_alone() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    assert [name for name, wanted in extras.items() if any("npu" in one for one in wanted)] == ["npu"]


@pytest.mark.full
def test_the_built_wheel_holds_the_library_alone_and_works_from_another_folder(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for folder in ("ckpt", "recipes", "conf"):
        shutil.copytree(CHECKOUT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / file, source)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source))
    (wheel,) = tmp_path.glob("ckpt_coordinator-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    inside = {name for name in names if ".dist-info/" not in name}
    assert inside == {
        str(path.relative_to(CHECKOUT))
        for path in (CHECKOUT / "ckpt").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    site = tmp_path / "site"
    pip("install", "--no-deps", "--target", str(site), str(wheel))
    program = (
        "import torch; from ckpt import CheckpointCoordinator, StateComponent\n"
        "model = torch.nn.Linear(3, 3)\n"
        "run = CheckpointCoordinator([StateComponent('model', model, 'replicated')], None, None, 'there',\n"
        "    backend='zarr', strategy='direct', device='cpu')\n"
        "run.save_checkpoint(checkpoint_id='1'); run.load_checkpoint(); print(run.last_load.checkpoint_id)\n"
    )
    saved = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert (saved.returncode, saved.stdout) == (0, "1\n"), saved.stderr


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *arguments], check=True)


def canonical(name: str) -> str:
    return name.strip().lower().replace("_", "-")


def _lint_imports(checkout: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports_command; lint_imports_command()",
        "--no-cache",
    ]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True)


def test_an_import_of_a_package_above_is_found_and_named(tmp_path: Path) -> None:
    for name in ("ckpt", "recipes"):
        shutil.copytree(CHECKOUT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(CHECKOUT / "pyproject.toml", tmp_path)
    with (tmp_path / "ckpt" / "format" / "box.py").open("a") as file:
        file.write("\nfrom ckpt.saving import saver\n")
    linted = _lint_imports(tmp_path)
    assert linted.returncode == 1
    assert "ckpt.format.box -> ckpt.saving.saver" in linted.stdout


def test_the_handbook_shows_the_imports_between_packages_of_today() -> None:
    draw_imports = doc_script("draw_imports")
    assert draw_imports.PICTURE.read_text() == draw_imports.drawing(), "run python docs/draw_imports.py"
    assert draw_imports.PICTURE.read_text().count("marker-end") == len(draw_imports.arrows()) > 10
