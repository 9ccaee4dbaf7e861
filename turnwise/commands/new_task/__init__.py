"""What `turnwise new` writes: a support desk that looks orders up and takes them back, as templates, and its rows."""
