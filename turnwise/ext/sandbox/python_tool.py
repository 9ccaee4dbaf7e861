"""The tool `python` (`code_interpreter` in verl): runs what the model wrote in a session as long as the episode."""

import asyncio
import base64
import os
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from turnwise.chat.images.pixels import upright
from turnwise.config import Config
from turnwise.config.sections import section
from turnwise.errors import DataError, EpisodeError, ToolError
from turnwise.ext.sandbox.config import SandboxConfig
from turnwise.ext.sandbox.opening import SessionPool, open_pool
from turnwise.ext.sandbox.results import ExecutionStatus, InputImage, Picture, Result
from turnwise.ext.sandbox.session import Session
from turnwise.ext.sandbox.zygote_process import SandboxLost
from turnwise.rollout.sample_images import given_images
from turnwise.rollout.toolbox.images import MOST_IMAGES
from turnwise.rollout.tools.tool import ToolContext, ToolSession
from turnwise.system.code_blocks import program
from turnwise.system.image_sources import read_image
from turnwise.types import Image, JsonSchema, ToolResult

SPARE_SECONDS = 20.0
"""Between the code's own limit and the tool's: for getting a session and for killing it."""
MOST_ASPECT = 100
"""An image so much longer than wide is not shown: no model's processor takes it."""


def schema_of(name: str) -> JsonSchema:
    """The schema of the Python tool under this name, as the model is told."""
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
    reads_kwargs: ClassVar[tuple[str, ...]] = ("image",)
    _pool: SessionPool | None = None
    _users: int = 0

    @property
    def schema(self) -> JsonSchema:
        return schema_of(self.name)

    @property
    def timeout(self) -> float:
        return self.sandbox.seconds + SPARE_SECONDS

    def for_run(self, config: Config) -> "PythonTool":
        """With the run's sandbox: it has a pool to start and to stop."""
        return PythonTool(self.name, section(config, SandboxConfig))

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
        images = await asyncio.to_thread(input_images, context)
        try:
            session = self._pool.session(seed=context.seed, images=images, stateless=self.sandbox.stateless)
        except ValueError as error:  # a name or a number of images that no session takes: the row's fault
            raise EpisodeError(f"the sample's images cannot be given to the sandbox: {error}") from error
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
        if result.status is not ExecutionStatus.OK:
            raise ToolError(_words(result, result.images))
        info: dict[str, Any] = {"seconds": result.seconds, "peak_memory": result.peak_memory}
        if not result.images:
            return ToolResult(_words(result, ()) or "(no output)", info=info)
        pictures, left_out = _presentable(result.images)
        facts = await asyncio.to_thread(_facts, result, self.images, pictures)
        words = "\n".join([_words(result, pictures), *left_out]).strip("\n")
        images = tuple(Image(entry["data"]) for entry in facts)
        return ToolResult(words, images, info=info | ({"images": facts} if facts else {}))

    async def close(self) -> None:
        await self.session.close()


python, code_interpreter = PythonTool(), PythonTool("code_interpreter")


def input_images(context: ToolContext) -> list[InputImage]:
    """What the row gives the session, as the model sees it; EpisodeError for what cannot be had, a row's fault."""
    inputs = []
    for number, (name, image) in enumerate(given_images(context).items()):
        try:
            inputs.append(InputImage(name, upright(read_image(image.source))))
        except DataError as error:
            raise EpisodeError(f"image {number} of the sample cannot be read: {error}") from error
    return inputs


def _presentable(pictures: tuple[Picture, ...]) -> tuple[list[Picture], list[str]]:
    """(those that a model can be shown, what is said of the others)."""
    presentable: list[Picture] = []
    notes = []
    for picture in pictures:
        if max(picture.size) > MOST_ASPECT * min(picture.size):
            notes.append(f"[{_describe(picture)} is left out: more than {MOST_ASPECT} times longer than wide]")
        elif len(presentable) >= MOST_IMAGES:
            notes.append(f"[{_describe(picture)} is left out: a call gives back at most {MOST_IMAGES} images]")
        else:
            presentable.append(picture)
    return presentable, notes


def _words(result: Result, pictures: tuple[Picture, ...] | list[Picture]) -> str:
    """The text of a tool's result that the model reads, with a line for each image."""
    labels = [f"[image {number}: {_describe(picture)}]" for number, picture in enumerate(pictures, 1)]
    return "\n".join(part for part in (result.text(), *labels) if part)


def _describe(picture: Picture) -> str:
    return f"{picture.name}, {picture.size[0]}x{picture.size[1]}"


def _facts(result: Result, inputs: list[InputImage], pictures: list[Picture]) -> list[dict[str, Any]]:
    """What scoring and the board may want to know; the recorder moves pictures into files of the run."""
    from turnwise.ext.sandbox.provenance import check_claims

    checked = check_claims(replace(result, images=tuple(pictures)), inputs)
    return [_image_facts(picture) for picture in checked.images]


def _image_facts(picture: Picture) -> dict[str, Any]:
    """Rules and judges read `source`, `box` and `steps`; a claim that the pixels do not bear out is set aside."""
    provenance = picture.provenance
    facts: dict[str, Any] = {
        "name": picture.name,
        "data": "data:image/png;base64," + base64.b64encode(picture.png()).decode(),
        "size": list(picture.size),
        "provenance": provenance.origin.value,
        "source_size": None if provenance.source_size is None else list(provenance.source_size),
        "matrix": None if provenance.matrix is None else list(provenance.matrix),
    }
    claim = {
        "source": provenance.source,
        "box": None if provenance.box is None else list(provenance.box),
        "steps": [{"name": step.name, "arguments": step.arguments} for step in provenance.steps],
    }
    if provenance.verified or provenance.source is None:
        return facts | claim
    return facts | {"source": None, "box": None, "steps": [], "unverified": claim}
