"""Messages <-> tokens: the renderer, the chat templates and the tool-call formats."""
