"""Higher or lower: what this package brings to Turnwise, by name; nothing else is imported until it is named."""

from turnwise.extensions import Engine, Extension

EXTENSION = Extension(
    tools={"guess": "hilo.game:guess"},
    scorers={"few_guesses": "hilo.game:few_guesses"},
    tasks={"hilo": "hilo.game:TASK"},
    engines={"halving": Engine("Guesses by halving: no model.", "hilo.engine:HalvingOpener", trains=False, device="")},
    verbs={"hilo": "hilo.command"},
    section="hilo.config:HiloConfig",
)
