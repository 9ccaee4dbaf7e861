"""OmegaConf, in which verl's classes want their configs; the extra `verl` brings it."""

from typing import Any

from turnwise.errors import PluginError


def omega_conf() -> Any:
    """The class OmegaConf; one line where it is not installed."""
    try:
        from omegaconf import OmegaConf
    except ModuleNotFoundError as error:
        raise PluginError("classes of verl's take configs of OmegaConf's: pip install 'turnwise[verl]'") from error
    return OmegaConf
