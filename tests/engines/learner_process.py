"""A learner in a process of its own, behind a pipe: the whole protocol as pickled calls and answers."""

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from turnwise.config import LearnerConfig
from turnwise.engines.learners.critic import Critic
from turnwise.engines.learners.learner import Floats, Learner, Objective, TokenBatch, UpdateResult, Who
from turnwise.engines.learners.local import LocalLearner
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.huggingface_folder import DecoderConfig
from turnwise.engines.model.lora import LoraDecoder
from turnwise.engines.samplers.cpu.threads import REGIMES
from turnwise.engines.weight_updates import FullWeights


def serve(connection: Connection, make: Callable[[], Learner]) -> None:
    """Answer calls until None comes; an error is an answer too, raised on the other side."""
    torch.set_num_threads(1)
    learner = make()
    for name, arguments in iter(connection.recv, None):
        try:
            found = getattr(learner, name)
            found = found(*arguments) if callable(found) else found
            if isinstance(found, FullWeights):
                found = found.shapes, [(weight, tensor.numpy()) for weight, tensor in found.tensors]
        except Exception as error:
            found = error
        connection.send(found)


def make(lora: bool) -> LocalLearner:
    """All weights and a critic, or LoRA without. Here and not in a test: another process finds it by this file's name."""
    policy: Decoder = Decoder.fresh(DecoderConfig("qwen3", 96, 64, 128, 2, 4, 2, 16, 512), 7)
    critic = None if lora else Critic.copying(policy)
    if lora:
        policy = LoraDecoder(policy, rank=4, alpha=16.0, seed=2)
    config = LearnerConfig(lr=1e-2, critic_lr=1e-2)
    return LocalLearner(
        policy, config, temperature=0.9, critic=critic, reference=True, regime=REGIMES[0], base_model="base"
    )


class RemoteLearner:
    """`with RemoteLearner(make) as learner: optimise(learner, ...)`; `make` is picklable and runs over there."""

    def __init__(self, make: Callable[[], Learner]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._connection, theirs = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(theirs, make), daemon=True)
        self._process.start()
        theirs.close()

    def _ask(self, name: str, *arguments: Any) -> Any:
        self._connection.send((name, arguments))
        found = self._connection.recv()
        if isinstance(found, Exception):
            raise found
        return found

    @property
    def step(self) -> int:
        return int(self._ask("step"))

    @property
    def token_budget(self) -> int:
        return int(self._ask("token_budget"))

    def score(self, batch: TokenBatch, who: Who) -> Floats:
        return self._ask("score", batch, who)  # type: ignore[no-any-return]

    def update(self, batches: Sequence[TokenBatch], objective: Objective) -> UpdateResult:
        return self._ask("update", batches, objective)  # type: ignore[no-any-return]

    def weights(self) -> FullWeights:
        shapes, arrays = self._ask("weights")
        return FullWeights(shapes, ((name, torch.from_numpy(array)) for name, array in arrays))

    def save(self, folder: Path) -> None:
        self._ask("save", folder)

    saving = False

    def saved(self) -> None:
        """The answer to `save` comes when it is written."""

    def close(self) -> None:
        """See `__exit__`."""

    def load(self, folder: Path) -> None:
        self._ask("load", folder)

    def save_policy(self, folder: Path) -> None:
        self._ask("save_policy", folder)

    def __enter__(self) -> "RemoteLearner":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.send(None)
        self._process.join(60)
        assert self._process.exitcode == 0
