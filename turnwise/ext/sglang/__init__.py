"""SGLang servers as a sampler (`engine=sglang_server`)."""
