"""How long-running steps report: a callable told what is going on, how much is done, and of how much."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called as progress(description, done, total); done rises from 0 or 1 to total within one description."""
