"""Sessions on another machine, over HTTP: a server of ours, or any that has SandboxFusion's /run_code."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from turnwise.errors import ConfigError
from turnwise.ext.sandbox.http_schemas import (
    CallRequest,
    CommandStatus,
    OpenAnswer,
    OpenRequest,
    ReportAnswer,
    ResultAnswer,
    RunCodeAnswer,
    RunCodeRequest,
    RunStatus,
)
from turnwise.ext.sandbox.inside.capture import cut
from turnwise.ext.sandbox.level import SandboxLevel
from turnwise.ext.sandbox.limits import Limits
from turnwise.ext.sandbox.replies import caps_of
from turnwise.ext.sandbox.results import ExecutionStatus, InputImage, Result, clean, encodable
from turnwise.ext.sandbox.session import MAX_CODE, MAX_IMAGES_IN, check_image
from turnwise.ext.sandbox.zygote_process import SandboxLost, SandboxUnavailable
from turnwise.system import time_budget
from turnwise.system.retrying import AttemptFailed, RetryPolicy, retry_after, retrying

_CAPS = caps_of(Limits(output=100_000))
MAX_ANSWER = _CAPS.header + _CAPS.frame * 4 // 3
"""What a server of ours may give back by one call, its pixels in base64."""
SMALL_ANSWER = 64 * 1024
"""Bytes that are read at once; a longer answer would keep the event loop, and is read in a thread."""
CONNECT_SECONDS = 10.0
SHORT_SECONDS = 30.0
"""For answers that run no code."""
KEEPALIVE_SECONDS = 20.0
FIRST_WAIT, LONGEST_WAIT = 0.1, 10.0
_PLAIN = (404, 405)
_FORBIDDEN = (401, 403)
_LATER = (429, 503)

Answer = TypeVar("Answer", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class RemoteReport:
    """What the server says it proved."""

    level: SandboxLevel
    words: str

    def text(self) -> str:
        """What the server says of its sandbox, for people."""
        return self.words


class _NotThere(SandboxLost):
    """The server has no such path, or no such session any more."""


class RemotePool:
    """Sessions of a server, behind the interface of SandboxPool. Use it as an async context manager.

    `seconds` is the limit of a call that names none, `grace_seconds` what is waited for its answer beyond that,
    `retries` how often a call that surely did not run is tried again.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        seconds: float = 10.0,
        retries: int = 5,
        *,
        min_level: SandboxLevel = SandboxLevel.L2,
        grace_seconds: float = 120.0,
        concurrency: int = 128,
        output: int = Limits().output,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"a sandbox server's url begins with http:// or https://, not {url!r}")
        if httpx.URL(url).userinfo:
            raise ConfigError("a sandbox server's url holds no password, because it is shown; give the token by itself")
        if min_level is SandboxLevel.auto:
            raise ConfigError("sandbox.min_level must be a level, not auto: a server's proof is compared with it")
        self.url = url.rstrip("/").removesuffix("/run_code")
        self.report: RemoteReport | None = None
        """What the server proved; read when the pool is entered."""
        self.seconds = seconds
        self.output = output
        self.plain = False
        """Whether the server has only /run_code."""
        self._min_level = min_level
        self._retries = retries
        self._grace_seconds = grace_seconds
        self._slots = asyncio.Semaphore(concurrency)
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        self._client = httpx.AsyncClient(
            headers=headers if token is None else {**headers, "Authorization": f"Bearer {token}"},
            verify=self.url.startswith("https:"),  # reading the certificates takes a tenth of a second
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=KEEPALIVE_SECONDS),  # _slots bounds them
            trust_env=False,  # a proxy that the environment names must not see the code
        )

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def session(self, *, seed: int = 0, images: Sequence[InputImage] = (), stateless: bool = False) -> "RemoteSession":
        """A new session; the server makes it at the first call. A plain SandboxFusion server knows no seeds."""
        if self.plain and (images or not stateless):
            what = "images" if images else "sessions that remember"
            raise SandboxUnavailable(
                f"{self.url} has only /run_code, without {what}: use a turnwise sandbox server, or stateless sessions"
            )
        for image in images:
            check_image(image)
        if len(images) > MAX_IMAGES_IN:
            raise ValueError(f"{len(images)} images; a session takes at most {MAX_IMAGES_IN}")
        return RemoteSession(self, OpenRequest.of(seed, images, stateless))

    async def close(self) -> None:
        """Hang up; sessions left open expire on the server."""
        await self._client.aclose()

    async def _start(self) -> None:
        """Ask what was proven, and refuse less than is wanted."""
        try:
            answer = await self.ask("GET", "/report", None, ReportAnswer, SHORT_SECONDS)
        except _NotThere:
            self.plain = True
            words = f"{self.url} is a plain SandboxFusion server: no level is proven"
            self.report = RemoteReport(SandboxLevel.L0, words)
        except SandboxLost as error:
            raise SandboxUnavailable(f"no sandbox server at {self.url}: {error}") from error
        else:
            self.report = RemoteReport(answer.proven(), clean(answer.text))
        if not self.report.level.reaches(self._min_level):
            raise SandboxUnavailable(
                f"sandbox.min_level={self._min_level.name}, but {self.url} has proven only {self.report.level.name}, "
                f"so no code was sent; start the server where more can be proven, or lower sandbox.min_level\n"
                f"{self.report.text()}"
            )

    async def ask(self, method: str, path: str, body: BaseModel | None, kind: type[Answer], seconds: float) -> Answer:
        """One answer, checked. Tried again only while the request surely did nothing; SandboxLost otherwise."""
        encoded = b"" if body is None else body.model_dump_json().encode()

        async def attempt() -> tuple[int, bytes]:
            async with time_budget.slot(self._slots):  # waiting for it is not the server's time
                return await self._attempt(method, path, encoded, seconds)

        try:
            status, content = await retrying(attempt, RetryPolicy(self._retries, FIRST_WAIT, LONGEST_WAIT))
        except AttemptFailed as error:
            raise SandboxLost(f"the sandbox server {error} ({error.attempts} attempts)") from error
        if len(content) <= SMALL_ANSWER:
            return self._read(status, content, kind)
        return await asyncio.to_thread(self._read, status, content, kind)

    async def _attempt(self, method: str, path: str, body: bytes, seconds: float) -> tuple[int, bytes]:
        """(HTTP status, content); AttemptFailed while the request surely did nothing."""
        headers = {"Content-Type": "application/json"} if body else {}
        try:
            async with asyncio.timeout(seconds):
                async with self._client.stream(method, self.url + path, content=body, headers=headers) as response:
                    if response.headers.get("content-encoding", "identity") != "identity":
                        raise SandboxLost("the sandbox server sent a compressed answer, which it was not asked for")
                    content = bytearray()
                    async for piece in response.aiter_raw():
                        content += piece
                        if len(content) > MAX_ANSWER:
                            raise SandboxLost(f"the sandbox server sent more than {MAX_ANSWER} bytes")
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise AttemptFailed("does not accept connections") from error
        except TimeoutError as error:
            raise SandboxLost(f"the sandbox server did not answer within {seconds:g} s") from error
        except httpx.HTTPError as error:
            raise SandboxLost(f"the connection to the sandbox server broke: {type(error).__name__}") from error
        if response.status_code in _LATER:
            delay = retry_after(response.headers.get("Retry-After"))
            wait = None if delay is None else min(delay, LONGEST_WAIT)
            raise AttemptFailed(f"answers {response.status_code}: {_short(bytes(content))}", wait)
        return response.status_code, bytes(content)

    def _read(self, status: int, content: bytes, kind: type[Answer]) -> Answer:
        if status in _FORBIDDEN:
            raise SandboxUnavailable(f"the sandbox server {self.url}: the token is wrong or missing (HTTP {status})")
        if status == 413:
            raise SandboxUnavailable(f"the sandbox server {self.url} takes no request of this size: {_short(content)}")
        if status in _PLAIN:
            raise _NotThere(f"the sandbox server does not know it: {_short(content)}")
        if not 200 <= status < 300:
            raise SandboxLost(f"the sandbox server answered {status}: {_short(content)}")
        try:
            return kind.model_validate_json(content or b"{}")
        except ValidationError as error:
            fault = error.errors(include_input=False, include_url=False)[0]
            where = ".".join(map(str, fault["loc"]))[:80]
            raise SandboxLost(f"the sandbox server sent a malformed answer: {where} {fault['msg'][:200]}") from error

    def waiting(self, seconds: float) -> float:
        """For an answer to a call with this limit."""
        return seconds + self._grace_seconds


class _Nothing(BaseModel):
    """The body of an answer without content."""


class RemoteSession:
    """A session on a server; one call at a time, as LocalSession.

    A call whose outcome is not known ends in SandboxLost. If earlier calls left variables behind, every later call does
    too, because it could only run without them.
    """

    def __init__(self, pool: RemotePool, opening: OpenRequest) -> None:
        self._pool = pool
        self._opening = opening
        self._number: str | None = None
        self._left: list[str] = []
        """Sessions we do not believe in any more, to be closed."""
        self._remembers = False
        self._lost: str | None = None
        self._closed = False
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> "RemoteSession":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def run(self, code: str, seconds: float | None = None) -> Result:
        if len(code) > MAX_CODE:
            return Result(ExecutionStatus.ERROR, notices=(f"not run: more than {MAX_CODE} characters of code",))
        try:
            encodable(code)
        except ValueError:
            return Result(ExecutionStatus.ERROR, notices=("not run: the code holds characters that cannot be encoded",))
        limit = seconds or self._pool.seconds
        async with self._turn:
            if self._closed:
                raise SandboxLost("the session was closed")
            if self._lost is not None:
                raise SandboxLost(f"the variables of this session were lost: {self._lost}")
            if self._pool.plain:
                return await self._script(code, limit)
            try:
                result = await self._call(code, limit)
            except BaseException as error:
                self._forget(str(error) or type(error).__name__)
                raise
            self._remembers = not self._opening.stateless and (result.kept or self._remembers)
            return result

    async def close(self) -> None:
        self._closed = True
        self._forget("closed")
        while self._left:
            number = self._left.pop()
            with contextlib.suppress(SandboxLost, SandboxUnavailable):  # it expires by itself
                await self._pool.ask("DELETE", f"/sessions/{number}", None, _Nothing, SHORT_SECONDS)

    def _forget(self, reason: str) -> None:
        if self._number is not None:
            self._left.append(self._number)
            self._number = None
        if self._remembers:
            self._lost = reason

    async def _call(self, code: str, seconds: float) -> Result:
        pool = self._pool
        if self._number is None:
            opened = await pool.ask("POST", "/sessions", self._opening, OpenAnswer, SHORT_SECONDS)
            self._number = opened.id
        request = CallRequest(code=code, seconds=seconds)
        path = f"/sessions/{self._number}/run"
        return (await pool.ask("POST", path, request, ResultAnswer, pool.waiting(seconds))).root

    async def _script(self, code: str, seconds: float) -> Result:
        """Through /run_code, which knows neither a last value nor images."""
        pool = self._pool
        request = RunCodeRequest(code=code, language="python", run_timeout=seconds)
        start = time.monotonic()
        answer = await pool.ask("POST", "/run_code", request, RunCodeAnswer, pool.waiting(seconds))
        ran = answer.run_result
        if answer.status is RunStatus.SandboxError or ran is None or ran.status is CommandStatus.Error:
            raise SandboxLost(f"the sandbox server could not run the code: {_short(answer.message.encode())}")
        code_of_exit = ran.return_code
        notices: tuple[str, ...] = ()
        if ran.status is CommandStatus.TimeLimitExceeded:
            status, notices = ExecutionStatus.TIMEOUT, (f"stopped after {seconds:g} s",)
        elif code_of_exit is None:
            raise SandboxLost("the sandbox server does not say how the code ended")
        elif code_of_exit < 0:
            status, notices = ExecutionStatus.KILLED, (f"the process was killed by signal {-code_of_exit}",)
        else:
            status = ExecutionStatus.OK if code_of_exit == 0 else ExecutionStatus.ERROR
        return Result(
            status=status,
            stdout=cut(clean(ran.stdout or ""), pool.output),
            stderr=cut(clean(ran.stderr or ""), pool.output),
            notices=notices,
            seconds=time.monotonic() - start if ran.execution_time is None else ran.execution_time,
            kept=status in (ExecutionStatus.OK, ExecutionStatus.ERROR),
        )


def _short(content: bytes) -> str:
    """The beginning of a server's words, on one line."""
    return " ".join(clean(content[:400].decode("utf-8", "replace")).split())[:300]
