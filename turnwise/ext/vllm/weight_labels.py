"""Which version of the policy wrote which tokens of an answer, by the labels that vLLM gives its weights."""

from collections.abc import Iterable

from turnwise.errors import EngineError
from turnwise.ext.servers.inference_server import OtherWeights


class WeightLabels:
    """vLLM 0.32 or newer tells with every answer under which label of its weights each token was drawn; a label is
    changed only while it is paused."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._versions: dict[str, int] = {}

    def begin(self, label: str) -> None:
        """What the weights are called that it has now: those are version 0."""
        self._versions = {label: 0}

    def add(self, label: str, version: int) -> None:
        """What those of a version are called that it is given."""
        self._versions[label] = version

    def versions(self, told: Iterable[tuple[str, int]] | None, asked: int) -> list[tuple[int, int]]:
        """(version, its first token) of (label, its first token). A label that it was not given is another's, as is one
        of weights before those that the turn was `asked` of: a server that was started anew calls its own like that."""
        if told is None:
            raise EngineError(f"{self._name} does not tell which weights wrote a turn")
        spans = [(label, self._versions.get(label, -1), start) for label, start in told]
        for label, version, _ in spans:
            if version < asked:
                raise OtherWeights(
                    f"{self._name} has other weights than it was given: it calls them {label}: another server runs "
                    "there, or another program gives it weights"
                )
        return [(version, start) for _, version, start in spans]
