"""Stand-ins for verl.utils.torch_functional and verl.utils.model: what rewards and datasets do with tensors."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad


def masked_sum(values: Tensor, mask: Tensor, axis: Any = None) -> Tensor:
    """The sum of what the mask selects; what it does not may be NaN."""
    chosen = torch.where(mask.bool(), values, torch.zeros_like(values)) * mask
    return chosen.sum() if axis is None else chosen.sum(axis)


def masked_mean(values: Tensor, mask: Tensor, axis: Any = None) -> Tensor:
    """The mean of what the mask selects."""
    count = mask.sum() if axis is None else mask.sum(axis)
    return masked_sum(values, mask, axis) / (count + 1e-8)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """The variance of what the mask selects."""
    variance = masked_mean((values - masked_mean(values, mask)) ** 2, mask)
    if not unbiased:
        return variance
    count = mask.sum()
    if count <= 1:
        raise ValueError(f"a variance needs two values, and the mask selects {int(count)}")
    return variance * count / (count - 1)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Values with the variance 1 and, if `shift_mean`, the mean 0."""
    mean = masked_mean(values, mask)
    whitened = (values - mean) * torch.rsqrt(masked_var(values, mask) + 1e-8)
    return whitened if shift_mean else whitened + mean


def clip_by_value(x: Tensor, tensor_min: Tensor, tensor_max: Tensor) -> Tensor:
    """Between two tensors, element by element."""
    return torch.minimum(torch.maximum(x, tensor_min), tensor_max)


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """The log-probability of each label."""
    return logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """The entropy of each distribution."""
    return logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)


def get_response_mask(response_id: Tensor, eos_token: int | list[int] = 2, dtype: torch.dtype = torch.int64) -> Tensor:
    """1 up to the first end token, itself included."""
    ends = torch.isin(response_id, torch.tensor(eos_token, device=response_id.device)).int()
    return (ends.cumsum(1) - ends == 0).to(dtype)


def pad_sequence_to_length(tensors: Tensor, max_seq_len: int, pad_token_id: float, left_pad: bool = False) -> Tensor:
    """Rows padded to a length; longer ones stay as they are."""
    lacking = max(0, max_seq_len - tensors.shape[-1])
    return pad(tensors, (lacking, 0) if left_pad else (0, lacking), value=pad_token_id)


def postprocess_data(
    input_ids: Tensor,
    attention_mask: Tensor,
    max_length: int,
    pad_token_id: int,
    left_pad: bool = True,
    truncation: str = "error",
) -> tuple[Tensor, Tensor]:
    """Ids and mask of exactly a length: padded, or cut on the side that `truncation` names."""
    length = input_ids.shape[-1]
    if length > max_length:
        positions = list(range(length))
        head = max_length // 2
        cut = {
            "left": positions[length - max_length :], "right": positions[:max_length],
            "middle": positions[:head] + positions[length - (max_length - head) :],
        }  # fmt: skip
        if truncation not in cut:
            raise NotImplementedError(f"{length} tokens, and max_length is {max_length} (truncation={truncation!r})")
        return input_ids[:, cut[truncation]], attention_mask[:, cut[truncation]]
    ids = pad_sequence_to_length(input_ids, max_length, pad_token_id, left_pad)
    return ids, pad_sequence_to_length(attention_mask, max_length, 0, left_pad)


def tokenize_and_postprocess_data(
    prompt: str, tokenizer: Any, max_length: int, pad_token_id: int, left_pad: bool = True, truncation: str = "error"
) -> tuple[Tensor, Tensor]:
    """Ids and mask of a text, of exactly a length: padded or cut as `postprocess_data` does."""
    encoded = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    return postprocess_data(
        encoded["input_ids"], encoded["attention_mask"], max_length, pad_token_id, left_pad, truncation
    )


def compute_position_id_with_mask(mask: Tensor) -> Tensor:
    """Positions that count what the mask selects."""
    return (mask.cumsum(-1) - 1).clamp(min=0)
