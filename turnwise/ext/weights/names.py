"""Names of tensors without what training wraps around a model: FSDP, torch.compile, recomputation and peft."""

import re

WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module)\.")
PEFT = "base_model.model."
BASE = ".base_layer."


def plain_name(name: str) -> str:
    """`base_model.model.model.norm.weight` -> `model.norm.weight`; factors of an adapter keep their last parts."""
    return WRAPPERS.sub("", name).removeprefix(PEFT).replace(BASE, ".")


def listed(names: list[str]) -> str:
    """The first five names in one line, and how many more there are."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
