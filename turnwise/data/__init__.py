"""Rows -> Samples: verl-shaped parquet and JSON lines, a linter and a resumable loader."""
