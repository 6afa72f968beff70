"""What can be told about a model without loading its weights: a folder's config.json is enough."""

from functools import cache

from transformers import AutoConfig

from ragkv.errors import ModelError
from ragkv.models import resolve
from ragkv.packaged import PACKAGED


@cache
def context_length(model: str) -> int:
    """Most positions that a model was trained for, in tokens; the same as `LoadedModel.context_length`.

    A packaged model is not fetched for this; of a hub id only the config is, and a `.gguf` file is converted.

    Args:
        model: packaged name, folder, `.gguf` file or hub id.

    Raises:
        ModelError: there is no such model, or its config cannot be read or does not say.
    """
    if model in PACKAGED:
        return PACKAGED[model].context_length
    source = resolve(model)
    try:
        config = AutoConfig.from_pretrained(source)
    except Exception as error:  # transformers and the hub each raise their own
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"cannot read the config of {model}: {type(error).__name__}: {reason}") from error
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not length:
        raise ModelError(f"{model} states no context length: set max_position_embeddings in its config.json")
    return int(length)
