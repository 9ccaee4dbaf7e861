"""The guests of the core, each a leaf that is found through `table.py` beside this file when it is first named."""
