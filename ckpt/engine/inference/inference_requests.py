"""Requests that make the servers of inference engines load weights, in each one's HTTP interface.

Source: SGLang's `UpdateWeightsFromIPCReqInput`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ckpt.engine.base import WeightVersion
from ckpt.errors import CheckpointError, sentence


@dataclass(frozen=True)
class ServerRequest:
    """Requests to one server.

    Args:
        url: such as "http://localhost:8000".
        uds: a Unix socket in place of the address in `url`.
    """

    url: str
    uds: str | None = None
    timeout_s: float = 300.0

    def post(self, path: str, body: Mapping[str, Any], **query: str) -> None:
        """Ask the server to do something.

        Raises:
            CheckpointError: it refuses, or does not answer.
        """
        self.ask("POST", path, body, **query)

    @cached_property
    def _client(self) -> Any:
        import httpx

        # Made once, for it reads all certificates. Of connections that are kept, some server ends one as a request is sent.
        transport = httpx.HTTPTransport(uds=self.uds, limits=httpx.Limits(max_keepalive_connections=0))
        return httpx.Client(transport=transport, timeout=self.timeout_s)

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None, **query: str) -> Any:
        """Return the answer, as httpx has it; errors as of `post`."""
        import httpx  # which checkpoint-engine and vLLM bring, and takes a while

        try:
            response = self._client.request(method, f"{self.url}/{path}", json=body, params=query)
        except httpx.HTTPError as error:
            raise CheckpointError(
                f"the inference engine at {self.url}/{path} did not answer: {sentence(error)}"
            ) from error
        if response.is_error:
            raise CheckpointError(
                f"the inference engine at {self.url}/{path} refused ({response.status_code}): {' '.join(response.text.split())[:300]}"
            )
        return response


@dataclass(frozen=True)
class SglangRequest(ServerRequest):
    """Request to an SGLang server, which gets the step as its `weight_version`.

    Args:
        url: such as "http://localhost:30000".
        uds: a Unix socket in place of the address in `url`.
        flush_cache: drop the cache that the weights before have computed.
    """

    flush_cache: bool = True

    def __call__(self, handles: Mapping[str, str], version: WeightVersion) -> None:
        body = {"zmq_handles": dict(handles), "flush_cache": self.flush_cache, "weight_version": str(version.step)}
        self.post("update_weights_from_ipc", body)
