"""Streaming text: equal to decoding at once, whole characters only, and no trace of a stop string."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragkv.chat import encode_untrusted
from ragkv.detokenize import TextStream
from tiny import VOCABULARY, tiny_tokenizer

TOKENS = st.lists(st.integers(0, VOCABULARY - 1), max_size=40)
REPLACEMENT = "\ufffd"


def _stream(ids: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    """The pieces shown, up to a stop string, as an engine would push them."""
    stream = TextStream(tiny_tokenizer(), stop)
    pieces = []
    for token in ids:
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    pieces.append(stream.finish())
    return pieces, stream


def _encode(text: str) -> list[int]:
    return encode_untrusted(tiny_tokenizer(), text)  # a special token that a text spells would not be shown


@given(TOKENS)
def test_any_tokens_stream_to_what_they_decode_to(ids: list[int]) -> None:
    pieces, stream = _stream(ids)
    assert "".join(pieces) == stream.text == tiny_tokenizer().decode(ids, skip_special_tokens=True)


@given(TOKENS)
def test_white_space_before_the_first_word_can_be_left_out(ids: list[int]) -> None:
    stream = TextStream(tiny_tokenizer(), strip_start=True)
    pieces = [*map(stream.push, [*_encode(" \n "), *ids]), stream.finish()]
    assert "".join(pieces) == stream.text == tiny_tokenizer().decode(ids, skip_special_tokens=True).lstrip()


@given(st.text(max_size=30))
def test_characters_are_shown_whole(text: str) -> None:
    """The tokenizer has no tokens for them, so that most of these characters are spread over several."""
    pieces, stream = _stream(_encode(text))
    assert "".join(pieces) == stream.text == text
    if REPLACEMENT not in text:
        assert all(REPLACEMENT not in piece for piece in pieces)


def test_a_character_waits_for_its_last_token() -> None:
    ids = _encode("a😀b")
    assert len(ids) == 6
    pieces, _ = _stream(ids)
    assert pieces == ["a", "", "", "", "😀", "b", ""]


def test_half_a_character_at_the_end_is_replaced() -> None:
    pieces, stream = _stream(_encode("a😀")[:-1])
    assert pieces == ["a", "", "", "", REPLACEMENT]
    assert stream.text == "a" + REPLACEMENT


def test_special_tokens_are_not_shown_and_added_ones_are() -> None:
    ids = [*_encode("a"), 2, *_encode("b"), tiny_tokenizer().convert_tokens_to_ids("<tool_call>")]
    assert _stream(ids)[1].text == "ab<tool_call>"


@given(st.text("abcx", max_size=20), st.lists(st.text("abcx", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stop_strings_end_the_text_before_them(text: str, stop: list[str]) -> None:
    """One character is one token here, so the text ends before the stop string that is complete first."""
    pieces, stream = _stream([_encode(letter)[0] for letter in text], tuple(stop))
    ends = [(text.index(s) + len(s), text.index(s)) for s in stop if s in text]
    first = min((end for end, _ in ends), default=None)
    expected = text if first is None else text[: min(start for end, start in ends if end == first)]
    assert "".join(pieces) == stream.text == expected
    assert stream.stopped == (first is not None)


@given(TOKENS, st.lists(st.text(min_size=1, max_size=3), max_size=3))
def test_no_stop_string_is_ever_shown(ids: list[int], stop: list[str]) -> None:
    pieces, stream = _stream(ids, tuple(stop))
    whole = tiny_tokenizer().decode(ids, skip_special_tokens=True)
    assert "".join(pieces) == stream.text
    assert not any(s in stream.text for s in stop)
    assert whole.startswith(stream.text)
    assert stream.stopped == any(s in whole for s in stop)


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("The answer\nQuestion", ("\nQuestion",), "The answer"),  # straddles tokens
        ("The answer\nQuest", ("\nQuestion",), "The answer\nQuest"),  # held back, then released
        ("The answer\nQuest?", ("\nQuestion",), "The answer\nQuest?"),
        ("end", ("end",), ""),
        ("the end", ("end",), "the "),  # at the very end
        ("xab", ("ab", "abc"), "x"),  # one is the beginning of the other
        ("xabc", ("abc", "ab"), "x"),
        ("aab", ("ab",), "a"),  # the first a is no beginning
        ("ab é", ("é",), "ab "),  # a stop string of several tokens that are no characters
        ("one. two.", (".", "two"), "one"),
        ("a, b; c", (";", ","), "a"),
    ],
)
def test_stop_strings(text: str, stop: tuple[str, ...], expected: str) -> None:
    pieces, stream = _stream(_encode(text), stop)
    assert "".join(pieces) == stream.text == expected
    assert stream.stopped == any(s in text for s in stop)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    letters = [_encode(letter)[0] for letter in "xaby"]
    assert _stream(letters, ("abc",))[0] == ["x", "", "", "aby", ""]
    assert _stream(letters, ("z",))[0] == ["x", "a", "b", "y", ""]


def test_a_stop_string_that_only_the_end_completes_counts() -> None:
    """The last character is half one: only finishing turns it into the replacement that the caller stops at."""
    pieces, stream = _stream(_encode("a😀")[:-1], (REPLACEMENT,))
    assert "".join(pieces) == "a"
    assert stream.stopped
