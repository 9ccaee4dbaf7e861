"""Stand-in for verl.utils.dataset.rl_dataset: RLHFDataset as far as subclasses of it build on it."""

from collections.abc import Sequence
from typing import Any

from turnwise.data.files import data_files
from turnwise.data.rows import read_rows


class RLHFDataset:
    """Rows of parquet or jsonl files. Subclasses change how files are read or what a row becomes.

    `dataframe` holds the rows. Prompts are not rendered or cut here: that is the engine's and `data.overlong`'s.
    """

    def __init__(
        self,
        data_files: str | Sequence[str],
        tokenizer: Any,
        config: Any,
        processor: Any = None,
        max_samples: int = -1,
        **kwargs: Any,
    ) -> None:
        self.data_files = [data_files] if isinstance(data_files, str) else list(data_files)
        self.tokenizer = tokenizer
        self.processor = processor
        self.config = config
        self.max_samples = max_samples
        self.prompt_key = config.get("prompt_key", "prompt")
        self.dataframe: Any = []
        self._download()
        self._read_files_and_tokenize()
        if 0 < max_samples < len(self.dataframe):
            self.dataframe = self.dataframe[:max_samples]

    def _download(self, use_origin_parquet: bool = False) -> None:
        """Does nothing: files are local here."""

    def _read_files_and_tokenize(self) -> None:
        self.dataframe = [dict(row.values) for path in data_files(self.data_files) for row in read_rows(path)]
        self.dataframe = self.maybe_filter_out_long_prompts(self.dataframe)

    def maybe_filter_out_long_prompts(self, dataframe: Any = None) -> Any:
        """Every row stays: `data.max_prompt_tokens` counts the prompt as the model sees it, tools included."""
        return dataframe

    def _build_messages(self, example: dict[str, Any], key: str | None = None) -> Any:
        return list(example[key or self.prompt_key])

    def __len__(self) -> int:
        return len(self.dataframe)

    def __getitem__(self, item: int) -> dict[str, Any]:
        row = dict(self.dataframe[item])
        row["raw_prompt"] = self._build_messages(row)
        info = row.get("extra_info") or {}
        row["index"] = info.get("index", 0)
        row["tools_kwargs"] = info.get("tools_kwargs") or {}
        row["interaction_kwargs"] = info.get("interaction_kwargs") or {}
        return row


def collate_fn(data_list: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Rows as columns: a list of values by name."""
    return {name: [row[name] for row in data_list] for name in data_list[0]} if data_list else {}
