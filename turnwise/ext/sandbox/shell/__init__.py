"""Sessions that run programs, in a kind of their own beside the Python sessions."""
