"""Opens engines of others that read server options: what is refused before, who is started or attached to, and what the
plan says. Each engine's own file has its command line."""

import asyncio
import os
import shutil
import sys
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, TypeVar

import httpx

from turnwise.chat.images.processor import ImageProcessor
from turnwise.chat.renderer import Renderer
from turnwise.config import ONE_MACHINE, Config
from turnwise.config.sections import section
from turnwise.engines.devices import Gpu, VisibleGpus, choose, rank_devices, reservations, visible_gpus
from turnwise.engines.model.huggingface_folder import read_raw_config
from turnwise.engines.model.sources import ModelSource
from turnwise.engines.opener import Opener, OpenSampler, Say, model_source, small_picture, vocabulary_of
from turnwise.engines.samplers.cpu.threads import usable_cores
from turnwise.engines.samplers.in_flight import DecodeText
from turnwise.engines.samplers.sampler import Capabilities, Logprobs
from turnwise.engines.weight_updates import Adapter, Update, WeightsFolder
from turnwise.errors import ConfigError, EngineError
from turnwise.ext.servers.client import ServerClient, server_address
from turnwise.ext.servers.config import CacheAtUpdate, ServersConfig
from turnwise.ext.servers.gpus import (
    copies_of_a_server,
    devices_of,
    gpus_of_a_server,
    remember_sequences,
    sequences_of_a_copy,
    sequences_of_attached,
)
from turnwise.ext.servers.inference_server import InferenceServer
from turnwise.ext.servers.option_checks import API_KEY_ENV, refuse_idle, refuse_options
from turnwise.ext.servers.process import ServerProcess
from turnwise.ext.servers.replicas import Replica, Replicas
from turnwise.ext.servers.same_model import Sizes, sizes_of
from turnwise.ext.servers.streamed_sampler import StreamedSampler
from turnwise.storage.run_dir import SERVER_LOGS, run_folder
from turnwise.system.addresses import is_loopback
from turnwise.system.concurrency import gather_all
from turnwise.system.folders import OwnFolder
from turnwise.system.resources import raise_descriptors

CHECK_SECONDS = 20.0
T = TypeVar("T", bound=StreamedSampler)


@dataclass(frozen=True, slots=True)
class ReplicaSetup:
    """What every replica of a sampler is made with."""

    source: ModelSource
    capabilities: Capabilities
    vocabulary: int
    decode: DecodeText
    sees: bool = False
    """Whether it will be shown images."""


class GuestOpener(Opener):
    """What all engines that read `servers.options` have in common; a subclass makes the replicas."""

    package: ClassVar[str]
    """Which the interpreter must have."""
    missing: ClassVar[str] = "name one that has it in servers.python"
    """What helps where it has not."""
    takes_first_gpus: ClassVar[bool] = False
    """Whether it writes on the GPUs that a learner's processes take first, and not on the last ones."""
    copies_variable: ClassVar[str | None] = None
    """The environment variable by which it is told of data parallel copies where no option says more than 1."""
    copies_inside: ClassVar[str | None] = None
    """The option with which data parallel copies share the GPUs of the tensor parallel ones."""
    filters_logprobs: ClassVar[bool] = True
    """Whether its log-probs are of the distribution after top-k and top-p, and not of the scaled one before."""

    @abstractmethod
    def replicas(self, config: Config, setup: ReplicaSetup, say: Say) -> Sequence[StreamedSampler]:
        """The replicas, none of them started yet."""

    def _told(self, config: Config, replicas: Sequence[T]) -> Sequence[T]:
        """The replicas, which know what updates will find under way, and what is to become of it."""
        for replica in replicas:
            replica.midway = config.training.max_lag > 0
            replica.keeps = section(config, ServersConfig).cache_at_update is CacheAtUpdate.keep
        return replicas

    def _count(self, config: Config, replicas: Sequence[StreamedSampler], say: Say) -> None:
        """Of servers that others started: as many episodes are played at once as they have room for."""
        addresses = section(config, ServersConfig).addresses
        for address, replica in zip(addresses, replicas, strict=False):
            if replica.sequences:
                remember_sequences(address, replica.sequences)
        if (told := sequences_of_attached(addresses)) is not None:
            say(f"the servers decode {told:,} sequences together: {choose(config).episodes:,} episodes at once")

    def check_started(self, replica: StreamedSampler, config: Config) -> None:
        """EngineError for what only shows once a replica runs."""

    async def image_processor(self, config: Config, renderer: Renderer, say: Say) -> ImageProcessor | None:
        """What prepares images for it; None where it is shown none."""
        return None

    async def open(self, config: Config, renderer: Renderer, say: Say) -> OpenSampler:
        """The sampler over all replicas, which are up."""
        self.check_settings(config)
        raise_descriptors()  # every turn under way is a connection
        source, images = model_source(config), await self.image_processor(config, renderer, say)
        vocabulary, decode = vocabulary_of(source, renderer.tokenizer.vocab_size), renderer.tokenizer.decode
        setup = ReplicaSetup(source, self.capabilities(config), vocabulary, decode, sees=images is not None)
        replicas = self._told(config, self.replicas(config, setup, say))
        try:
            await gather_all(replica.start() for replica in replicas)
            for replica in replicas:
                self.check_started(replica, config)
            self._count(config, replicas, say)
            if images is not None:
                if any(replica.keeps for replica in replicas):
                    raise ConfigError("servers.cache_at_update=keep: turns with images are cut off at an update")
                await _try_images(replicas, images, say)
            sampler = Replicas(list[Replica](replicas), say)
        except BaseException:
            await asyncio.shield(asyncio.gather(*(replica.close() for replica in replicas), return_exceptions=True))
            raise
        say(f"{config.engine.name}: {sampler.capabilities}; batch invariance of its tokens is not proven")
        return OpenSampler(sampler, usable_cores())

    async def check(self, config: Config) -> str | None:
        """Servers that answer, or the package in its interpreter; on a cluster the samplers look for themselves."""
        if config.cluster != ONE_MACHINE:
            return None
        self.check_settings(config)
        python = self.python(config)
        seek = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({self.package!r}) is None)"
        process = await asyncio.create_subprocess_exec(python, "-c", seek, stdin=asyncio.subprocess.DEVNULL)
        if await process.wait():
            raise ConfigError(
                f"engine={config.engine.name}: {python} has no package {self.package}; {self.missing} "
                "(docs/ext/servers.md)"
            )
        return f"{python} has {self.package}"

    def check_settings(self, config: Config) -> None:
        """Refuse what cannot be opened, before anything is."""
        if model_source(config).gguf_file is not None:
            raise ConfigError(
                f"engine={config.engine.name} reads a Hugging Face folder, and model.path={config.model.path} is none"
            )
        refuse_options(section(config, ServersConfig))
        self.devices(config)

    def describe(self, config: Config) -> str:
        """Who writes, how many episodes at once, and with which model."""
        at_once = f"{choose(config).episodes:,} episodes at once"
        keeps = section(config, ServersConfig).cache_at_update is CacheAtUpdate.keep
        kept = ", turns across an update keep their cache: log-probs behind it are of both weights" if keeps else ""
        return f"{self.describe_servers(config)}, {at_once} (rollout.concurrency), model {config.model.path}{kept}"

    def describe_servers(self, config: Config) -> str:
        """Where its replicas are: `vllm, in this process`."""
        return f"{config.engine.name}, in this process"

    def capabilities(self, config: Config) -> Capabilities:
        """What a replica will be able to do."""
        filtered = config.sampling.top_p < 1.0 or config.sampling.top_k > 0
        return Capabilities(
            Logprobs.FILTERED if filtered and self.filters_logprobs else Logprobs.SCALED,
            self.updates(config),
            # Of servers that run already: whether they can is theirs to say, and they are asked.
            sleeps=bool(config.engine.sleep) and (self.keeps_weights(config) or bool(visible_gpus().gpus)),
        )

    def updates(self, config: Config) -> frozenset[type[Update]]:
        """The kinds of weight updates that its servers take."""
        return frozenset({WeightsFolder, Adapter} if config.learner.lora_rank else {WeightsFolder})

    def python(self, config: Config) -> str:
        """The interpreter that has the package."""
        return sys.executable

    def count(self, config: Config) -> int:
        """How many replicas are started, or attached to."""
        return 1

    def gpus_each(self, config: Config) -> int:
        """How many GPUs a replica takes."""
        return gpus_of_a_server(section(config, ServersConfig).options, self.copies_variable, self.copies_inside)

    def devices(self, config: Config) -> list[str | None]:
        """CUDA_VISIBLE_DEVICES of each replica that is started here."""
        return devices_of(self.count(config), self.gpus_each(config))

    def sequences(self, config: Config, gpus: tuple[Gpu, ...]) -> int | None:
        """All that its replicas decode together: as they are told, or as those that others started have said."""
        samplers = 1 if (there := reservations(config)) is None else there.samplers
        servers = section(config, ServersConfig)
        if (told := sequences_of_attached(servers.addresses)) is not None:
            return told * samplers
        copies = copies_of_a_server(servers.options, self.copies_variable, self.copies_inside)
        return sequences_of_a_copy(config.engine, servers, gpus) * copies * self.count(config) * samplers

    def reserved_problem(self, config: Config, gpus: float, *, here: bool) -> str | None:
        """Servers in a sampler of a cluster must find as many GPUs as it reserves, no fewer and no more."""
        servers = section(config, ServersConfig)
        if servers.addresses:
            return None
        wanted = servers.replicas * self.gpus_each(config)
        on_cpus = not gpus and (wanted == 1 or (here and not visible_gpus().gpus))
        if on_cpus or (wanted == 1 and gpus < 1) or wanted == gpus:
            return None
        return (
            f"the server(s) of a sampler take {wanted} GPU(s) (servers.replicas={servers.replicas} x tensor x pipeline "
            f"x data parallel of servers.options); set it to {wanted}"
        )

    def check_beside_learner(self, config: Config, machine: VisibleGpus | None = None) -> str | None:
        """Servers that are started here and the learner's processes must not meet on a GPU; what is said where they
        may.

        They may where the servers sleep while the learner learns. A learner in one process may share its GPU with a
        server that leaves room for it (engine.memory_fraction): with one GPU there is no other way.
        """
        engine, servers, count = config.engine, section(config, ServersConfig), config.learner.processes
        if servers.addresses or config.cluster != ONE_MACHINE:
            return None
        machine = visible_gpus() if machine is None else machine
        gpus, server_gpus = len(machine.gpus), servers.replicas * self.gpus_each(config)
        if rank_devices(config, machine)[0] == "cpu":
            return None
        if self.takes_first_gpus and count > 1 and not engine.sleep:
            raise ConfigError(
                f"engine={engine.name} uses the first GPU(s), which learner.processes={count} uses too: use a server "
                "engine, which uses the last GPUs, or set engine.sleep=true to take turns"
            )
        if server_gpus + count <= gpus and not self.takes_first_gpus:
            return None
        demand = (
            f"servers.replicas={servers.replicas} takes {server_gpus} GPU(s) and learner.processes={count} takes "
            f"{count}, together {server_gpus + count}, and this machine has {gpus}"
        )
        if count > 1 and not engine.sleep:
            raise ConfigError(f"{demand}; lower one, or set engine.sleep=true to have them share GPUs in turn")
        return f"{demand}; some are shared" + (
            "" if engine.sleep else ": engine.memory_fraction must leave the learner room"
        )


class ServersOpener(GuestOpener):
    """Servers: started here, in an environment of their own, or attached to."""

    server: ClassVar[type[InferenceServer]]
    served_model: ClassVar[str | None] = None
    """What a server that we start calls the model."""

    @abstractmethod
    def process(
        self, config: Config, setup: ReplicaSetup, name: str, logs: Path, devices: str | None, say: Say
    ) -> ServerProcess:
        """A server that will be started on these GPUs, and writes its log there."""

    def replicas(self, config: Config, setup: ReplicaSetup, say: Say) -> Sequence[InferenceServer]:
        """One for each address, or for each process."""
        addresses = section(config, ServersConfig).addresses
        if addresses:
            names = [f"server {number} ({url})" for number, url in enumerate(addresses)]
            sizes = sizes_of(read_raw_config(setup.source.folder))
            return [
                self.replica(config, setup, name, url, config.engine.model, sizes)
                for name, url in zip(names, addresses, strict=True)
            ]
        logs = (run_folder() or OwnFolder("turnwise-servers-").path) / SERVER_LOGS  # outlive us, for who reads them
        processes = [
            self.process(config, setup, f"server {number}", logs, devices, say)
            for number, devices in enumerate(self.devices(config))
        ]
        return [self.replica(config, setup, process.name, process, self.served_model, {}) for process in processes]

    def replica(
        self,
        config: Config,
        setup: ReplicaSetup,
        name: str,
        at: ServerProcess | str,
        model: str | None,
        sizes: Sizes,
    ) -> InferenceServer:
        """The sampler that speaks with the server `at` a process of ours or an address."""
        return self.server(
            name, at, vocabulary=setup.vocabulary, decode=setup.decode, capabilities=setup.capabilities,
            api_key=os.environ.get(API_KEY_ENV), model=model, sizes=sizes,
        )  # fmt: skip

    async def check(self, config: Config) -> str | None:
        """Those that run must answer, with this model and all that is asked of them."""
        if not self.keeps_weights(config) or config.cluster != ONE_MACHINE:
            return await super().check(config)
        self.check_settings(config)
        addresses = section(config, ServersConfig).addresses
        for url in addresses:
            client = ServerClient(url, os.environ.get(API_KEY_ENV))
            try:
                await client.ask("GET", "/health", seconds=CHECK_SECONDS)
            except EngineError as error:
                raise ConfigError(f"servers.addresses: {url} does not serve: {error}") from error
            finally:
                await client.close()
        await self._check_attached(config)
        return f"{len(addresses)} server(s) answer, with the model of model.path and all that is asked of them"

    async def _check_attached(self, config: Config) -> None:
        """What a run would refuse of servers that run, another model among it; they are given nothing."""
        source = model_source(config)
        setup = ReplicaSetup(source, self.capabilities(config), vocabulary_of(source, 1), lambda ids: "")
        for server in self._told(config, self.replicas(config, setup, lambda text: None)):
            try:
                await server.start()
            except EngineError as error:
                raise ConfigError(f"servers.addresses: {error}") from error
            finally:
                await server.close()

    def check_settings(self, config: Config) -> None:
        """Also what the addresses and the interpreter have to be."""
        servers = section(config, ServersConfig)
        if servers.addresses and servers.replicas > 1:
            raise ConfigError(
                f"servers.replicas={servers.replicas} starts servers, but servers.addresses names running ones: set one"
            )
        addresses = [server_address(url) for url in servers.addresses]
        if len(set(addresses)) < len(addresses):  # one would load weights under the turns of the other
            raise ConfigError(f"servers.addresses names a server twice: {', '.join(addresses)}")
        refuse_idle(config.engine, servers)
        if servers.python is not None and shutil.which(os.path.expanduser(servers.python)) is None:
            raise ConfigError(f"servers.python={servers.python}: there is no such program")
        super().check_settings(config)

    def describe_servers(self, config: Config) -> str:
        """`vllm_server, 2 started here by ~/vllm/bin/python`."""
        name, servers = config.engine.name, section(config, ServersConfig)
        if servers.addresses:
            return f"{name}, attached to {', '.join(servers.addresses)}"
        return f"{name}, {servers.replicas} started here by {servers.python or 'this interpreter'}"

    def python(self, config: Config) -> str:
        """The interpreter that `servers.python` names, or the one that runs us."""
        python = section(config, ServersConfig).python
        return sys.executable if python is None else os.path.expanduser(python)

    def count(self, config: Config) -> int:
        """Those that run, or those that are started."""
        servers = section(config, ServersConfig)
        return len(servers.addresses) or servers.replicas

    def devices(self, config: Config) -> list[str | None]:
        """Of servers that run nobody has to know."""
        return [] if self.keeps_weights(config) else super().devices(config)

    def keeps_weights(self, config: Config) -> bool:
        """Those that it is attached to."""
        return bool(section(config, ServersConfig).addresses)

    def weights_folder(self, config: Config) -> Path | None:
        """With the runs where servers are on other machines: the runs then lie on a shared disk."""
        apart = [url for url in section(config, ServersConfig).addresses if not is_loopback(httpx.URL(url).host)]
        return Path(config.runs_dir).resolve() / ".weights" if apart else None


async def _try_images(replicas: Sequence[StreamedSampler], images: ImageProcessor, say: Say) -> None:
    """Show each a small picture before anyone shows it one; what makes something of its own of it reads text only."""
    picture = await asyncio.to_thread(images.prepare, small_picture())
    answers = await gather_all(replica.try_image(images.image_token_id, picture) for replica in replicas)
    if problems := [problem for problem in answers if problem is not None]:
        say(f"the engine reads text only: {problems[0]}")
        for replica in replicas:  # a conversation may come to any of them
            replica.capabilities = replace(replica.capabilities, media=False)
