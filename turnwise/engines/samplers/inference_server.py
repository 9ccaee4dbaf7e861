"""An inference server as a sampler, whichever engine it runs: started or attached to, found well, and brought back."""

import asyncio
import time
from abc import abstractmethod
from typing import Any

from turnwise.engines.samplers.in_flight import DecodeText
from turnwise.engines.samplers.sampler import Capabilities
from turnwise.engines.samplers.server_client import ServerClient, server_address
from turnwise.engines.samplers.server_process import POLL_SECONDS, ServerProcess
from turnwise.engines.samplers.streamed import StreamedSampler
from turnwise.errors import EngineError, EngineLost
from turnwise.types import FinishReason

HEALTH_SECONDS = 10.0
ASK_SECONDS = 60.0
LOAD_SECONDS = 1800.0
RETURN_SECONDS = 900.0
"""How long an attached server that went away is waited for."""
FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class InferenceServer(StreamedSampler):
    """What servers of every kind have in common: being started or attached to, found well, and brought back."""

    def __init__(
        self,
        name: str,
        where: ServerProcess | str,
        *,
        vocabulary: int,
        decode: DecodeText,
        capabilities: Capabilities,
        api_key: str | None = None,
        model: str | None = None,
    ) -> None:
        """`where` is a process that will be started, or the address of a server that runs; `model` is the name of the
        one to take of several that it serves."""
        super().__init__(name, context_length=0, vocabulary=vocabulary, decode=decode, capabilities=capabilities)
        self._process = where if isinstance(where, ServerProcess) else None
        self._address = where if isinstance(where, str) else ""
        self._api_key, self._model = api_key, model
        self._client: ServerClient | None = None

    async def start(self) -> None:
        """Start it, or see that it is there; then `context_length` is known."""
        if self._process is not None:
            await self._process.start(self._answers)
        await self._connect()
        if not await self.healthy():
            raise EngineLost(f"{self.name}: nothing that serves answers there")
        await self._look()
        if self.context_length < 1:
            raise EngineError(f"{self.name} says that a sequence may have {self.context_length} tokens")

    async def healthy(self) -> bool:
        """Whether it says so itself."""
        if self._client is None or (self._process is not None and not self._process.alive):
            return False
        try:
            await self._client.ask("GET", "/health", seconds=HEALTH_SECONDS)
        except EngineError:
            return False
        return True

    async def restart(self) -> None:
        """A process of ours is started anew; somebody else's server is waited for. Its turns end in EngineLost."""
        await self._lose(f"{self.name} is being restarted")
        if self._process is None:
            until = time.monotonic() + RETURN_SECONDS
            while not await self.healthy():
                if time.monotonic() > until:
                    raise EngineError(f"{self.name} has not come back for {RETURN_SECONDS:g} s")
                await asyncio.sleep(4 * POLL_SECONDS)
        await self.start()
        self._is_back()

    async def _answers(self) -> bool:
        await self._connect()
        return await self.healthy()

    async def _connect(self) -> None:
        url = self._address if self._process is None else self._process.url
        if self._client is None or self._client.url != server_address(url):
            before, self._client = self._client, ServerClient(url, self._api_key)
            if before is not None:
                await before.close()

    @abstractmethod
    async def _look(self) -> None:
        """Find out what it serves, and set `context_length`."""

    @property
    def _server(self) -> ServerClient:
        if self._client is None:
            raise EngineLost(f"{self.name} has not been started")
        return self._client

    async def _order(self, path: str, body: Any = None, params: dict[str, str] | None = None) -> Any:
        """Something that a server that is well must be able to do: a failure then is no loss, it would come again."""
        try:
            return await self._server.ask("POST", path, body, params=params, seconds=LOAD_SECONDS)
        except EngineLost as error:
            if await self.healthy():
                raise EngineError(str(error)) from error
            raise

    async def _end(self) -> None:
        if self._client is not None:
            await self._client.close()
        if self._process is not None:
            await self._process.stop()
