"""Images in a conversation: their pixels, the arrays a model takes, and their blocks of tokens."""
