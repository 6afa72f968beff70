"""Everything ragkv raises on purpose: one line that names the value, the bound and what to do."""


class RagkvError(Exception):
    """Base of all errors; its text is written for the person who made the call."""


class ConfigError(RagkvError, ValueError):
    """An option is outside its bounds or contradicts another one."""


class ModelError(RagkvError):
    """A model cannot be found, fetched, verified, converted or served."""


class DocumentError(RagkvError):
    """A document or an index cannot be read."""


class PromptTooLong(RagkvError, ValueError):
    """Prompt and reply together do not fit into the model's context."""


class MissingExtra(RagkvError, ImportError):
    """An optional package is absent; the text names the pip command that brings it."""


class ReplyError(RagkvError, ValueError):
    """A reply is not what was asked for, such as JSON that was cut off."""


class Cancelled(RagkvError):
    """The caller cancelled a generation before its first token."""


class ReplyTimeout(RagkvError, TimeoutError):
    """A reply took longer than the caller allowed."""
