"""A Hugging Face config.json as the recipe's model section, and back.

What a config may say that the model here does not do (biases, other activations, sliding windows, other rotary
scalings) is refused, all of it at once: weights would load and the logits would be wrong.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from drumline.checkpoint.huggingface_deepseek import (
    MODEL_TYPE,
    deepseek_faults,
    read_deepseek,
    refuse_what_deepseek_lacks,
    write_deepseek,
)
from drumline.checkpoint.huggingface_moe import read_moe, refuse_what_qwen3_moe_lacks, write_moe
from drumline.recipe.errors import DrumlineError
from drumline.recipe.sections import Model, RopeScaling

_FAMILIES = {"llama": "llama3", "qwen3": "qwen3", "qwen3_moe": "qwen3", MODEL_TYPE: "deepseek_v3"}
_ARCHITECTURES = {
    ("llama3", False): ("llama", "LlamaForCausalLM"),
    ("qwen3", False): ("qwen3", "Qwen3ForCausalLM"),
    ("qwen3", True): ("qwen3_moe", "Qwen3MoeForCausalLM"),
    ("deepseek_v3", True): (MODEL_TYPE, "DeepseekV3ForCausalLM"),
}
_KEYS = {
    "num_layers": "num_hidden_layers",
    "dim": "hidden_size",
    "num_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
}
_REQUIRED_VALUES = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False}
_DEFAULT_THETA = 10_000.0  # what all families mean where a config does not say


def read_config(folder: Path) -> Model:
    """Reads the shape of a model that transformers has saved.

    Args:
        folder: holds config.json.

    Returns:
        The shape.

    Raises:
        DrumlineError: there is no readable config, or it asks for what the models here do not do.
    """
    path, config = _load(folder)
    family = _FAMILIES.get(config.get("model_type", ""))
    if family is None:
        raise DrumlineError(
            f"{path}: model_type = {config.get('model_type')!r} is not supported"
            f"\n  those that are: {', '.join(_FAMILIES)}"
        )
    _refuse_what_is_not_done(path, config)
    return _to_model(path, config, family)


def has_neighbouring_pairs(folder: Path) -> bool:
    """Whether the rotary pairs of a folder's heads are neighbours, as DeepSeek-V3's are where nothing else is said."""
    _, config = _load(folder)
    return config.get("model_type") == MODEL_TYPE and bool(config.get("rope_interleave", True))


def _load(folder: Path) -> tuple[Path, dict[str, Any]]:
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        what = "no config.json in it" if path.parent.is_dir() else "no such folder"
        raise DrumlineError(f"{path.parent} is no Hugging Face model folder: {what}") from None
    except (ValueError, OSError) as error:
        raise DrumlineError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise DrumlineError(f"{path} holds a {type(config).__name__}, not an object")
    return path, config


def refuse_what_transformers_lacks(model: Model) -> None:
    """Raises for a model that transformers would compute otherwise, or has no place for.

    Args:
        model: the shape.

    Raises:
        DrumlineError: lists what transformers lacks.
    """
    if model.family == "deepseek_v3":
        refuse_what_deepseek_lacks(model)
        return
    refuse_what_qwen3_moe_lacks(model)
    if model.num_mtp_layers:
        raise DrumlineError(
            f"model.num_mtp_layers = {model.num_mtp_layers}: transformers' {model.family} has no multi-token prediction"
        )


def write_config(model: Model, dtype: str, extra: Mapping[str, Any] | None = None) -> str:
    """The text of a config.json that transformers 4 and 5 read as this shape.

    Args:
        model: the shape.
        dtype: of the weights beside it, as torch names it: `float32`, `bfloat16`.
        extra: further keys, such as bos_token_id; they win.

    Returns:
        JSON.

    Raises:
        DrumlineError: transformers has no such model.
    """
    refuse_what_transformers_lacks(model)
    model_type, architecture = _ARCHITECTURES[model.family, model.moe is not None]
    rope: dict[str, Any] = {"rope_type": "default"}
    if model.rope_scaling is not None:
        scaling = model.rope_scaling
        rope = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        }
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        **{theirs: getattr(model, ours) for ours, theirs in _KEYS.items()},
        "num_key_value_heads": model.num_kv_heads,
        **({"head_dim": model.head_dim} if model.mla is None else {}),
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.init_std,
        # transformers 5 reads rope_parameters and dtype; 4 reads the three other keys.
        "rope_parameters": {**rope, "rope_theta": model.rope_theta},
        "rope_theta": model.rope_theta,
        "rope_scaling": rope if model.rope_scaling is not None else None,
        "dtype": dtype,
        "torch_dtype": dtype,
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
        **_of_family(model),
        **(extra or {}),
    }
    return json.dumps(config, indent=2) + "\n"


def _of_family(model: Model) -> dict[str, Any]:
    if model.family == "deepseek_v3":
        return write_deepseek(model)
    own = {"mlp_bias": False} if model.family == "llama3" else {"use_sliding_window": False}
    return own if model.moe is None else own | write_moe(model.moe)


def _refuse_what_is_not_done(path: Path, config: Mapping[str, Any]) -> None:
    faults = [
        f"{key} = {config[key]!r}, only {wanted!r} is supported"
        for key, wanted in _REQUIRED_VALUES.items()
        if config.get(key, wanted) != wanted
    ]
    is_deepseek = config["model_type"] == MODEL_TYPE
    rope_type, scaling = _rope(config).get("rope_type", "default"), "yarn" if is_deepseek else "llama3"
    if rope_type not in ("default", scaling):
        faults.append(f"rope_type = {rope_type!r}, only 'default' and '{scaling}' are supported")
    if config.get("quantization_config"):
        faults.append("quantization_config is set, only unquantized weights are supported")
    faults += [f"{key} is missing" for key in _KEYS.values() if not config.get(key)]
    if is_deepseek:
        faults += deepseek_faults(config, _rope(config))
    if faults:
        raise DrumlineError("\n  ".join((f"{path} describes a model that cannot be loaded:", *faults)))


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary parameters, wherever this version of transformers has put them."""
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if "type" in scaling:
        scaling.setdefault("rope_type", scaling["type"])
    return {"rope_theta": config.get("rope_theta", _DEFAULT_THETA)} | scaling


def _to_model(path: Path, config: Mapping[str, Any], family: str) -> Model:
    rope = _rope(config)
    try:
        scaling = None
        if rope.get("rope_type") == "llama3":
            scaling = RopeScaling(
                factor=rope["factor"],
                low_freq_factor=rope["low_freq_factor"],
                high_freq_factor=rope["high_freq_factor"],
                original_max_seq_len=rope["original_max_position_embeddings"],
            )
        return Model.model_validate(
            {
                "family": family,
                **{ours: config[theirs] for ours, theirs in _KEYS.items()},
                "num_kv_heads": config.get("num_key_value_heads") or config["num_attention_heads"],
                "head_dim": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
                "rope_theta": rope["rope_theta"],
                "rope_scaling": scaling,
                "qk_norm": family == "qwen3",
                "tie_embeddings": config.get("tie_word_embeddings", False),
                "init_std": config.get("initializer_range", 0.02),
                "moe": read_moe(path, config) if config["model_type"] == "qwen3_moe" else None,
                **(read_deepseek(config, rope) if family == "deepseek_v3" else {}),
            }
        )
    except KeyError as error:
        raise DrumlineError(f"{path}: the llama3 rotary scaling lacks {error}") from None
    except ValidationError as error:
        faults = (f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        raise DrumlineError("\n  ".join((f"{path} has values that make no model:", *faults))) from None
