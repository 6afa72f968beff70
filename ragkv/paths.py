"""Where ragkv keeps what it fetched or computed: one folder, moved by the environment variable RAGKV_HOME."""

import os
from pathlib import Path

import platformdirs


def home() -> Path:
    """The cache folder (not created here): $RAGKV_HOME, else the user's cache folder of the platform."""
    override = os.environ.get("RAGKV_HOME")
    return Path(override).expanduser() if override else Path(platformdirs.user_cache_dir("ragkv", appauthor=False))
