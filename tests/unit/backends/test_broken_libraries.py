"""A storage library that is absent, of a version that does not fit, or that breaks when it is imported breaks its own format alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt.errors import import_failure

FORMATS = ("zarr", "tensorstore", "kimi-engine", "zarr in gzip")

PROGRAM = """
import json, sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path

library, cause, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])

class Broken(MetaPathFinder, Loader):
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name == library else None
    def exec_module(self, module):
        raise eval(cause)

sys.meta_path.insert(0, Broken())
import torch
import ckpt
from ckpt import dist_checkpointing
from ckpt.backends.registry import backend_named, backend_of_store
from ckpt.backends.zarr import ZarrBackend
from ckpt.dist_checkpointing import ShardedTensor
from ckpt.errors import ConfigurationError
import ckpt.cli.converting

weights = torch.arange(100_000.0)
backends = {"zarr": "zarr", "tensorstore": "tensorstore", "kimi-engine": "kimi-engine"}
said = {}
for name in (*backends, "zarr in gzip"):
    path = folder / name.replace(" ", "-")
    try:
        gzip = [{"name": "gzip", "configuration": {"level": 1}}]
        ckpt.save({"w": weights, "step": 3}, path, format=backends[name] if name in backends else ZarrBackend(compressors=gzip))
        loaded = {"w": torch.zeros(100_000), "step": 0}
        ckpt.load(path, loaded)
        assert torch.equal(loaded["w"], weights)
        if name in ("zarr", "tensorstore"):
            sharded = {"w": ShardedTensor.from_rank_offsets("w", weights), "step": 3}
            (folder / f"sharded-{name}").mkdir()
            dist_checkpointing.save(sharded, str(folder / f"sharded-{name}"), (name, 1))
            again = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(100_000))}
            assert torch.equal(dist_checkpointing.load(again, str(folder / f"sharded-{name}"))["w"], weights)
        said[name] = "works"
    except ConfigurationError as error:
        said[name] = str(error)
print(json.dumps(said))
"""


@pytest.mark.parametrize(
    ("library", "cause", "broken", "sentence"),
    [
        (
            "zarr",
            "ModuleNotFoundError(\"No module named 'zarr'\", name='zarr')",
            {"zarr in gzip"},
            "needs the package zarr, which is not installed: pip install zarr",
        ),
        pytest.param(
            "zarr",
            "ImportError(\"cannot import name 'x' from 'zarr.y'\", name='zarr.y')",
            {"zarr in gzip"},
            "which is installed: cannot import name 'x' from 'zarr.y'. Install versions that fit: pip install --upgrade ckpt-coord",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "numcodecs",
            "ValueError('numpy.dtype size changed')",
            {"zarr in gzip"},
            "cannot be imported: ValueError: numpy.dtype size changed. Install versions that fit",
            marks=pytest.mark.full,
        ),
        (
            "tensorstore",
            "OSError('libstdc++.so.6: version not found')",
            {"tensorstore"},
            "the backend tensorstore cannot be imported: OSError: libstdc++.so.6: version not found",
        ),
        ("safetensors", "ModuleNotFoundError(\"No module named 'safetensors'\", name='safetensors')", set(), ""),
    ],
)
def test_a_library_that_cannot_be_imported_breaks_its_own_format_alone(
    tmp_path: Path, library: str, cause: str, broken: set[str], sentence: str
) -> None:
    command = [sys.executable, "-c", PROGRAM, library, cause, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said.keys() == set(FORMATS)
    assert {name for name in FORMATS if said[name] != "works"} == broken, said
    assert all(sentence in said[name] for name in broken), said


def test_a_module_that_a_package_of_another_version_lacks_is_not_offered_for_installation() -> None:
    """zarr 3.2 has no `zarr.core.chunk_grids.RegularChunkGrid`; there is no package of that name to install."""
    absent = ModuleNotFoundError("No module named 'zarr.core.gone'", name="zarr.core.gone")
    said = str(import_failure("the backend zarr", absent))
    assert said.startswith("the backend zarr cannot be imported with zarr 3."), said
    assert said.endswith(
        ", which is installed: No module named 'zarr.core.gone'. Install versions that fit: pip install --upgrade ckpt-coordinator zarr"
    )
