"""What a file is that is no checkpoint, by its first bytes: for the sentence that refuses it. Nothing in it is run or unpacked.

Downloads and clones leave other things under the names of weights: pointers of Git LFS, error pages, files that were cut off.
"""

from __future__ import annotations

import zipfile
from collections.abc import Collection
from typing import BinaryIO

_MOST_BYTES = 4096
_AGAIN = "download or copy it again"
_UNPACK = "unpack it, and give what is in it"
_BEGINNINGS: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs.github.com/", "a pointer of Git LFS in the place of the file: fetch the file by git lfs pull"),
    (
        b"GGUF",
        "a GGUF file of llama.cpp: make safetensors of it by from_pretrained(<its folder>, gguf_file=<its name>).save_pretrained(<folder>) "
        "of transformers, and give that folder",
    ),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file, as Keras and TensorFlow write: save its arrays as safetensors"),
    (b"\x93NUMPY", "an array of NumPy: load it by numpy.load, and save a state dict of it by ckpt.save"),
    (b"\x1f\x8b", f"compressed by gzip: {_UNPACK}"),
    (b"BZh", f"compressed by bzip2: {_UNPACK}"),
    (b"\xfd7zXZ\0", f"compressed by xz: {_UNPACK}"),
    (b"\x28\xb5\x2f\xfd", f"compressed by zstd: {_UNPACK}"),
    (b"7z\xbc\xaf\x27\x1c", f"a 7z archive: {_UNPACK}"),
    (b"Rar!", f"a RAR archive: {_UNPACK}"),
)  # fmt: skip
_PICKLES = tuple(bytes((0x80, version)) for version in range(2, 6))
_OF_ZIP: tuple[tuple[str, str], ...] = (
    ("/constants.pkl", "a TorchScript program: load it by torch.jit.load, and save its state_dict() by torch.save"),
    ("/archive_format", "a program of torch.export: load it by torch.export.load, and save its state_dict by torch.save"),
    ("/.data/extern_modules", "a package of torch.package: load its model where you trust it, and save its state_dict() by torch.save"),
    ("/data.pkl", "a file of torch.save that was packed anew: load it by torch.load, and save it again by torch.save"),
    (".npy", "an archive of NumPy (.npz): load it by numpy.load, and save a state dict of its arrays by ckpt.save"),
)  # fmt: skip


def kind_of(file: BinaryIO) -> str | None:
    """Return what an open file is, and what to do, as "an empty file: download or copy it again"; None: it is not known."""
    file.seek(0)
    begin = file.read(_MOST_BYTES)
    if not begin:
        return f"an empty file: {_AGAIN}"
    if (found := next((kind for first, kind in _BEGINNINGS if begin.startswith(first)), None)) is not None:
        return found
    if begin.startswith(b"PK\3\4"):
        return _kind_of_zip(file)
    if begin[257:262] == b"ustar":
        return f"a tar archive: {_UNPACK}"
    if begin.startswith(_PICKLES):
        return "a pickle that torch.save did not write: load it where you trust it, and save its tensors by torch.save"
    return _kind_of_text(begin)


def _kind_of_zip(file: BinaryIO) -> str:
    try:
        names: Collection[str] = zipfile.ZipFile(file).namelist()
    except Exception:  # bytes that are no zip make Python raise nearly anything
        return f"an archive that was cut off, or is damaged: {_AGAIN}"
    known = (kind for end, kind in _OF_ZIP if any(name.endswith(end) for name in names))
    return next(known, f"a zip archive: {_UNPACK}")


def _kind_of_text(begin: bytes) -> str | None:
    """The kind of a file of text: UTF-8 without control characters, but for one that the limit cuts."""
    text = begin.decode("utf-8", "ignore").removeprefix("\ufeff").lstrip()
    if not text or any(character < " " and character not in "\t\n\r\f\x1b" for character in text) or len(begin) - len(text.encode()) > 64:
        return None
    if text.startswith("<"):
        return f"a web page, as a download without access leaves: {_AGAIN}"
    kind = "JSON" if text.startswith(("{", "[")) else "text"
    return f"{kind} without tensors: give the folder, or the file, that holds the tensors"
