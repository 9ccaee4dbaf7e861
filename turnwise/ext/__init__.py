"""The guests of the core, each a leaf that is found through `turnwise/extensions.py` when it is first named."""
