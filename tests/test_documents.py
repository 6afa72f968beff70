import json

import pytest

from ragkv.documents import Document, parse_row, unique
from ragkv.errors import DocumentError


def test_id_depends_on_source_title_and_text_only() -> None:
    first = Document("", "text", "title", "source")
    assert first.id == Document("", "text", "title", "source", {"page": 1}).id
    others = [Document("", "text", "title"), Document("", "text", "", "source"), Document("", "x", "title", "source")]
    assert len({first.id, *(other.id for other in others)}) == 4


def test_moving_a_border_between_fields_changes_the_id() -> None:
    assert Document("", "c", "ab").id != Document("", "bc", "a").id


def test_id_is_pinned_across_versions_because_caches_and_citations_keep_it() -> None:
    assert Document("", "Ångström", "t", "s").id == "4a39503db4afdb93"


def test_given_id_is_kept() -> None:
    assert Document("mine", "text").id == "mine"


def test_documents_with_metadata_can_be_hashed() -> None:
    assert len({Document("a", "x", metadata={"k": [1]}), Document("a", "x", metadata={"k": [1]})}) == 1


def test_row_survives_json() -> None:
    document = Document("a", "x\u2028y", "t", "s", {"year": 1999, "tags": ["p", None]})
    assert parse_row(json.loads(json.dumps(document.to_row())), "here") == document


def test_unknown_fields_and_the_metadata_object_become_metadata() -> None:
    row = {"text": "x", "year": 1999, "metadata": {"page": 2}, "id": 7, "title": None}
    assert parse_row(row, "here", "file") == Document("7", "x", "", "file", {"page": 2, "year": 1999})


def test_metadata_that_is_no_object_is_an_ordinary_field() -> None:
    assert parse_row({"text": "x", "metadata": "m"}, "here").metadata == {"metadata": "m"}


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({}, 'here: no "text" (a string)'),
        ({"text": 3}, 'here: no "text" (a string)'),
        ({"text": "x", "title": ["t"]}, 'here: "title" is ["t"]'),
        ({"text": "x", "id": True}, 'here: "id" is true'),
        ({"text": "x", "source": 1.5}, 'here: "source" is 1.5'),
    ],
)
def test_wrong_field_is_named(row: dict, told: str) -> None:
    with pytest.raises(DocumentError) as error:
        parse_row(row, "here")
    assert str(error.value).startswith(told)


def test_unique_keeps_order_and_drops_exact_repeats() -> None:
    a, b = Document("b", "1"), Document("a", "2")
    assert unique([a, b, Document("b", "1")]) == [a, b]


def test_one_id_for_two_documents_is_an_error_that_names_both() -> None:
    with pytest.raises(DocumentError, match=r'the id "a" \(one\.jsonl and two\.jsonl\)'):
        unique([Document("a", "1", source="one.jsonl"), Document("a", "2", source="two.jsonl")])
