"""Images that a run keeps: copies by content, and the one reader of them."""
