"""No private name of a dependency is used but those listed here, each with its reason; in the product, each is guarded."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

from ckpt.errors import ConfigurationError, private_name

CHECKOUT = Path(__file__).resolve().parents[2]
OURS = {"ckpt", "recipes", "tests", "examples"}
PRIVATE_PACKAGES = ("zarr.core",)
"""Whose own documentation says so, without an underscore."""

GUARDED = {
    "ckpt/engine/wire/group.py": {
        "torch.distributed.distributed_c10d:_new_process_group_helper": "public functions make groups inside the default group only",
        "torch.distributed.distributed_c10d:_world": "the same: collectives look up the ranks of a group there",
    },
    "ckpt/integrations/torchft.py": {
        "torch.distributed._mesh_layout:_FlatLayout": "a mesh that is a part of another one has no maker in public",
        "torch.distributed._mesh_layout:_MeshLayout": "the same",
        "torch.distributed.tensor._dtensor_spec:DTensorSpec": "DTensor.from_local empties the part of a rank outside of the mesh",
        "torch.distributed.tensor._dtensor_spec:TensorMeta": "the same",
        "torch.distributed.tensor.placement_types:_StridedShard": "what FSDP makes of a tensor that is sharded already",
    },
    "ckpt/interop/torch_save/writing.py": {
        "torch._subclasses.fake_tensor:FakeTensorMode": "torch.save lays out a file for fake tensors alone without their bytes",
        "torch._utils:_rebuild_parameter": "a parameter of a fake tensor is pickled as a tensor",
    },
    "ckpt/ranks/default_topology.py": {
        "torch.distributed.distributed_c10d:_get_default_store": "the store of init_process_group has no public name",
    },
    "ckpt/storage/wanted_bytes.py": {
        "torch._C:_nn": "unflatten_dense_tensors is a loop in C++, half the time of one in Python",
    },
    "recipes/benchmark/background_contenders.py": {
        "torch.distributed.checkpoint:_async_process_executor": "no public call ends the process of async_save",
    },
    "recipes/training/parallel/accelerated.py": {
        "accelerate.state:AcceleratorState._reset_state": "Accelerate keeps the first job's settings for the whole process",
    },
    "recipes/support/cli.py": {
        "hydra._internal.utils:get_args_parser": "help must understand the flags that Hydra understands",
    },
}
"""File of the product -> module and name that it asks `ckpt.errors.private_name` for -> why there is no public way."""

_COPIES = "one call copies many tensors; documented nowhere, and used by torch's own optimizers since 2.0"
_FITTING = "ckpt/engine/parameter_server.py refuses a checkpoint-engine of other versions than 0.4.2 and before 0.5"
UNGUARDED = {
    "ckpt/engine/parameter_server.py": {"checkpoint_engine.ps._get_physical_gpu_id": _FITTING},
    "recipes/benchmark/parameter_server.py": {"checkpoint_engine.ps._gen_h2d_buckets": _FITTING},
    "ckpt/memory/device.py": {
        "torch._C": "by getattr with a default: says why CUDA is absent, in more words where torch knows"
    },
    "ckpt/storage/wanted_bytes.py": {"torch._foreach_copy_": _COPIES},
}
"""File of the product -> other private names -> why they can do no harm."""

IN_TESTS = {
    "accelerate.state.": "a test begins without the state of the one before",
    "hydra._internal.": "each file of conf/ is read once, and each choice merged once, for all tests of a process",
    "megatron.core.": "a program of its own, which has written a golden checkpoint",
    "numpy._core.multiarray._reconstruct": "the name that pickles of arrays hold",
    "torch.Tensor._make_wrapper_subclass": "what classes of wrappers are made by; documented, and has no other name",
    "torch._C._accelerator_emptyHostCache": "a hook that a device's plugin fills",
    "torch._foreach_copy_": "what the product calls",
    "torch._efficientzerotensor": "a tensor of this kind has no other maker",
    "torch._neg_view": "the same",
    "torch._register_device_module": "the way in for a device's plugin",
    "torch._utils._rebuild_tensor_v2": "the name that pickles of tensors hold",
    "torch.cuda._sleep": "keeps a device busy",
    "torch.distributed.algorithms._checkpoint.": "the wrapper that people train with, whose name the product knows",
    "torch.distributed.checkpoint._fsspec_filesystem.": "the writer and reader of DCP for fsspec, which have no other name",
    "torch.distributed.checkpoint.filesystem._Storage": "what metadata of other programs hold",
    "torch.distributed.checkpoint.state_dict_loader._load_state_dict_from_keys": "what torchtitan calls",
    "torch.distributed.distributed_c10d.": "groups as torch sees them",
    "torch.distributed.tensor.": "caches that keep a mesh's connections open: a job in a process that lives on",
    "torch.npu._is_in_bad_fork": "of the stand-in",
    "torch.ops.aten._to_copy": "an operation, as a mode sees it",
    "torch.storage._load_from_bytes": "the name that pickles of storages hold",
    "torch.testing._internal.two_tensor.TwoTensor": "the wrapper of tensors that torch tests its own programs with",
    "torch.utils._python_dispatch.TorchDispatchMode": "counts operations; documented, and has no other name",
    "torch_checkpointing.metadata_manager.": "its exchange of metadata needs CUDA; gloo ranks write golden checkpoints",
    "torch_npu._C.": "of the stand-in",
    "vllm.distributed.weight_transfer.factory.": "its registries can be asked for a class in no other way",
}
"""Beginning of private names in tests/ and examples/ -> why the tests need them."""


def test_private_names_of_dependencies_are_those_that_are_listed_with_a_reason() -> None:
    found: dict[str, set[str]] = {}
    for folder in ("ckpt", "recipes"):
        for file in sorted((CHECKOUT / folder).rglob("*.py")):
            if names := set(private_names(file)):
                found[file.relative_to(CHECKOUT).as_posix()] = names
    listed = {
        file: {f"guarded {name}" for name in GUARDED.get(file, ())} | set(UNGUARDED.get(file, ()))
        for file in GUARDED.keys() | UNGUARDED.keys()
    }
    assert found == listed


def test_private_names_in_tests_and_examples_are_listed_with_a_reason() -> None:
    files = [file for folder in ("tests", "examples") for file in (CHECKOUT / folder).rglob("*.py")]
    found = {name for file in files if file != Path(__file__) for name in private_names(file)}
    assert {name for name in found if not name.startswith(tuple(IN_TESTS))} == set()
    assert {listed for listed in IN_TESTS if not any(name.startswith(listed) for name in found)} == set()


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("from zarr.core.group import GroupMetadata", {"zarr.core.group.GroupMetadata"}),
        ("import zarr\nzarr.core.group", {"zarr.core.group"}),
        ("import torch._C", {"torch._C"}),
        ("from torch import _C as c", {"torch._C"}),
        (
            "import torch.distributed as dist\ndist.distributed_c10d._world.pg_map",
            {"torch.distributed.distributed_c10d._world.pg_map"},
        ),
        ("from importlib import import_module\nimport_module('hydra._internal.utils')", {"hydra._internal.utils"}),
        ("from ckpt.errors import private_name\nprivate_name('torch._C', '_nn', 'x')", {"guarded torch._C:_nn"}),
        ("import pkgutil\npkgutil.resolve_name('torch._C:_nn.x')", {"torch._C._nn.x"}),
        ("from ckpt._x import y\nfrom __future__ import annotations\nimport torch\ntorch.__version__; self._x", set()),
    ],
)
def test_what_counts_as_private(tmp_path: Path, source: str, names: set[str]) -> None:
    (tmp_path / "module.py").write_text(source)
    assert set(private_names(tmp_path / "module.py")) == names


@pytest.mark.parametrize("name", sorted({name for names in GUARDED.values() for name in names}))
def test_the_installed_versions_have_every_private_name(name: str) -> None:
    if name.startswith("accelerate"):
        pytest.importorskip("accelerate")
    if name.startswith("torch.distributed._mesh_layout") and Version(version("torch")) < Version("2.13"):
        pytest.skip("DTensors are sent by KeeperTransport from torch 2.13 on")
    assert private_name(*name.split(":"), "test") is not None


def test_a_private_name_that_is_gone_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    private_name.cache_clear()
    home, name = "torch.distributed.tensor._dtensor_spec", "DTensorSpec"
    monkeypatch.delattr(f"{home}.{name}")
    expected = f"torch {version('torch')} has no {home}.{name}, which is needed to save DTensors: install another version of torch; docs/"
    with pytest.raises(ConfigurationError, match=f"^{re.escape(expected)}"):
        private_name(home, name, "save DTensors")
    with pytest.raises(ConfigurationError, match=r"has no torch\._gone\.name, which is needed to do x: "):
        private_name("torch._gone", "name", "do x")
    private_name.cache_clear()


def private_names(file: Path) -> Iterator[str]:
    """Yield the dotted private names of other packages in a file; "guarded " before those that `private_name` looks up."""
    tree = ast.parse(file.read_text())
    named = _imported(tree)
    names = [*named.values()]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names.append(_dotted(node, named))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names += [place.replace(":", ".") for place in re.findall(r"^[a-z]\w*(?:\.\w+)+:[\w.]+$", node.value)]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called, module = _dotted(node.func, named), str(node.args[0].value)
            if called == "ckpt.errors.private_name":
                yield f"guarded {module}:{ast.literal_eval(node.args[1])}"
            elif called in ("importlib.import_module", "pytest.importorskip"):
                names.append(module)
    found = {name for name in names if _is_private(name)}
    yield from (name for name in found if not any(other.startswith(f"{name}.") for other in found))


def _dotted(node: ast.AST, named: Mapping[str, str]) -> str:
    """Return the dotted name of an expression whose first name is imported, or ""."""
    if isinstance(node, ast.Name):
        return named.get(node.id, "")
    base = _dotted(node.value, named) if isinstance(node, ast.Attribute) else ""
    return base and f"{base}.{node.attr}"  # type: ignore[attr-defined]


def _imported(tree: ast.AST) -> dict[str, str]:
    """Return the dotted name of everything that a module imports, by the name that it has there."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            whole = [one.name.partition(".")[0] for one in node.names if one.asname is None]
            found |= dict(zip(whole, whole, strict=True)) | {one.asname: one.name for one in node.names if one.asname}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    return found


def _is_private(name: str) -> bool:
    parts = name.split(".")
    if parts[0] in OURS or parts[0] in sys.stdlib_module_names:
        return False
    return name.startswith(PRIVATE_PACKAGES) or any(
        part.startswith("_") and not part.startswith("__") for part in parts
    )
