"""Stand-ins for the parts of verl that users' files import, served under verl's module names where verl is absent.

`turnwise/ext/verl/imports.py` says which module of verl's is served from which file here, and when. Written from verl's
documented interfaces (0.6.1 to 0.9.1); what a class of verl's does in its own engine is done by ours.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "DataProto":  # it needs torch: only those who ask pay for it
        from turnwise.ext.verl.stand_ins.data_proto import DataProto

        return DataProto
    raise AttributeError(f"the stand-in for verl has no {name!r}")
