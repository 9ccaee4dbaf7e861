"""Rows of the files as they are, after the prompt of `system_prompt.txt` where they have an environment, once."""

from pathlib import Path
from typing import Any

from turnwise.data.rows import read_rows
from turnwise.errors import DataError

SYSTEM = (Path(__file__).parent / "system_prompt.txt").read_text(encoding="utf-8").strip()


class WithSystemPrompt:
    """For `data.dataset`: the files must lie in one folder, beside which their images are looked for."""

    def __init__(self, data_files: list[str], config: Any) -> None:
        folders = {str(Path(name).parent) for name in data_files}
        if len(folders) > 1:
            raise DataError(f"the files lie in {len(folders)} folders, and images beside one: {', '.join(folders)}")
        self._key = config.prompt_key
        self._rows = [row.values for name in data_files for row in read_rows(name)]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        row = self._rows[number]
        if not (row.get("env_name") or (row.get("extra_info") or {}).get("env_name")):
            return row  # it may call no tool, of which the prompt speaks
        asked = row.get(self._key)
        if isinstance(asked, str):
            asked = [{"role": "user", "content": asked}]
        if not isinstance(asked, list):
            return row  # whoever reads it says what is wrong with it
        kept = [one for one in asked if not (isinstance(one, dict) and one.get("role") == "system")]
        return row | {self._key: [{"role": "system", "content": SYSTEM}, *kept]}
