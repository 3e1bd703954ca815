"""How safetensors names torch's dtypes.

Source: the safetensors format, https://huggingface.co/docs/safetensors (metadata parsing).
"""

import torch

from drumline.recipe.errors import DrumlineError

_TORCH = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _TORCH.items()}


def name_of(dtype: torch.dtype) -> str:
    """The safetensors name of a dtype.

    Args:
        dtype: torch's.

    Returns:
        Such as `F32`.

    Raises:
        DrumlineError: safetensors has no name for it.
    """
    if dtype not in _NAMES:
        raise DrumlineError(
            f"a tensor of dtype {dtype} cannot be stored; safetensors knows {', '.join(_NAMES.values())}"
        )
    return _NAMES[dtype]


def dtype_of(name: str) -> torch.dtype:
    """The dtype that safetensors calls `name`.

    Args:
        name: such as `BF16`.

    Returns:
        torch's dtype.

    Raises:
        DrumlineError: drumline does not know it.
    """
    if name not in _TORCH:
        raise DrumlineError(f"stored dtype {name!r} is not known; drumline reads {', '.join(_TORCH)}")
    return _TORCH[name]
