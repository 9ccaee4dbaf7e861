"""An inference server as a sampler, whichever engine it runs: started or attached to, found well, and brought back."""

import asyncio
import secrets
import time
from abc import abstractmethod
from typing import Any

from turnwise.engines.samplers.in_flight import DecodeText
from turnwise.engines.samplers.sampler import Capabilities
from turnwise.errors import EngineError, EngineLost
from turnwise.ext.servers.client import ServerClient, server_address
from turnwise.ext.servers.process import POLL_SECONDS, ServerProcess
from turnwise.ext.servers.same_model import Sizes
from turnwise.ext.servers.streamed_sampler import StreamedSampler
from turnwise.types import FinishReason

HEALTH_SECONDS = 10.0
ASK_SECONDS = 60.0
WRITER_SECONDS = 30.0
"""For the process that writes to answer between two of its passes, of which one may read long prompts."""
LOAD_SECONDS = 1800.0
RETURN_SECONDS = 900.0
"""How long an attached server that went away is waited for."""
FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class OtherWeights(EngineLost):
    """What answers at the address of a server does not have the weights that it was given."""


class WriterSilent(EngineLost):
    """A server answers, and its process that writes does not."""


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
        sizes: Sizes | None = None,
    ) -> None:
        """`where` is a process that will be started, or the address of a server that runs; `model` is the name of the
        one to take of several that it serves, `sizes` are those that its model must have."""
        super().__init__(name, context_length=0, vocabulary=vocabulary, decode=decode, capabilities=capabilities)
        self._process = where if isinstance(where, ServerProcess) else None
        self._address = where if isinstance(where, str) else ""
        self._api_key, self._model = api_key, model
        self._client: ServerClient | None = None
        self._sizes: Sizes = sizes or {}
        self._run = secrets.token_hex(4)
        """In the names of weights: another run may give the same server its own."""
        self._label: str | None = None
        """By which a server of others tells that it has the weights it was given last; None before the first."""
        self._asking, self._questions = asyncio.Lock(), 0
        self._answer: EngineError | None = None

    async def start(self) -> None:
        """Start it, or see that it is there; then `context_length` is known."""
        if self._process is not None:
            await self._process.start(self._answers)
        await self._connect()
        if not await self.healthy():
            raise EngineLost(f"{self.name}: nothing that serves answers there")
        await self._inspect()
        if self.context_length < 1:
            raise EngineError(f"{self.name} says that a sequence may have {self.context_length} tokens")

    async def healthy(self) -> bool:
        """Whether the server answers /health and still has the weights it was given."""
        if self._client is None or (self._process is not None and not self._process.alive):
            return False
        self.problem = ""
        try:
            await self._client.ask("GET", "/health", seconds=HEALTH_SECONDS)
            await self._check_label()
            await self._check_writer()
        except EngineError as error:
            self.problem = str(error) if isinstance(error, OtherWeights | WriterSilent) else ""
            return False
        return True

    async def _check_writer(self) -> None:
        """WriterSilent when turns wait for a process that stands still. It may be silent while it changes weights."""
        for _ in range(2):  # an update may have begun and ended during the first
            if not self._reading or self._changing.locked() or await self._writer_answers(WRITER_SECONDS):
                return
        if not self._changing.locked():
            raise WriterSilent(f"{self.name} answers, but its process that writes has not for {2 * WRITER_SECONDS:g} s")

    async def _writer_answers(self, seconds: float) -> bool:
        """Asked while turns are under way; of an engine that writes in the process that answers it is known already."""
        return True

    async def restart(self) -> None:
        """A process of ours is started anew; somebody else's server is waited for. Its turns end in EngineLost."""
        await self._lose(f"{self.name} is being restarted")
        self._label = None  # it may have any weights now
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
    async def _inspect(self) -> None:
        """Find out what it serves, and set `context_length`."""

    @property
    def _attached(self) -> bool:
        """Whether others started it: then its address may come to lead to another one."""
        return self._process is None

    def _named(self, version: int) -> str:
        """Weights as a server of others is told their name."""
        return f"version {version} of run {self._run}"

    @abstractmethod
    async def _tells(self) -> str | None:
        """By which label the server knows its weights now."""

    async def _check_label(self) -> None:
        expected = self._label
        if expected is None or not self._attached:
            return
        label = await self._tells()
        if label != expected and expected == self._label:
            raise self._other(label)

    def _other(self, label: str | None) -> "OtherWeights":
        return OtherWeights(
            f"{self.name} has other weights than it was given ({self._label}): "
            f"{label or 'those it started with'}: another server runs there, or another program gives it weights"
        )

    async def _vouch(self) -> None:
        """One question answers for all turns that ended before it was asked."""
        if self._label is None or not self._attached:
            return
        before = self._questions
        async with self._asking:
            if self._questions == before:
                self._questions, self._answer = before + 1, None
                try:
                    await self._check_label()
                except EngineError as error:
                    self._answer = error
            if self._answer is not None:
                raise type(self._answer)(str(self._answer)) from self._answer

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
