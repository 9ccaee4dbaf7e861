"""Episodes over a scripted sampler, as `theatre.py` plays them."""

from theatre import call, one, renderer, run, sample, theatre, tokenizer_folder

__all__ = ["call", "one", "renderer", "run", "sample", "theatre", "tokenizer_folder"]
