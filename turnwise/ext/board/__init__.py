"""The board: a read-only page over run directories; it knows storage, and nothing that trains."""
