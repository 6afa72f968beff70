"""The options that commands share, and what becomes of them: their names are those of the Python API, with dashes."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ragkv.errors import ConfigError

if TYPE_CHECKING:
    from ragkv.options import ChatOptions

DEFAULT_MODEL = "qwen2.5-coder-1.5b"
CONTEXT_TOKENS = 20_000
MAX_TOKENS = 128

PolicyName = Literal["full", "snapkv", "streaming"]
_SNAPKV_ONLY = ("window_size", "kernel_size", "pooling")
_CACHE, _REPLY, _MACHINE = "KV cache", "Reply", "Model and machine"

PathsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="PATH...",
        show_default=False,
        help="Files and folders of txt, md, html, pdf and jsonl, or one folder saved by `ragkv index`.",
    ),
]
SkipUnreadableOption = Annotated[
    bool, typer.Option("--skip-unreadable", help="Warn about files that cannot be read, and go on.")
]
ContextTokensOption = Annotated[int, typer.Option(help="Tokens of documents to retrieve into the prompt.")]

ModelOption = Annotated[
    str,
    typer.Option(help="Packaged name, folder, .gguf file or hub id.", rich_help_panel=_MACHINE),
]
DTypeOption = Annotated[
    str | None,
    typer.Option("--dtype", help="bfloat16, float16 or float32.", rich_help_panel=_MACHINE, show_default="fastest"),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(help="Such as cpu or cuda:0.", rich_help_panel=_MACHINE, show_default="GPU if there is one"),
]

PolicyOption = Annotated[
    PolicyName,
    typer.Option(
        help="What is kept of the prompt: full: all; snapkv: what the question looks at; streaming: its two ends.",
        rich_help_panel=_CACHE,
    ),
]
CapacityOption = Annotated[
    int | None,
    typer.Option(
        "--max-capacity-prompt",
        help="Tokens kept of the prompt, per layer and KV head.",
        rich_help_panel=_CACHE,
        show_default="4096",
    ),
]
WindowSizeOption = Annotated[
    int | None,
    typer.Option(
        help="snapkv: last tokens of the prompt, which vote.",
        rich_help_panel=_CACHE,
        show_default="the question, 16 to 64",
    ),
]
KernelSizeOption = Annotated[
    int | None,
    typer.Option(help="snapkv: width of the pool over the votes, odd.", rich_help_panel=_CACHE, show_default="7"),
]
PoolingOption = Annotated[
    Literal["avg", "max"] | None,
    typer.Option(help="snapkv: how votes are pooled.", rich_help_panel=_CACHE, show_default="avg"),
]

KVDirOption = Annotated[
    str | None,
    typer.Option(
        help="Folder of K/V, in which later calls find what this one reads of the documents; see `ragkv cache`.",
        rich_help_panel=_CACHE,
        show_default="none",
    ),
]

KVDiskBytesOption = Annotated[
    int | None,
    typer.Option(
        "--kv-disk-bytes",
        min=1,
        help="Most bytes of the folder of K/V; what was used longest ago makes room.",
        rich_help_panel=_CACHE,
        show_default="20 GiB",
    ),
]

RecomputeOption = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="Join the K/V of single documents in --kv-dir, and compute this share of their tokens anew, 0 "
        "to 1, or so many of them, a whole number above 1: approximate.",
        rich_help_panel=_CACHE,
        show_default="read the prompt as it is",
    ),
]

MustCiteOption = Annotated[
    bool, typer.Option("--must-cite", help="Hold small models to the form of a cited answer.", rich_help_panel=_REPLY)
]
MaxTokensOption = Annotated[int, typer.Option(help="Most tokens to write.", rich_help_panel=_REPLY)]
TemperatureOption = Annotated[
    float, typer.Option(help="0 takes the likeliest token, more is more random.", rich_help_panel=_REPLY)
]
SeedOption = Annotated[
    int | None,
    typer.Option(help="Makes a temperature above 0 repeatable.", rich_help_panel=_REPLY, show_default="random"),
]


def chosen(policy: PolicyName, **values: Any) -> "ChatOptions":
    """All options with their defaults, checked; None leaves an option at its default.

    Raises:
        ConfigError: a value is out of bounds, or the policy has no such option.
    """
    from ragkv.options import ChatOptions
    from ragkv.placement import choose_device, choose_dtype

    meaningless = {"full": (*_SNAPKV_ONLY, "max_capacity_prompt"), "streaming": _SNAPKV_ONLY, "snapkv": ()}[policy]
    for name in meaningless:
        if values.get(name) is not None:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} means nothing to --policy {policy}: leave it out, or use --policy snapkv")
    if values.get("kv_disk_bytes") is not None and values.get("kv_dir") is None:
        raise ConfigError("--kv-disk-bytes means nothing without a folder of K/V (--kv-dir): leave it out")
    options = ChatOptions().override(policy=policy, **values)
    choose_dtype(choose_device(options.device), options.dtype)  # else a typo would show up after a long download
    return options


def check_question(question: str) -> None:
    """Raise ConfigError for a question that is blank, not text, or rather a path whose question was forgotten."""
    if not question.strip():
        raise ConfigError("the question is empty: ask something, in quotes, after the paths")
    try:
        question.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"the question is not UTF-8 text (character {error.start}): check the terminal") from error
    if is_path(question):
        raise ConfigError(f"no question: {question!r} is a path; put the question behind the paths, in quotes")


def check_recompute(recompute: float | None, kv_dir: str | None) -> None:
    """Raise ConfigError for a share that is none, and for documents to be joined without a folder that has them."""
    from ragkv.document_blocks import DocumentBlocks

    if recompute is not None:
        DocumentBlocks(recompute)
    if recompute is not None and kv_dir is None:
        raise ConfigError(
            "--recompute joins the K/V of single documents: name their folder with --kv-dir, which "
            "`ragkv index --with-kv` fills"
        )


def is_path(argument: str) -> bool:
    """Whether an argument exists on the disk, or can only be meant as the name of a file."""
    from ragkv.formats import READERS

    try:
        path = Path(argument)
        return path.exists() or (path.suffix.lower() in READERS and not re.search(r"\s", argument))
    except (OSError, ValueError):  # a long question is no possible name
        return False
