"""Packages that only evaluations use, each in an extra of ragkv."""

from importlib.util import find_spec

from ragkv.errors import MissingExtra

_INSTALL = {
    "scipy": "pip install 'ragkv[evals]'",
    "matplotlib": "pip install 'ragkv[evals]'",
    "ray": "pip install 'ragkv[ray]'",
}


def need(package: str) -> None:
    """Raise a MissingExtra that names the pip command if the package is not installed."""
    if find_spec(package) is None:
        raise MissingExtra(f"{package} is not installed: {_INSTALL[package]}")
