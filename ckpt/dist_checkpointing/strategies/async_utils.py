"""Saves that go on beside training: upstream's module of this name. The code is in `ckpt.saving.background.async_utils`."""

from ckpt.errors import logger_of
from ckpt.saving.background.async_utils import AsyncCallsQueue, AsyncRequest

__all__ = ["AsyncCallsQueue", "AsyncRequest", "logger"]

logger = logger_of(__name__)
