"""Where and how a model runs: device, dtype and attention, chosen for the machine unless the caller says.

Pure decisions about what torch reports; nothing is loaded here.
"""

import importlib.util
import platform

import torch

from ragkv.attention import BASES
from ragkv.errors import ConfigError, MissingExtra

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def choose_device(device: str | torch.device | None = None) -> torch.device:
    """The given device, else CUDA where there is one, else the CPU."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device={device!r} is no torch device: give one such as 'cpu' or 'cuda:0'") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={str(device)!r}: torch sees no CUDA device here; use 'cpu'")
    return chosen


def choose_dtype(device: torch.device, dtype: str | torch.dtype | None = None) -> torch.dtype:
    """The given dtype, else bfloat16 where the device computes in it natively, else float32."""
    if dtype is None:
        return torch.bfloat16 if has_native_bfloat16(device) else torch.float32
    chosen = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if chosen is None or chosen not in DTYPES.values():
        raise ConfigError(f"dtype={dtype!r}: must be one of {', '.join(DTYPES)}")
    return chosen


def choose_attention(device: torch.device, dtype: torch.dtype, attention: str | None = None) -> str:
    """The given attention implementation, else flash_attention_2 where it works, else sdpa.

    Raises:
        ConfigError: unknown name, or flash_attention_2 away from CUDA or in float32.
        MissingExtra: flash_attention_2 was asked for and flash-attn is not installed.
    """
    installed = importlib.util.find_spec("flash_attn") is not None
    fits = device.type == "cuda" and dtype != torch.float32
    if attention is None:
        return "flash_attention_2" if installed and fits else "sdpa"
    if attention not in BASES:
        raise ConfigError(f"attn_implementation={attention!r}: must be one of {', '.join(BASES)}")
    if attention == "flash_attention_2" and not fits:
        raise ConfigError(
            f"attn_implementation='flash_attention_2' needs a CUDA device and bfloat16 or float16, not {device} "
            f"and {str(dtype).removeprefix('torch.')}: use 'sdpa'"
        )
    if attention == "flash_attention_2" and not installed:
        raise MissingExtra("flash_attention_2 needs flash-attn: pip install 'ragkv[flash]'")
    return attention


def has_native_bfloat16(device: torch.device) -> bool:
    """Whether matrix products in bfloat16 run on instructions of their own, rather than emulated."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type != "cpu":
        return False
    if platform.machine().lower() in ("arm64", "aarch64"):
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    # oneDNN's own check is true on x86 without the instructions, where it emulates them slowly.
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, check, bool)() for check in checks)
