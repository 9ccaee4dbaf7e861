"""What of the section `servers` is refused: what has no effect, what is ours to set, and secrets."""

from turnwise.config import EngineConfig
from turnwise.errors import ConfigError
from turnwise.ext.servers.config import ServersConfig
from turnwise.ext.servers.gpus import named_options

API_KEY_ENV = "TURNWISE_ENGINE_KEY"
"""The environment variable that holds the key of servers that want one."""
_OURS = (
    "--host", "--port", "--model", "--model-path", "--served-model-name", "--logprobs-mode", "--worker-extension-cls",
)  # fmt: skip
_SECRETS = ("--api-key", "--admin-api-key", "--hf-token")


def refuse_idle(engine: EngineConfig, servers: ServersConfig) -> None:
    """What says how servers are started has no effect on those that run, nor a name of theirs on those we start."""
    started = {"servers.python": servers.python, "servers.options": servers.options}
    for name, value in started.items() if servers.addresses else ():
        if value:
            raise ConfigError(
                f"{name}={value} is for servers that Turnwise starts, but servers.addresses names running ones"
            )
    if engine.model is not None and not servers.addresses:
        raise ConfigError(
            f"engine.model={engine.model} chooses a model of running servers, but servers.addresses is empty"
        )


def refuse_options(servers: ServersConfig) -> None:
    """What decides who is asked for what, and secrets: a command line is kept in the run's folder and in the server's
    log, and every process of the machine sees it."""
    for option, _ in named_options(servers.options):
        if option.replace("_", "-") in _OURS:
            raise ConfigError(
                f"servers.options: {option} is set by Turnwise; with another value tokens or log-probs would be wrong"
            )
        if option.replace("_", "-") in _SECRETS:
            raise ConfigError(
                f"servers.options: {option} would be kept in the run's folder and be seen by every process of "
                f"this machine; put a key of the servers into {API_KEY_ENV}, one of the Hugging Face hub into HF_TOKEN"
            )
