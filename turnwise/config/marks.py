"""Marks at a knob, or in EVERY_KNOB at a section, for those who handle a run: resuming, forecast, fine-tuning, keys."""

from typing import Any


def may_change() -> dict[str, Any]:
    """A run that is resumed may have another value: any other knob would make it another run."""
    return {"may_change": True}


def changes_work() -> dict[str, Any]:
    """With another value an episode or an update takes another time. Of an extension every knob counts as one."""
    return {"changes_work": True}


def only_watches() -> dict[str, Any]:
    """An extension's knob that changes nothing of what is computed."""
    return {"changes_work": False}


def for_sft() -> dict[str, Any]:
    """Fine-tuning reads it too, of a section that is made for reinforcement learning."""
    return {"for_sft": True}


def key_in(variable: str = "", option: str = "") -> dict[str, Any]:
    """Where the key of an address in it belongs, since a run stores and shows its config: in this variable of the
    environment, or in one that this option names."""
    if not variable:
        return {"key_in": f"name the variable that holds its key in {option}"}
    return {"key_in": f"set {variable}" + (f", or name another variable in {option}" if option else "")}
