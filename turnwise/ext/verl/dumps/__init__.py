"""Rollout dumps of other systems as runs of ours, so that the board shows them: `turnwise import-jsonl`."""
