"""Weights between trainers: shards of FSDP, distributed checkpoints and Megatron grids to Hugging Face, and back."""
