"""Saves that go on while training does: upstream's module of this name. What is behind it is `ckpt.saving.background.async_utils`."""

from ckpt.saving.background.async_utils import AsyncCallsQueue, AsyncRequest, logger

__all__ = ["AsyncCallsQueue", "AsyncRequest", "logger"]
