"""Causal models of transformers as policy models: probed at load, with our attention where it fits."""
