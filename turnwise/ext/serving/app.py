"""The endpoint: OpenAI's chat completions and its list of models, behind the gate of all our servers; served."""

from collections.abc import Callable
from typing import Any

from pydantic import Field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from turnwise import extensions
from turnwise.engines.rendering import make_renderer
from turnwise.errors import ConfigError, EpisodeError, TurnwiseError, one_line
from turnwise.ext.sdk_agents import openai_chat
from turnwise.ext.sdk_agents.calls import SAYS_NOTHING, Call, Refused, validated
from turnwise.ext.sdk_agents.dialects import answering, read_request, respond
from turnwise.ext.serving.policy import ServedPolicy, no_model
from turnwise.rollout.placement import placement_of
from turnwise.system.serving import Gate, Intake, serve_app
from turnwise.training.runs.policies import NamedPolicy

INTAKE = Intake(body=16 * 1024 * 1024, calls=1024, values=400_000)
"""A call waits for its place in the sampler's batch and not at the door."""
MOST_STOPS = 16


class ServedRequest(openai_chat.ChatRequest):
    """A request whose every wish is done: a parameter that would change nothing here is refused by its name."""

    ignores = SAYS_NOTHING
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)


def read(body: dict[str, Any]) -> tuple[Call, ServedRequest]:
    """The call of a request, and the request for how it wants its reply."""
    request = validated(ServedRequest, body)
    if request.tool_choice not in ("auto", "none"):
        raise Refused("tool_choice: the policy chooses itself whether to call a tool: auto and none are supported")
    if not request.parallel_tool_calls:
        raise Refused("parallel_tool_calls: the policy decides itself how many calls it makes: leave it out")
    call = openai_chat.call_of(request)
    if len(call.stop) > MOST_STOPS:
        raise Refused(f"stop: at most {MOST_STOPS} strings")
    return call, request


class ServingGate(Gate):
    """The gate with refusals as OpenAI's clients read them."""

    def refuse(self, status: int, text: str, headers: dict[str, str] | None = None) -> Response:
        return JSONResponse(openai_chat.write_error(Refused(text, code="refused")), status, headers)


def make_app(policy: ServedPolicy, host: str, key: str | None) -> ASGIApp:
    """The endpoint of one policy at this host; with a key nobody is answered who does not bring it."""

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [openai_chat.model_entry(policy.name)]})

    async def model(request: Request) -> Response:
        if request.path_params["name"] != policy.name:
            raise no_model(request.path_params["name"], policy.name)
        return JSONResponse(openai_chat.model_entry(policy.name))

    async def chat(request: Request) -> Response:
        call, wishes = read(await read_request(request))
        try:
            return respond(openai_chat, await policy.reply(call, wishes.seed), wishes)
        except (TurnwiseError, EpisodeError) as error:
            raise Refused(f"the model cannot speak: {one_line(error)}", status=500, code="engine_failed") from error

    async def nothing(request: Request) -> Response:
        raise Refused(f"nothing is served at {request.url.path[:80]!r} here", status=404, code="not_found")

    routes = [
        Route("/health", health),
        Route("/v1/models", answering(models, openai_chat)),
        Route("/v1/models/{name:path}", answering(model, openai_chat)),
        Route("/v1/chat/completions", answering(chat, openai_chat), methods=["POST"]),
        Route("/{path:path}", answering(nothing, openai_chat), methods=["GET", "POST", "DELETE"]),
    ]
    return ServingGate(Starlette(routes=routes), host, key, INTAKE)


async def serve(named: NamedPolicy, host: str, port: int, key: str | None, say: Callable[[str], None]) -> None:
    """Answer until interrupted; `say` is told what was decided, and the address once it is listened on."""
    config = named.config
    if not extensions.engine(config.engine.name).renders:
        raise ConfigError(f"engine={config.engine.name} is an endpoint already: talk to {config.engine.base_url}")
    renderer = make_renderer(config)
    async with placement_of(config).open_sampler(renderer, say) as sampler:
        policy = ServedPolicy(named.name, config, renderer, sampler)
        who = "for this machine" if key is None else "for who brings the key"

        def ready(bound: int) -> None:
            say(f"serving {policy.name} at http://{f'[{host}]' if ':' in host else host}:{bound}/v1 {who}")

        await serve_app(make_app(policy, host, key), host, port, ready=ready)
