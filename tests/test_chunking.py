import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragkv.chunking import split_document, split_text
from ragkv.documents import Document
from ragkv.errors import ConfigError

TEXTS = st.text(st.sampled_from("abcé漢🙂 .!?\n\t\"'。"), max_size=300) | st.text(max_size=80)


def count_words(text: str) -> int:
    """Like WordPiece: white space is free, long words are several tokens."""
    return sum((len(word) + 3) // 4 for word in text.split())


def count_bytes(text: str) -> int:
    """Like a byte-level tokenizer: white space counts, one character may be several tokens."""
    return len(text.encode("utf-8", "surrogatepass"))


@given(TEXTS, st.integers(1, 40))
def test_nothing_is_lost_and_no_passage_is_too_long(text: str, max_tokens: int) -> None:
    for count_tokens, limit in ((count_words, max_tokens), (count_bytes, max_tokens + 3)):
        passages = split_text(text, count_tokens, limit)
        assert "".join(passages) == text
        assert all(count_tokens(passage) <= limit for passage in passages)
        assert all(passages) or text == ""


@given(TEXTS, st.integers(1, 40))
def test_neighbours_do_not_fit_together(text: str, max_tokens: int) -> None:
    passages = split_text(text, count_words, max_tokens)
    assert all(count_words(a + b) > max_tokens for a, b in pairwise(passages))


def test_paragraphs_are_kept_whole_when_they_fit() -> None:
    paragraphs = [f"Paragraph {n}. It has two sentences.\n\n" for n in range(20)]
    passages = split_text("".join(paragraphs), count_words, 40)
    assert len(passages) > 3
    assert all(passage.startswith("Paragraph") and passage.endswith("\n\n") for passage in passages)


def test_sentences_are_kept_whole_when_they_fit() -> None:
    text = "".join(f"Sentence {n} is of no use. " for n in range(30))
    passages = split_text(text, count_words, 20)
    assert len(passages) > 5
    assert all(re.fullmatch(r"(Sentence \d+ is of no use\. )+", passage) for passage in passages)


def test_words_are_kept_whole_when_they_fit() -> None:
    words = [f"word{n}" for n in range(100)]
    passages = split_text(" ".join(words), count_words, 7)
    assert [word for passage in passages for word in passage.split()] == words


def test_text_of_the_longest_length_is_not_cut_and_one_token_more_is() -> None:
    assert split_text("a b c d", count_words, 4) == ["a b c d"]
    assert split_text("a b c d e", count_words, 4) == ["a b ", "c d e"]


def test_short_text_far_beyond_the_character_bound_stays_whole() -> None:
    text = "a" + " " * 5000 + "b"
    assert split_text(text, count_words, 2) == [text]


def test_long_text_of_one_word_needs_no_deep_recursion() -> None:
    passages = split_text("x" * 200_000, len, 50)
    assert max(map(len, passages)) <= 50
    assert len(passages) < 8000


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_limit_below_one_is_refused(max_tokens: int) -> None:
    with pytest.raises(ConfigError, match=f"max_tokens={max_tokens} must be at least 1"):
        split_text("text", count_words, max_tokens)


def test_limit_below_one_character_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_tokens=3 is less than the 4 tokens of '🙂'"):
        split_text("ab🙂", count_bytes, 3)


def test_document_that_fits_is_returned_as_it_is() -> None:
    document = Document("d", "a b", "title")
    assert split_document(document, count_words, 2) == [document]


def test_passages_keep_what_a_citation_needs() -> None:
    document = Document("d", "One two three. Four five six. Seven.", "title", "source", {"year": 1999})
    passages = split_document(document, count_words, 4)
    assert [passage.id for passage in passages] == ["d#1", "d#2", "d#3"]
    for passage in passages:
        assert (passage.title, passage.source, passage.metadata["year"]) == ("title", "source", 1999)
        assert passage.metadata["document_id"] == "d"
        start, end = passage.metadata["passage_start"], passage.metadata["passage_end"]
        assert document.text[start:end] == passage.text
