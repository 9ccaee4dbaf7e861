"""The section `servers`: inference servers that a run attaches to or starts, and what vLLM and SGLang are told."""

import enum
from dataclasses import dataclass
from typing import ClassVar

from turnwise.config.knobs import at_least, knob, only_engines, reaches, was
from turnwise.config.marks import key_in, may_change


class WeightTransfer(enum.Enum):
    """How all weights get into a vLLM server."""

    files = "files"
    """Files in shared memory, or in the runs' folder for servers on other machines."""
    nccl = "nccl"
    """From the learner's GPU to the server's, without files; not tried on a GPU so far (docs/ext/vllm.md)."""


class CacheAtUpdate(enum.Enum):
    """What becomes of the keys and values of turns under way when new weights come."""

    recompute = "recompute"
    """They are computed again with the new weights: every log-prob is exactly that of the version recorded with it."""
    keep = "keep"
    """The turns go on with those of the old weights, at once. Of a turn across an update, the log-probs behind it are
    of both weights; each token is recorded with the version that wrote it. Only vLLM 0.32 or newer can."""


@dataclass
class ServersConfig:
    """Inference servers of vLLM and SGLang (docs/ext/servers.md)."""

    EVERY_KNOB: ClassVar = (may_change(),)

    addresses: list[str] = knob(
        [], key_in("TURNWISE_ENGINE_KEY"), only_engines(), reaches("network"), was("engine.servers")
    )
    """Addresses of servers to attach to, such as [http://node1:8000, http://node2:8000]; empty starts them here. Set it
    when they run on other machines or outlive a run (docs/ext/servers.md says how to start them)."""
    replicas: int = knob(1, at_least(1, 4096), only_engines(), was("engine.replicas"))
    """How many servers are started here. Raise it to the number of GPUs that are left beside the learner's."""
    options: list[str] = knob([], only_engines(), reaches("code", whole=True), was("engine.server_options"))
    """Further options of the engine's own command line, as [--max-model-len, "4096"]; they come last and so win. Set it
    for what Turnwise has no knob for, such as --tensor-parallel-size."""
    transfer: WeightTransfer = knob(WeightTransfer.files, only_engines(), was("engine.transfer"))
    """How all weights get into a server. Take `nccl` where learner and servers have GPUs of their own and files take
    too long; it keeps a second copy of the weights on the learner's GPU."""
    cache_at_update: CacheAtUpdate = knob(CacheAtUpdate.recompute, only_engines())
    """What becomes of the keys and values of turns under way when new weights come (training.max_lag above 0). Set
    `keep` where turns are so long that computing them again at each update takes too long."""
    python: str | None = knob(None, only_engines(), reaches("code"), was("engine.python"))
    """The interpreter that has vLLM or SGLang, such as ~/vllm/bin/python; null takes the one that runs Turnwise. Set
    it to keep their packages in an environment of their own."""
