"""Where a task's data comes from: a path, or a file of a dataset on the hub."""

import re
from pathlib import Path

from ragkv.errors import ConfigError, DocumentError

_HUB = "hub:"


def locate(data: str | None) -> Path | None:
    """The path of the data, fetched first if it is "hub:ORG/NAME/FILE"; None stays None.

    Raises:
        ConfigError: the name of the file is incomplete.
        DocumentError: it cannot be fetched.
    """
    if data is None or not data.startswith(_HUB):
        return None if data is None else Path(data).expanduser()
    named = re.fullmatch(r"([\w.-]+/[\w.-]+)/(.+\.jsonl?)", data.removeprefix(_HUB))
    if named is None:
        raise ConfigError(f"--data {data}: give hub:ORG/NAME/FILE with a .jsonl or .json file of that dataset")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(named[1], named[2], repo_type="dataset"))
    except Exception as error:  # the hub's client raises its own, requests' and the system's
        reason = " ".join(str(error).split())[:200]
        raise DocumentError(f"--data {data}: cannot be fetched ({reason}); download it and give its path") from error
