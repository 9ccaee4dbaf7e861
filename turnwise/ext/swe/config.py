"""The section `swe`: where repositories are worked in."""

from dataclasses import dataclass
from typing import ClassVar

from turnwise.config.knobs import knob, reaches, url, was
from turnwise.config.marks import key_in


@dataclass
class SweConfig:
    """Where the tools bash, edit and finish work (docs/ext/swe.md)."""

    EVERY_KNOB: ClassVar = (key_in("TURNWISE_SANDBOX_TOKEN"),)

    url: str | None = knob(None, url(), reaches("network"), was("sandbox.swe_url"))
    """The address of a server of repositories, for the tools bash, edit and finish, such as http://sandbox:8081; the
    token is the same as for `sandbox.url`. Set it when this machine has no shell sessions (L3)."""
