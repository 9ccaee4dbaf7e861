"""From a named policy to its endpoint: the model is read, its sampler opened, and the app served until interrupted."""

from collections.abc import Callable

from turnwise import extensions
from turnwise.engines.rendering import make_renderer
from turnwise.errors import ConfigError
from turnwise.ext.serving.app import make_app
from turnwise.ext.serving.policy import ServedPolicy
from turnwise.rollout.placement import placement_of
from turnwise.system.serving import serve_app
from turnwise.training.runs.policies import NamedPolicy


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
