"""Records that an export of ours carries: what the format of another program has no place for. Pure.

A checkpoint of ours becomes one of DCP or one file of `torch.save` by `ckpt.interop`. Tensors and plain values go over under natural names;
the manifest, the config and the plain values of each copy go along unchanged, in a file or zip member that other programs ignore. With
them the export is loaded, and converted back, like the checkpoint that it was made of.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, replace

from ckpt.format.digests import digest_of
from ckpt.format.strict_json import Digest, corrupt, read

_log = logging.getLogger("ckpt")

RECORDS_NAME = "ckpt_records.json"
"""The file beside DCP's `.metadata`, and the member beside `data.pkl` in a file of `torch.save`."""


@dataclass(frozen=True, slots=True)
class ExportRecords:
    """See the module.

    Attributes:
        manifest, config: texts of the checkpoint's manifest and config.yaml; "" without config.
        plain: path of each file of plain values in the checkpoint -> its text.
        names: array name in the manifest -> name of the tensor in the export. Aliases are not in it.
        described_by: digest of the export's own description, `.metadata` or `data.pkl`. With another one, another program has written
            over the export since, and the records are of what was there before.
        digest: of all other attributes.
    """

    manifest: str
    config: str
    plain: dict[str, str]
    names: dict[str, str]
    described_by: Digest
    digest: str = ""

    def to_bytes(self) -> bytes:
        """Return the bytes of the file."""
        return json.dumps(asdict(replace(self, digest=self._own_digest())), indent=0).encode()

    def _own_digest(self) -> str:
        return digest_of(json.dumps(asdict(replace(self, digest=""))).encode())


def records_for(description: bytes, data: bytes, where: str) -> ExportRecords | None:
    """Check and parse the bytes of the records of an export. The manifest in them is parsed by its user.

    Args:
        description: bytes of the export's `.metadata` or `data.pkl`.
        where: names the records in messages.

    Returns:
        None, with a warning, if they are of another export.

    Raises:
        CorruptCheckpointError: they are not what `to_bytes` returned.
    """
    records = read(data, ExportRecords, where)
    if records.digest != records._own_digest():
        raise corrupt(where, "it is not what was written: its digest is another")
    if records.described_by != digest_of(description):
        _log.warning("%s is not used: it describes what was here before another program saved over it", where)
        return None
    return records
