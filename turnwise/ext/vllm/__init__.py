"""vLLM as a sampler: in this process (`engine=vllm`) or as servers (`engine=vllm_server`)."""
