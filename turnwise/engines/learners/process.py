"""The learner of one device in a process of its own: it and the sampler each have a Python interpreter."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from turnwise.engines.learners.hosting import HostedFacts, LearnerReply, Make
from turnwise.engines.learners.learner import Floats, Objective, TokenBatch, UpdateResult, Who
from turnwise.engines.learners.process_group import ProcessGroup
from turnwise.engines.learners.weight_block import DeviceBlock, MappedBlock, block_bytes, checksum, in_block
from turnwise.engines.weight_updates import FullWeights
from turnwise.errors import EngineError

NAME = "the learner's own process"


class ProcessLearner:
    """Starts a process, has a learner opened there and ends it. Implements `Learner`; numbers are those of the learner.

    `make` travels there. Weights come back through a block of memory that both see, in the number format `published`:
    on the GPU where the learner computes if `reader`, the sampler's device, is the same one.
    """

    def __init__(
        self,
        make: Make,
        *,
        reader: torch.device,
        published: torch.dtype = torch.float32,
        threads: int = 1,
        hang_seconds: float = 1800.0,
        say: Callable[[str], None],
    ) -> None:
        self._make, self._reader, self._dtype, self._say = make, reader, published, say
        self._mapped = MappedBlock()
        self._on_device: DeviceBlock | None = None
        self._block: Tensor | None = None
        self.step = 0
        """How many times the weights have changed."""
        self.token_budget = 0
        """Tokens of one pass that it had room for when it last answered."""
        host, keeps = "turnwise.engines.learners.hosting:LearnerHost", (self._mapped.descriptor,)
        self._group = ProcessGroup(host, (NAME,), threads, hang_seconds, keeps=keeps)

    def open(self) -> HostedFacts:
        """Start the process and open the learner there; it must be closed also where that fails."""
        self._group.begin()
        self._group.open([(self._make, str(self._dtype).removeprefix("torch."))])
        facts: HostedFacts = self._ask("facts")
        self._shapes = facts.shapes
        self.device = self._reader if str(self._reader) == facts.device else torch.device("cpu")
        """Where the weights are handed over: the learner's device if the sampler is there too."""
        self._block = self._share(block_bytes(facts.shapes, self._dtype))
        return facts

    def _share(self, size: int) -> Tensor:
        if self.device.type == "cuda":
            self._on_device = DeviceBlock(self.device, size)
            block, theirs = self._on_device.tensor, self._ask("attach", self._on_device.shared)
        else:
            memory = self._mapped.allocate(size)
            block, theirs = memory.open(), self._ask("attach", memory)
        if checksum(block) != theirs:
            raise EngineError("what the learner's own process wrote is not what this one reads: set learner.place=here")
        return block

    def _ask(self, method: str, *arguments: Any) -> Any:
        reply: LearnerReply = self._group.call(method, [arguments])[0]
        self.step, self.token_budget = reply.step, reply.token_budget
        for note in reply.notes:
            self._say(note)
        return reply.value

    def score(self, batch: TokenBatch, who: Who) -> Floats:
        """One number [N] for every policy token, without gradient."""
        scores: Floats = self._ask("score", batch, who)
        return scores

    def update(self, batches: Sequence[TokenBatch], objective: Objective) -> UpdateResult:
        """One optimizer step on the micro-batches of a minibatch."""
        result: UpdateResult = self._ask("update", batches, objective)
        return result

    def weights(self) -> FullWeights:
        """The policy's weights, an adapter merged; they are handed over when the first is asked for."""
        return FullWeights(self._shapes, self._stream())

    def _stream(self) -> Iterator[tuple[str, Tensor]]:
        self._ask("hand_over")
        assert self._block is not None, "open comes first"
        yield from in_block(self._block, self._shapes, self._dtype)

    def save(self, folder: Path) -> None:
        """Everything needed to go on from here, in the same files as a learner of the run's own process."""
        self._ask("save", folder.absolute())

    saving = False
    """`save` returns when it has written."""

    def saved(self) -> None:
        """There is nothing to wait for."""

    def load(self, folder: Path) -> None:
        """Go on from a saved state; one of another model is refused by name before anything changes."""
        self._ask("load", folder.absolute())

    def save_policy(self, folder: Path) -> None:
        """The policy as others load it."""
        self._ask("save_policy", folder.absolute())

    def save_adapter(self, folder: Path) -> bool:
        """The adapter alone, in peft's format; False where there is none."""
        return bool(self._ask("save_adapter", folder.absolute()))

    def close(self) -> None:
        """End the process, whatever it is doing, and give the shared memory back."""
        self._group.stop()
        on_device, self._on_device, self._block = self._on_device, None, None
        if on_device is not None:
            on_device.close()
        self._mapped.close()
