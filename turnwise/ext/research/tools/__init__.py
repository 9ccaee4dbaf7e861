"""`search`, over the bundled corpus, and `retrieve`, from a retrieval server."""
