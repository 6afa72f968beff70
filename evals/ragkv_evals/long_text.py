"""Token ids of real text, of any length: the paragraphs of the bundled sample in a seeded order, again and again."""

import json
import random
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ragkv.errors import DocumentError

SAMPLE = Path(__file__).parent / "data" / "hotpotqa_sample.jsonl"


def long_text(tokenizer: PreTrainedTokenizerBase, length: int, source: Path | None = None, seed: int = 0) -> list[int]:
    """Exactly `length` token ids.

    Args:
        source: a text file whose paragraphs are separated by blank lines; None takes the bundled HotpotQA sample.
        seed: fixes the order of the paragraphs; each round through them is shuffled anew.

    Raises:
        DocumentError: the file cannot be read or holds no text.
    """
    paragraphs = _read_sample(SAMPLE) if source is None else _read_text(source)
    order, ids = random.Random(seed), list[int]()  # noqa: S311 (an order, not a secret)
    while len(ids) < length:
        for paragraph in order.sample(paragraphs, len(paragraphs)):
            ids += tokenizer.encode(paragraph + "\n\n", add_special_tokens=False)
            if len(ids) >= length:
                break
    return ids[:length]


def _read_sample(path: Path) -> list[str]:
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    paragraphs = (paragraph for record in records for paragraph in record["paragraphs"])
    return list(dict.fromkeys(f"{item['title']}\n{''.join(item['sentences'])}" for item in paragraphs))


def _read_text(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DocumentError(f"cannot read {path} as text ({error}); give a UTF-8 text file") from error
    paragraphs = [paragraph.strip() for paragraph in text.split("\n\n") if paragraph.strip()]
    if not paragraphs:
        raise DocumentError(f"{path} is empty: give a file with some text")
    return paragraphs
