"""Saves that go on beside training: upstream's module of this name. The code is in `ckpt.saving.background.async_utils`."""

import logging

from ckpt.saving.background.async_utils import AsyncCallsQueue, AsyncRequest

__all__ = ["AsyncCallsQueue", "AsyncRequest", "logger"]

logger = logging.getLogger(__name__)
