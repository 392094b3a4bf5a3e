"""Compiles stub CANN libraries for an installed torch_npu wheel. Needs gcc, nm and strings.

What the wheel needs of CANN is read from the wheel itself. The functions that tests need are written out in C, against the
ACL headers that the wheel carries, so that a wrong signature does not compile. Every other one answers with an error that names
it. By hand: `python tests/torch_npu_stub/build.py <site-packages> <folder for the libraries>`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = sorted([*HERE.glob("*.c"), *HERE.glob("*.h"), Path(__file__)])
TOOLS = ("gcc", "nm", "strings")

_RUNTIME = ("runtime.c", "streams.c")
_EMPTY = ("hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel", "runtime")
"""Libraries that the wheel is linked with; they hand everything on to libascendcl.so."""

_OF_CANN = re.compile(r"(_ZNK?2ge|_ZNK?3atb|acl|Hccl|Hcom|Msprof|rt[A-Z]|GE|dcmi|adx|Adx|hal)\w*")
_LOOKED_UP = re.compile(r"acl(?!nn)[A-Za-z0-9]+|Hccl[A-Za-z0-9]+")
"""Names in the text of the wheel that it may look up at run time. Kernels (aclnn) it shall not find."""


def missing_tools() -> list[str]:
    """The programs that `build` needs and this machine has not."""
    return [tool for tool in TOOLS if shutil.which(tool) is None]


def build(site_packages: Path, out: Path) -> None:
    """Leave the libraries in `out`, a new folder, for LD_LIBRARY_PATH.

    Raises:
        subprocess.CalledProcessError: the compiler refused; its words are on stderr.
    """
    wheel = site_packages / "torch_npu"
    out.mkdir(parents=True)
    written = set[str]().union(*(_functions_of(HERE / name) for name in (*_RUNTIME, "kernels.c")))
    (out / "unwritten.c").write_text(_unwritten(_needed(site_packages) - written))
    headers = wheel / "include" / "third_party" / "acl" / "inc"
    _link(out, "ascendcl", [HERE / name for name in _RUNTIME] + [out / "unwritten.c"], headers, "-lpthread")
    _link(out, "opapi", [HERE / "kernels.c"], headers, f"-L{out}", "-lascendcl")
    (out / "empty.c").write_text("extern int unused;\n")
    for name in _EMPTY:
        _link(out, name, [out / "empty.c"], headers, "-Wl,--no-as-needed", f"-L{out}", "-lascendcl")


def _needed(site_packages: Path) -> set[str]:
    """The functions of CANN that the wheel is linked with, and those that it looks up by name."""
    wheel = sorted((site_packages / "torch_npu").rglob("*.so"))
    torch = sorted((site_packages / "torch" / "lib").glob("*.so"))
    linked = _symbols("--undefined-only", wheel) - _symbols("--defined-only", wheel + torch)
    text = _output("strings", "-n", "5", site_packages / "torch_npu" / "lib" / "libtorch_npu.so")
    return {name for name in linked if _OF_CANN.fullmatch(name)} | {name for name in text if _LOOKED_UP.fullmatch(name)}


def _symbols(which: str, files: Iterable[Path]) -> set[str]:
    rows = [row.split() for file in files for row in _output("nm", "-D", which, file)]
    return {row[-1].partition("@")[0] for row in rows if row}


def _functions_of(source: Path) -> set[str]:
    """The functions that a C file defines: those that begin a line."""
    return set(re.findall(r"^[a-zA-Z][\w *]*?\b((?:acl|stub_)\w+)\(", source.read_text(), re.MULTILINE))


def _unwritten(names: set[str]) -> str:
    body = '{{ static int said; return stub_unsupported("{0}", &said); }}'
    rows = [f"long {name}(void) {body.format(name)}\n" for name in sorted(names)]
    return "int stub_unsupported(const char *name, int *said);\n" + "".join(rows)


def _link(out: Path, name: str, sources: list[Path], headers: Path, *libraries: str) -> None:
    flags = ["-std=gnu11", "-O1", "-shared", "-fPIC", "-Wall", "-fno-builtin", f"-I{headers}"]
    library = out / f"lib{name}.so"
    _output("gcc", *flags, f"-Wl,-soname,{library.name}", "-o", library, *sources, *libraries)


def _output(*command: str | Path) -> list[str]:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()


if __name__ == "__main__":
    build(Path(sys.argv[1]), Path(sys.argv[2]))
