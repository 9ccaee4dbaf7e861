"""What vLLM's workers do for us: take weights from a folder, whole.

vLLM imports this file by itself, in whichever interpreter it runs: it must import nothing of turnwise.
"""

from typing import Any


class WeightReader:
    """Given to vLLM as `worker_extension_cls`; its methods are called by `collective_rpc`."""

    model_runner: Any

    def turnwise_load(self, folder: str) -> None:
        """Replace all weights by those of the safetensors files in `folder`, under Hugging Face names.

        vLLM's own reloading leaves out a layer that no weight of the checkpoint belongs to. An output layer that shares
        the embedding's tensor is one: on a GPU it sees the new values, on a CPU it has a copy packed for its products.
        """
        self.model_runner.reload_weights(weights_path=folder)
        for layer in self.model_runner.get_model().modules():
            if hasattr(layer, "cpu_linear") and hasattr(layer, "embedding_dim") and layer.weight.numel():
                layer.quant_method.process_weights_after_loading(layer)
