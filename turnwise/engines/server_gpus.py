"""How many GPUs inference servers take, which ones they are given, and whether the learner meets them there."""

import os
from collections.abc import Iterator, Sequence
from itertools import pairwise

from turnwise.choices import ClusterName, EngineName
from turnwise.config import Config, EngineConfig
from turnwise.config.inputs import FOREIGN
from turnwise.engines.devices import Seen, look, rank_devices
from turnwise.errors import ConfigError

_TENSOR = ("--tensor-parallel-size", "-tp", "--tp", "--tp-size")
_PIPELINE = ("--pipeline-parallel-size", "-pp", "--pp", "--pp-size")
_CONTEXT = ("--prefill-context-parallel-size", "-pcp")
_DATA = ("--data-parallel-size", "-dp", "--dp", "--dp-size")
_DATA_HERE = ("--data-parallel-size-local", "-dpl")
"""Of the copies those on this machine, where the others are elsewhere."""
_DATA_INSIDE = "--enable-dp-attention"
"""SGLang's: the copies share the GPUs of the tensor parallel ones."""
_DATA_ENV = "VLLM_DP_SIZE"
"""By which vLLM is told where no option says more than 1."""


def gpus_of_a_server(engine: EngineConfig) -> int:
    """As many as the options that it is started with say: tensor x pipeline x data parallel."""
    told = {name.replace("_", "-"): value for name, value in named_options(engine.server_options)}  # the last one wins
    copies = _first_count(told, _DATA_HERE) or _first_count(told, _DATA) or 1
    if copies == 1 and engine.name != EngineName.sglang_server and (env := os.environ.get(_DATA_ENV)):
        copies = _count(_DATA_ENV, env)
    if _DATA_INSIDE in told and engine.name == EngineName.sglang_server:
        copies = 1
    for names in (_TENSOR, _PIPELINE, _CONTEXT):
        copies *= _first_count(told, names) or 1
    return copies


def _first_count(told: dict[str, str], names: Sequence[str]) -> int | None:
    """The number that the last of these names was given; None where none was."""
    written = [name for name in told if name in names]
    return _count(f"engine.server_options: {written[-1]}", told[written[-1]]) if written else None


def _count(name: str, value: str) -> int:
    if not value.isdecimal() or not int(value):
        raise ConfigError(f"{name} takes a number of GPUs, not {value!r}")
    return int(value)


def check_reserved(config: Config) -> None:
    """Servers in a sampler of a cluster must find as many GPUs as it reserves, no fewer and no more."""
    engine, reserved = config.engine, config.cluster.sampler_gpus
    if engine.name not in FOREIGN or engine.servers:
        return
    wanted = engine.replicas * gpus_of_a_server(engine)
    on_cpus = not reserved and (wanted == 1 or (config.cluster.address is None and not look().gpus))
    shared = wanted == 1 and reserved < 1
    if on_cpus or shared or wanted == reserved:
        return
    raise ConfigError(
        f"cluster.sampler_gpus={reserved:g}: the server(s) of a sampler take {wanted} GPU(s) (engine.replicas="
        f"{engine.replicas} x tensor x pipeline x data parallel of engine.server_options); set it to {wanted}"
    )


def devices_of(config: Config, replicas: int) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of each server: GPUs from the last one on, so that the learner's, the first, is taken last.

    None where there is no GPU.
    """
    count, each = len(look().gpus), gpus_of_a_server(config.engine)
    if not count:
        return [None] * replicas
    if replicas * each > count:
        raise ConfigError(f"engine.replicas={replicas} of {each} GPU(s) each: this machine has {count}")
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]  # ours, of all there are
    order = (named or [str(number) for number in range(count)])[:count][::-1]
    return [",".join(order[number * each : (number + 1) * each]) for number in range(replicas)]


def check_apart(config: Config, seen: Seen | None = None) -> str | None:
    """Servers that are started here and the learner's processes must not meet on a GPU; what is said where they may.

    They may where the servers sleep while the learner learns. A learner in one process may share its GPU with a server
    that leaves room for it (engine.memory_fraction): with one GPU there is no other way.
    """
    engine, count = config.engine, config.learner.processes
    if engine.name not in FOREIGN or engine.servers or config.cluster.name is not ClusterName.none:
        return None
    seen = look() if seen is None else seen
    gpus, servers = len(seen.gpus), engine.replicas * gpus_of_a_server(engine)
    if rank_devices(config, seen)[0] == "cpu":
        return None
    if engine.name == EngineName.vllm and count > 1 and not engine.sleep:
        raise ConfigError(
            f"engine=vllm writes on the first GPU(s), which learner.processes={count} takes too: take "
            "engine=vllm_server, whose servers have the last ones, or set engine.sleep=true to share them in turn"
        )
    if servers + count <= gpus and engine.name != EngineName.vllm:
        return None
    asked = (
        f"engine.replicas={engine.replicas} takes {servers} GPU(s) and learner.processes={count} takes {count}, "
        f"together {servers + count}, and this machine has {gpus}"
    )
    if count > 1 and not engine.sleep:
        raise ConfigError(f"{asked}; lower one, or set engine.sleep=true to have them share GPUs in turn")
    return f"{asked}; some are shared" + (
        "" if engine.sleep else ": engine.memory_fraction must leave the learner room"
    )


def named_options(options: list[str]) -> Iterator[tuple[str, str]]:
    """Options with their values, as `--name value` or `--name=value`."""
    for option, following in pairwise([*options, ""]):
        name, equals, value = option.partition("=")
        yield name, value if equals else following
