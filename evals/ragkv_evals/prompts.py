"""From an example to the prompt that a model reads, and how many tokens its parts take there."""

from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from ragkv.budget import document_tokens
from ragkv.chat import Prompt, encode_chat, encode_untrusted
from ragkv.documents import Document
from ragkv.messages import Message, Segment
from ragkv.prompt import CitePrompt
from ragkv_evals.tasks.base import Example

_MORE_DIGITS = 2  # of a document's number beyond the first


def encode(tokenizer: PreTrainedTokenizerBase, example: Example) -> Prompt:
    """The example as a chat for the model's template, with documents and question marked, and the reply begun."""
    prompt = encode_chat(tokenizer, _messages(example))
    start = encode_untrusted(tokenizer, example.reply_start)
    return replace(prompt, ids=(*prompt.ids, *start))


def _messages(example: Example) -> list[Message]:
    if example.prompt is not None:
        return example.prompt.messages(example.question, example.documents)
    texts = [Segment(document.text, "document", n) for n, document in enumerate(example.documents, 1) if document.text]
    return [{"role": "user", "content": [*texts, Segment(example.question, "question")]}]


@dataclass(frozen=True)
class PromptCounter:
    """Counts as `encode` encodes."""

    tokenizer: PreTrainedTokenizerBase

    def document(self, document: Document) -> int:
        return document_tokens(self.tokenizer, document) + _MORE_DIGITS

    def text(self, text: str) -> int:
        return len(encode_untrusted(self.tokenizer, text))

    def frame(self, question: str, prompt: CitePrompt | None) -> int:
        return len(encode(self.tokenizer, Example("", question, (), (), (), prompt=prompt)))
