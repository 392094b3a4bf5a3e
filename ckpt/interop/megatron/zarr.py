"""Read a Megatron-Core zarr checkpoint: tensors through zarr, tensorstore or as mapped files, and the pickled parts.

A missing chunk is an error, never zeros. Pickles are read only if the caller allows it, by `ckpt.interop.unpickling` alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch

from ckpt.backends.decoded_size import require_decodes_within
from ckpt.errors import Argument, ConfigurationError, CorruptCheckpointError, MissingStateError, importing, sentence
from ckpt.format.box import Box, chunk_box, chunks_meeting
from ckpt.format.dtypes import bits_of, torch_dtype
from ckpt.format.records import ChunkExtent
from ckpt.interop.megatron.layout import (
    ARRAY_FILE,
    COMMON_STATE_FNAME,
    NO_DIGESTS,
    MegatronArray,
    array_at,
    headless,
    layout_of,
    require_version,
)
from ckpt.interop.megatron.layout import is_megatron_zarr as is_megatron_zarr
from ckpt.interop.unpickling import Unknown, unpickle
from ckpt.loading.other_checkpoint import Encoded, FilePiece, OtherCheckpoint, OtherTensor
from ckpt.state.sharded_object import ShardedObject
from ckpt.storage.checkpoint_files import CheckpointFolder, names_below

_log = logging.getLogger("ckpt")

Library = Literal["zarr", "tensorstore"]
"""The library that opens Megatron-Core's arrays. Our compressed chunks are read by the library of their store."""



class MegatronZarr(OtherCheckpoint):
    """Tensors of one checkpoint, open for reading. Any process, alone. Chunks have no digests; missing and truncated ones are detected.

    Args:
        library: decodes chunks.

    Attributes:
        arrays: by key.
        layout: all files of the checkpoint.

    Raises:
        CheckpointNotFoundError: the folder holds no such checkpoint.
        ConfigurationError: unknown version of the format, or unknown library.
        CorruptCheckpointError: metadata of the checkpoint or of a tensor cannot be parsed.
    """

    root: Path
    program = "Megatron-Core's zarr"

    def __init__(self, checkpoint_dir: Path, library: Library = "zarr") -> None:
        root = Path(checkpoint_dir)
        if library not in _OPEN:
            raise ConfigurationError(f"library {library!r} is not known; choose zarr or tensorstore")
        require_version(root)
        self._library = library
        self._files = CheckpointFolder(root)
        self._opened: dict[str, Callable[[Box, torch.Tensor], None]] = {}
        self.layout = layout_of(root)
        self.arrays = {key: array_at(root, key) for key in self.layout.arrays}
        super().__init__(root, {key: self._tensor(array) for key, array in self.arrays.items()}, {})

    def _tensor(self, array: MegatronArray) -> OtherTensor:
        file = f"{array.key}/{ARRAY_FILE}"
        chunks = Encoded(file, array.grid, partial(self.read, array.key), partial(self._extent, array))
        return OtherTensor((array.key,), array.dtype, array.shape, chunks)

    def require_whole(self) -> Self:
        """Return it, if no array lacks its metadata.

        Raises:
            CorruptCheckpointError
        """
        if self.layout.headless:
            raise headless(self.root, self.layout.headless[0])
        return self

    def read(self, key: str, box: Box, out: torch.Tensor) -> None:
        """Fill `out` (host, shape box.shape, the stored data type) with a box of a tensor, through the library.

        Raises:
            MissingStateError: unknown tensor.
            CorruptCheckpointError: a chunk in `box` is missing, has the wrong size, or cannot be decoded.
            ConfigurationError: the library cannot be imported.
        """
        array = self._array(key)
        assert tuple(out.shape) == box.shape and out.dtype == torch_dtype(array.dtype), f"{key}: {out.shape} for {box}"
        if out.numel() == 0:
            return
        numbers = list(chunks_meeting(array.shape, array.grid, box))
        for number in numbers:
            self.require_chunk(array, number)
        try:
            self._reader(key)(box, out)
        except ConfigurationError:
            raise
        except Exception as error:  # codecs raise nearly anything
            chunk = next((number for number in numbers if not self._is_readable(array, number)), None)
            where = str(box) if chunk is None else f"chunk {array.chunk_file(chunk)}"
            raise CorruptCheckpointError(
                f"{key}: {self._library} cannot read {where} of {self.root / key}: {sentence(error)}. {NO_DIGESTS}"
            ) from error

    def mapped(self, name: str) -> list[tuple[Box, torch.Tensor]]:
        """See `OtherCheckpoint.mapped`: every stored chunk is a piece, cut at the tensor's edge."""
        array = self._array(name)
        if not array.is_raw or not array.num_chunks:
            return super().mapped(name)
        pieces = []
        for number in range(array.num_chunks):
            file = self.require_chunk(array, number).relative_to(self.root).as_posix()
            pieces.append(FilePiece(chunk_box(array.shape, array.grid, number), file, 0, array.grid))
        return [(piece.box, self._view(piece, torch_dtype(array.dtype))) for piece in pieces]

    def _array(self, key: str) -> MegatronArray:
        if key in self.arrays:
            return self.arrays[key]
        if key in self.layout.headless:
            raise headless(self.root, key)
        _log.debug("%s holds %s", self.root, names_below(self.root))
        raise MissingStateError(
            f"array {key} is not in {self.root}: there is no {self.root / key / ARRAY_FILE}. It holds {len(self.arrays)} others; "
            "the debug log lists the folder."
        )

    def require_chunks(self, array: MegatronArray) -> None:
        """Check that an array has as many chunks as it claims, before work in proportion to these. Looks at the first chunk alone.

        Raises:
            CorruptCheckpointError: one is missing, or the first has the wrong size.
        """
        with CheckpointFolder(self.root) as folder:
            found = sum(1 for _ in folder.below(array.key))
        for number in range(array.num_chunks if found < array.num_chunks else min(1, array.num_chunks)):
            self.require_chunk(array, number)

    def require_chunk(self, array: MegatronArray, number: int) -> Path:
        """Return the file of a chunk.

        Raises:
            CorruptCheckpointError: it is missing, has the wrong size (raw chunks), or would decode to far more than its elements.
        """
        path = f"{array.key}/{array.chunk_file(number)}"
        file = self.root / path
        try:
            size = self._files.stat(path).st_size
        except (FileNotFoundError, NotADirectoryError):
            raise CorruptCheckpointError(
                f"{array.key}: chunk {array.chunk_file(number)} is missing, there is no {file}. {NO_DIGESTS}"
            ) from None
        if array.is_raw and size != array.chunk_bytes:
            raise CorruptCheckpointError(
                f"{array.key}: chunk {array.chunk_file(number)} has {size} bytes, and {list(array.grid)} elements of {array.dtype} are "
                f"{array.chunk_bytes}: {file} was cut off or changed. {NO_DIGESTS}"
            )
        if array.codecs:
            try:
                require_decodes_within(self._files, path, array.codecs, array.chunk_bytes)
            except CorruptCheckpointError as error:
                raise CorruptCheckpointError(
                    f"{array.key}: {self._library} cannot read chunk {array.chunk_file(number)} of {self.root / array.key}: {error}"
                ) from error
        return file

    def _extent(self, array: MegatronArray, number: int) -> ChunkExtent:
        file = self.require_chunk(array, number)
        return ChunkExtent(file.relative_to(self.root).as_posix(), 0, file.stat().st_size, (), raw=array.is_raw)

    def _reader(self, key: str) -> Callable[[Box, torch.Tensor], None]:
        if key not in self._opened:
            self._files.require_regular_below(key)  # the libraries would follow links out of the checkpoint
            self._opened[key] = _OPEN[self._library](self.root / key)
        return self._opened[key]

    def _is_readable(self, array: MegatronArray, number: int) -> bool:
        box = chunk_box(array.shape, array.grid, number)
        try:
            self._reader(array.key)(box, torch.empty(box.shape, dtype=torch_dtype(array.dtype), device="cpu"))
        except Exception:
            return False
        return True


def load_megatron_common(checkpoint_dir: Path, *, allow_pickle: bool, unknown: Unknown = "refuse") -> dict[Any, Any]:
    """Read the common state from `common.pt`.

    Args:
        unknown: as for `ckpt.interop.unpickling.unpickle`.

    Raises:
        ConfigurationError: pickles are not allowed; or it holds objects of unknown classes, or no dictionary.
        CorruptCheckpointError: it is missing or cannot be read.
    """
    file = checkpoint_dir / COMMON_STATE_FNAME
    if not file.is_file():
        _log.debug("%s holds %s", checkpoint_dir, names_below(checkpoint_dir))
        raise CorruptCheckpointError(f"{file} does not exist. {NO_DIGESTS}")
    common = _unpickled(checkpoint_dir, COMMON_STATE_FNAME, allow_pickle, unknown)
    if not isinstance(common, dict):
        raise ConfigurationError(f"{file} holds a {type(common).__name__}, where a state dict should be")
    return common


def megatron_objects(checkpoint_dir: Path) -> dict[str, ShardedObject]:
    """Return unique key -> object without data, parsed from the names of the object files. Opens none of them.

    Old versions cut the last number of the shape off the name; it is then inferred from all files of the key.
    """
    by_key: dict[str, list[ShardedObject]] = {}
    for path in layout_of(checkpoint_dir).objects:
        made = ShardedObject.empty_from_unique_key(path.removesuffix(".pt"))
        by_key.setdefault(made.key, []).append(made)
    for objects in by_key.values():
        last = max((saved_object.global_offset[-1] for saved_object in objects if saved_object.global_offset), default=0)
        for saved_object in objects:
            if saved_object.global_shape[-1:] == (-1,):
                saved_object.global_shape = (*saved_object.global_shape[:-1], last + 1)
    return {saved_object.unique_key: saved_object for objects in by_key.values() for saved_object in objects}


def load_megatron_object(
    checkpoint_dir: Path, unique_key: str, *, allow_pickle: bool, unknown: Unknown = "refuse"
) -> Any:
    """Read one object, from `<unique_key>.pt` or the shorter file name of old versions.

    Raises:
        MissingStateError: no such object.
        ConfigurationError, CorruptCheckpointError: as `load_megatron_common`.
    """
    path = f"{unique_key}.pt"
    if not (checkpoint_dir / path).is_file():
        path = Path(unique_key).with_suffix(".pt").as_posix()
        # The short name omits a side of the shape: check that the inferred shape is the requested one.
        if not (checkpoint_dir / path).is_file() or unique_key not in megatron_objects(checkpoint_dir):
            folder = (checkpoint_dir / unique_key).parent
            shown = folder if folder.is_dir() else checkpoint_dir
            _log.debug("%s holds %s", shown, names_below(shown))
            raise MissingStateError(
                f"object {unique_key} is not in {checkpoint_dir}. Objects cannot be resharded: request the objects that were saved. "
                "The debug log lists the folder."
            )
    return _unpickled(checkpoint_dir, path, allow_pickle, unknown)


def _unpickled(checkpoint_dir: Path, path: str, allow_pickle: bool, unknown: Unknown) -> Any:
    file = checkpoint_dir / path
    if not allow_pickle:
        raise ConfigurationError(
            f"{file} is a pickle, which is read only where that is asked for: load with ",
            Argument("load.allow_pickle", True),
            ". Then tensors, plain values and containers are made of it, and nothing that it holds is run.",
        )
    with CheckpointFolder(checkpoint_dir) as folder:
        folder.require_regular(path)
    return unpickle(file, unknown=unknown)


def _open_by_zarr(folder: Path) -> Callable[[Box, torch.Tensor], None]:
    with importing("reading a checkpoint of Megatron-Core by zarr"):
        import zarr
        import zarr.storage

        from ckpt.format import zarr_dtypes

        zarr_dtypes.register()
    stored = zarr.open_array(store=zarr.storage.LocalStore(folder, read_only=True), mode="r", zarr_format=2)

    def read(box: Box, out: torch.Tensor) -> None:
        values = np.asarray(stored[box.slices])
        bits = bits_of(out)
        bits[...] = values.astype(values.dtype.newbyteorder("="), copy=False).view(bits.dtype)

    return read


def _open_by_tensorstore(folder: Path) -> Callable[[Box, torch.Tensor], None]:
    with importing("reading a checkpoint of Megatron-Core by tensorstore"):
        from ckpt.backends.tensorstore import folder_store, mapping_files, opened, read_box

    context = mapping_files()
    return partial(read_box, opened(folder_store(folder), context, driver="zarr"), context)


_OPEN: dict[str, Callable[[Path], Callable[[Box, torch.Tensor], None]]] = {
    "zarr": _open_by_zarr,
    "tensorstore": _open_by_tensorstore,
}
