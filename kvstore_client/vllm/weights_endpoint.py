"""``POST /kvstore/weights {"version": "step-1200"}`` on vLLM's API server. The request names the weights that all
workers have loaded, as `kvstore_client.vllm.new_weights` does for one worker.

This module is an endpoint plugin of vLLM, which loads it only if ``VLLM_PLUGINS`` names ``kvstore``. If the server has
``--api-key``, the request must have the key, as requests to ``/v1`` must.

All code here runs in the API server's event loop.
"""

from __future__ import annotations

import json
import os
import secrets
from argparse import Namespace as Arguments
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse

if TYPE_CHECKING:
    from starlette.datastructures import State
    from vllm.engine.protocol import EngineClient

WEIGHTS_PATH = "/kvstore/weights"
MAX_BODY_BYTES = 64 << 10  # the largest body of a request


class WeightsEndpoint:
    """The interface of vLLM's endpoint plugins."""

    name = "kvstore"
    required_tasks = None

    def __init__(self) -> None:
        self._engine: EngineClient | None = None
        self._keys: list[str] = []

    def attach_router(self, app: Any) -> None:
        app.add_api_route(WEIGHTS_PATH, self.name_weights, methods=["POST"], response_model=None)

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Arguments) -> None:
        self._engine = engine_client
        keys: Any = getattr(args, "api_key", None) or os.environ.get("VLLM_API_KEY") or []
        self._keys = [keys] if isinstance(keys, str) else [key for key in keys if key]

    async def name_weights(self, request: Request) -> JSONResponse:
        """Name the weights. The status is 400 for a body of another form, 401 for a request without the key, and 409 if
        the workers refuse the name. With 409, the answer has the reason."""
        if not self._is_allowed(request.headers.get("authorization", "")):
            return JSONResponse({"error": "Unauthorized"}, 401)
        try:
            body = await request.body()
            found = json.loads(body) if len(body) <= MAX_BODY_BYTES else None
        except ValueError:
            found = None
        version = found.get("version") if isinstance(found, dict) else None
        if not isinstance(version, str) or not version:
            return JSONResponse({"error": f'expected {{"version": "a name, such as step-1200"}}, got {found!r}'}, 400)
        if self._engine is None:
            return JSONResponse({"error": "this server has no engine"}, 409)
        try:
            await self._engine.collective_rpc("kvstore_new_weights", args=(version,))
        except Exception as error:
            return JSONResponse({"error": f"the weights were not named: {error}"}, 409)
        return JSONResponse({"version": version})

    def _is_allowed(self, authorization: str) -> bool:
        scheme, _, given = authorization.partition(" ")
        is_bearer = scheme.lower() == "bearer"
        return not self._keys or any(
            is_bearer and secrets.compare_digest(given.encode(), key.encode()) for key in self._keys
        )
