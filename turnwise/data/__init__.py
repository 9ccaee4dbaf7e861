"""Rows -> Samples: rows of parquet, JSON lines, a task or a function, a linter and a resumable loader."""
