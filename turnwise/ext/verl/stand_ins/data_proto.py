"""Stand-in for verl.protocol: rows as reward managers are given them, tensors and objects by name."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch


@dataclass
class DataProtoItem:
    """One row of a DataProto, as reward managers read it."""

    batch: dict[str, Any]
    non_tensor_batch: dict[str, Any]
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass
class DataProto:
    """Rows: tensors in `batch`, arrays of objects in `non_tensor_batch`."""

    batch: dict[str, torch.Tensor]
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(
        cls,
        tensors: dict[str, torch.Tensor] | None = None,
        non_tensors: dict[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
    ) -> "DataProto":
        """A DataProto made of plain dicts."""
        return cls(dict(tensors or {}), dict(non_tensors or {}), dict(meta_info or {}))

    def __len__(self) -> int:
        columns: list[Any] = [*self.batch.values(), *self.non_tensor_batch.values()]
        return len(columns[0]) if columns else 0

    def __getitem__(self, item: Any) -> Any:
        batch = {name: column[item] for name, column in self.batch.items()}
        others = {name: column[item] for name, column in self.non_tensor_batch.items()}
        if isinstance(item, int | np.integer):
            return DataProtoItem(batch, others, self.meta_info)
        return DataProto(batch, others, self.meta_info)

    def __iter__(self) -> Iterator[DataProtoItem]:
        return (self[number] for number in range(len(self)))
