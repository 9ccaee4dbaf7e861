"""The `python` tool: runs what the model wrote in a sandbox session that lasts as long as the episode."""

import asyncio
import base64
import binascii
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote_to_bytes

from turnwise.code_blocks import program
from turnwise.config import SandboxConfig
from turnwise.errors import EpisodeError, ToolError
from turnwise.rollout.tools.tool import ToolContext, ToolSession
from turnwise.sandbox.opening import Pool, open_pool
from turnwise.sandbox.process import SandboxLost
from turnwise.sandbox.results import InputImage, Picture, Result, Status
from turnwise.sandbox.session import Session
from turnwise.storage.images import session_name
from turnwise.types import Image, JsonSchema, ToolResult

SPARE_SECONDS = 20.0
"""Between the code's own limit and the tool's: for getting a session and for killing it."""


def schema_of(name: str) -> JsonSchema:
    """What the model is told."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": "Run Python code and return what it prints.",
            "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
        },
    }


@dataclass(slots=True)
class PythonTool:
    """One pool of sandboxes for all episodes of a run. It is open from the first `start` to the last `stop`."""

    name: str = "python"
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    concurrency: int = 2 * (os.cpu_count() or 1)
    reads_kwargs: ClassVar[bool] = False
    _pool: Pool | None = None
    _users: int = 0

    @property
    def schema(self) -> JsonSchema:
        return schema_of(self.name)

    @property
    def timeout(self) -> float:
        return self.sandbox.seconds + SPARE_SECONDS

    async def start(self) -> str:
        """Open the sandbox; what was proven of it is returned for the run's log."""
        self._users += 1
        if self._pool is None:
            self._pool = await open_pool(self.sandbox).__aenter__()
        report = self._pool.report
        if report is None:
            return "a sandbox"
        return "\n".join(line for line in report.text().splitlines() if not line.startswith(" "))  # without the proofs

    async def stop(self) -> None:
        self._users -= 1
        if self._users == 0 and self._pool is not None:
            pool, self._pool = self._pool, None
            await pool.close()

    async def open(self, context: ToolContext) -> ToolSession:
        if self._pool is None:
            raise EpisodeError("the python tool was not started")
        images = [await asyncio.to_thread(read_image, image, n) for n, image in enumerate(context.sample.images)]
        session = self._pool.session(seed=context.seed, images=images, stateless=self.sandbox.stateless)
        return _PythonSession(session, images)


@dataclass(slots=True)
class _PythonSession:
    session: Session
    images: list[InputImage]
    """What was given to it."""

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        try:
            result = await self.session.run(program(arguments["code"]))
        except SandboxLost as error:
            raise EpisodeError(f"the sandbox failed: {error}") from error
        if result.status is not Status.OK:
            raise ToolError(_words(result))
        facts = await asyncio.to_thread(_facts, result, self.images) if result.images else _facts(result, [])
        return ToolResult(_words(result) or "(no output)", info=facts)

    async def close(self) -> None:
        await self.session.close()


python = PythonTool()


def read_image(image: Image, number: int) -> InputImage:
    """A sample's image as its file's content."""
    if image.source.startswith("data:"):
        head, _, data = image.source.partition(",")
        try:
            content = base64.b64decode(data) if head.endswith(";base64") else unquote_to_bytes(data)
        except binascii.Error as error:
            raise EpisodeError(f"image {number} of the sample is not a readable data URL: {error}") from error
        return InputImage(session_name(image, number), content)
    path = Path(image.source)
    try:
        return InputImage(session_name(image, number), path.read_bytes())
    except OSError as error:
        raise EpisodeError(f"image {number} of the sample cannot be read: {error}") from error


def _words(result: Result) -> str:
    """What the model reads."""
    shown = [f"[image {number}: {_describe(one)}]" for number, one in enumerate(result.images, 1)]
    return "\n".join(part for part in (result.text(), *shown) if part)


def _describe(picture: Picture) -> str:
    return f"{picture.name}, {picture.size[0]}x{picture.size[1]}"


def _facts(result: Result, given: list[InputImage]) -> dict[str, Any]:
    """What scoring and the board may want to know; the recorder moves pictures into files of the run."""
    facts: dict[str, Any] = {"seconds": result.seconds, "peak_memory": result.peak_memory}
    if result.images:
        from turnwise.sandbox.provenance import check_claims

        facts["images"] = [_image_facts(picture) for picture in check_claims(result, given).images]
    return facts


def _image_facts(picture: Picture) -> dict[str, Any]:
    """Rules and judges read `source`, `box` and `steps`; a claim that the pixels do not bear out is set aside."""
    provenance = picture.provenance
    facts: dict[str, Any] = {
        "name": picture.name,
        "data": "data:image/png;base64," + base64.b64encode(picture.png()).decode(),
        "size": list(picture.size),
    }
    claim = {
        "source": provenance.source,
        "box": None if provenance.box is None else list(provenance.box),
        "steps": [{"name": step.name, "arguments": step.arguments} for step in provenance.steps],
    }
    if provenance.verified or provenance.source is None:
        return facts | claim
    return facts | {"source": None, "box": None, "steps": [], "unverified": claim}
