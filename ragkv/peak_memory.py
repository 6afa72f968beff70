"""The most memory that was in use since the last reset: of the GPU, or of this process where the system tells."""

from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


def reset(device: torch.device) -> None:
    """Count from now on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        _CLEAR.write_text(_RESET_PEAK)
    except OSError:  # another system, or one that does not allow it: the peak is that of the whole process
        return


def peak(device: torch.device) -> int | None:
    """Bytes, the model's weights included; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)
