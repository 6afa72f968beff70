"""A GGUF file becomes a folder of bfloat16 safetensors, tokenizer and generation settings, once.

The folder carries a note of its source; it counts as converted only while that note matches.
"""

import io
import json
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from ragkv.errors import ModelError
from ragkv.progress import Progress
from ragkv.storage import disk_errors, publish, require_space, staging

END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<end_of_turn>")
NOTE = "ragkv.json"


def is_converted(folder: Path, source: str) -> bool:
    """Whether `folder` was completed from this source."""
    try:
        return bool(json.loads((folder / NOTE).read_text())["source"] == source)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def write_note(folder: Path, source: str) -> None:
    """Record what a folder was made from, before it is published."""
    (folder / NOTE).write_text(json.dumps({"source": source}) + "\n")


def convert(gguf: Path, target: Path, source: str, progress: Progress | None = None) -> None:
    """Dequantise `gguf` into the folder `target`. The caller holds the lock of `target`.

    Args:
        gguf: the file.
        target: the folder; an older one of that name is replaced.
        source: what is_converted will compare.
        progress: told of "convert", in bytes of bfloat16 weights.

    Raises:
        ModelError: the file is no GGUF of a known architecture, weights are missing, or the disk is full.
    """
    _check_magic(gguf)
    with staging(target) as folder:
        try:
            _save(gguf, folder / "model", source, progress)
        except ModelError:
            raise
        except Exception as error:  # whatever transformers and safetensors raise on a file they cannot handle
            reason = " ".join(str(error).split())[:200]
            raise ModelError(f"cannot convert {gguf} ({type(error).__name__}: {reason})") from error
        publish(folder / "model", target)


def _save(gguf: Path, folder: Path, source: str, progress: Progress | None) -> None:
    # The loader draws a bar of its own on stderr, whatever transformers' progress settings say.
    with redirect_stderr(io.StringIO()):
        model, tokenizer = _read(gguf)
        size = 2 * model.num_parameters()
        if progress:
            progress("convert", size // 2, size)
        require_space(folder.parent, size, f"converting {gguf.name}")
        tokenizer.model_max_length = model.config.get_text_config().max_position_embeddings
        model.generation_config.eos_token_id = end_token_ids(tokenizer)
        with disk_errors(folder.parent):
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            write_note(folder, source)
    if progress:
        progress("convert", size, size)


def _read(gguf: Path) -> tuple[Any, Any]:
    """The model in bfloat16 and the tokenizer that are in the file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **where)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
        output_loading_info=True,
        **where,
    )
    model, info = loaded
    lost = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
    if lost:
        raise ModelError(f"cannot convert {gguf}: {len(lost)} weights are missing, such as {lost[0]}")
    return model, tokenizer


def end_token_ids(tokenizer: Any) -> list[int]:
    """The file's end token, then the usual ends of a turn that this vocabulary has as special tokens.

    GGUF keeps one end token, chat models stop at several. One that doubles as the unknown token is left out.
    """
    special = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    ends = [special[text] for text in END_TOKENS if text in special and text != tokenizer.unk_token]
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return list(dict.fromkeys(own + ends))


def _check_magic(gguf: Path) -> None:
    try:
        with gguf.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelError(f"cannot read {gguf} ({error.strerror})") from error
    if magic != b"GGUF":
        raise ModelError(f"{gguf} is not a GGUF file: it begins with {magic!r}")
