"""Policy models: what `policy_model.py` asks for, our native decoder, and any causal model of transformers."""
