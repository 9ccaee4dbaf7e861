"""Chat templates: rendering them safely, and what they do to messages, found by trying."""
