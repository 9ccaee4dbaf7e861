"""Stand-in for verl.protocol: DataProto as far as reward managers use it."""

from turnwise.scoring.verl_data import DataProto, DataProtoItem

__all__ = ["DataProto", "DataProtoItem"]
