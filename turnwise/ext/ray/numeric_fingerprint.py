"""What arithmetic depends on: where two processes say the same, the same products round to the same bits."""

import platform
from pathlib import Path


def machine_words() -> str:
    """Processor, its instructions as torch uses them, and the versions that compute."""
    import numpy
    import torch

    model = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    instructions = torch.backends.cpu.get_cpu_capability()
    return f"{platform.machine()} {model}, {instructions}, torch {torch.__version__}, numpy {numpy.__version__}"
