"""Opens SGLang servers: started here, in an environment of their own, or attached to."""

from pathlib import Path

from turnwise.config import Config
from turnwise.config.sections import section
from turnwise.engines.devices import choose, visible_gpus
from turnwise.engines.model.sources import ModelSource
from turnwise.engines.opener import Say
from turnwise.ext.servers.config import ServersConfig
from turnwise.ext.servers.opener import ReplicaSetup, ServersOpener
from turnwise.ext.servers.process import ServerProcess
from turnwise.ext.servers.streamed_sampler import StreamedSampler
from turnwise.ext.sglang.server import SCALING, SglangServer, sglang_command


class SglangServers(ServersOpener):
    """Of `engine=sglang_server`. They are shown no images."""

    package, server = "sglang", SglangServer
    copies_inside = "--enable-dp-attention"
    filters_logprobs = False

    def process(
        self, config: Config, setup: ReplicaSetup, name: str, logs: Path, devices: str | None, say: Say
    ) -> ServerProcess:
        """A server that gives log-probs of what it drew from."""
        environment = dict(SCALING) if devices is None else {"CUDA_VISIBLE_DEVICES": devices, **SCALING}
        command = sglang_command(self.python(config), sglang_options(config, setup.source))
        log = logs / f"{name.replace(' ', '_')}.log"
        return ServerProcess(name, command, log=log, environment=environment, say=say)

    def check_started(self, replica: StreamedSampler, config: Config) -> None:
        """Log-probs that leave the temperature out cannot be learned from."""
        assert isinstance(replica, SglangServer)
        replica.refuse_unscaled(config.sampling.temperature)


def sglang_options(config: Config, source: ModelSource) -> list[str]:
    """SGLang's command line; what the user adds comes last and wins."""
    engine, gpu = config.engine, bool(visible_gpus().gpus)
    options = [
        "--model-path", str(source.folder.resolve()), "--dtype", choose(config).precision.value,
        "--random-seed", str(config.seed), "--sampling-defaults", "openai",
    ]  # fmt: skip
    options += ["--mem-fraction-static", str(engine.memory_fraction)] if gpu else ["--device", "cpu"]
    options += ["--trust-remote-code"] if config.model.trust_remote_code else []
    options += ["--max-running-requests", str(engine.max_batch)] if engine.max_batch else []
    options += ["--enable-memory-saver"] if engine.sleep and gpu else []
    if rank := config.learner.lora_rank:
        options += ["--enable-lora", "--max-lora-rank", str(rank), "--lora-target-modules", "all"]
    return [*options, *section(config, ServersConfig).options]
