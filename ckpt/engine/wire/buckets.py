"""How large buckets are, and the device memory that they pass through."""

from __future__ import annotations

from ckpt.engine.wire.layout import ALIGNED
from ckpt.engine.wire.transfer import DeviceBuffers
from ckpt.errors import ConfigurationError
from ckpt.memory.device import Device


class Buckets:
    """What one rank can move at a time.

    Args:
        num_bytes: of a bucket, at most.
        device: whose memory the collectives move; None: the host's, by gloo.
        staging: copy the next bucket to or from the device while one is under way: two buckets of device memory, else one.
        memory_fraction: of the device's free memory that buckets may take; they become smaller where that is not enough.

    Raises:
        ConfigurationError: a value that cannot be.
    """

    def __init__(self, num_bytes: int, *, device: Device | None, staging: bool, memory_fraction: float) -> None:
        if num_bytes < ALIGNED:
            raise ConfigurationError(f"a bucket of {num_bytes} bytes is too small: give at least {ALIGNED}")
        if not 0 < memory_fraction <= 1:
            raise ConfigurationError(f"memory_fraction={memory_fraction}: expected more than 0 and at most 1")
        self.device = device or Device(type="cpu", collectives="gloo")
        self.memory_fraction = memory_fraction
        self._num_bytes = num_bytes // ALIGNED * ALIGNED
        self._halves = 2 if staging else 1

    def room(self) -> int:
        """Bytes that a bucket may have on this rank's device now, all halves considered."""
        if self.device.type == "cpu":
            return self._num_bytes
        room = int(self.device.memory().free * self.memory_fraction) // self._halves // ALIGNED * ALIGNED
        return min(self._num_bytes, max(room, ALIGNED))

    def on_device(self, num_bytes: int) -> DeviceBuffers | None:
        """Device memory for the buckets of one update; None: its collectives take host memory.

        Raises:
            DeviceMemoryError: the device has no room.
        """
        if self.device.collectives == "gloo":
            return None
        return DeviceBuffers(self.device.torch_device, num_bytes, self._halves)
