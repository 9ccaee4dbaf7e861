"""The engine `halving`: what a perfect player would write; no model is loaded."""

import re

from turnwise import Config
from turnwise.chat.renderer import Renderer
from turnwise.engines.opener import Opener, OpenSampler, Say
from turnwise.engines.samplers.scripted import ScriptRequest, scripted_sampler
from turnwise.types import ToolCall


def halve(request: ScriptRequest) -> str:
    """The middle of what is left, or the number once it is found."""
    replies = re.findall("higher|lower|found", request.text)
    low, high = 1, 100
    for reply in replies[len(replies) - request.turn :]:  # those before are of the tool's description
        middle = (low + high) // 2
        if reply == "found":
            return f"#### {middle}"
        low, high = (middle + 1, high) if reply == "higher" else (low, middle - 1)
    return request.call_format.render_call(ToolCall("", "guess", {"number": (low + high) // 2}))


class HalvingOpener(Opener):
    """An engine opens a Sampler; this one is the scripted one with a script of its own."""

    async def open(self, config: Config, renderer: Renderer, say: Say) -> OpenSampler:
        return OpenSampler(scripted_sampler(renderer, halve), threads=1)
