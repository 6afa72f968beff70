import json
import os
from io import BytesIO
from pathlib import Path

import pytest
from pypdf import PdfWriter

from ragkv.documents import Document
from ragkv.errors import DocumentError
from ragkv.readers import read_paths

SAMPLE = Path(__file__).parents[1] / "evals/ragkv_evals/data/hotpotqa_sample.jsonl"


def pdf_bytes(*pages: str) -> bytes:
    """A PDF with one line of Helvetica on each page, written by hand."""
    kids = " ".join(f"{4 + 2 * n} 0 R" for n in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    resources = "/Resources << /Font << /F1 3 0 R >> >>"
    for n, text in enumerate(pages):
        stream = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET" if text else ""
        objects += [
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {5 + 2 * n} 0 R {resources} >>",
            f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream",
        ]
    data, offsets = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        offsets.append(len(data))
        data += f"{number} 0 obj\n{body}\nendobj\n".encode()
    table = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    trailer = f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{len(data)}\n%%EOF\n"
    return data + f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}{trailer}".encode()


def write(path: Path, data: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def read_one(path: Path) -> Document:
    (document,) = read_paths([path])
    return document


def failure(*paths: Path) -> str:
    with pytest.raises(DocumentError) as error:
        read_paths(paths)
    assert "\n" not in str(error.value)
    return str(error.value)


class TestText:
    def test_whole_text_titled_by_the_file_name(self, tmp_path: Path) -> None:
        path = write(tmp_path / "notes.TXT", "\ufeffEins\r\nZwei – drei\n")
        document = read_one(path)
        assert (document.text, document.title, document.source) == ("Eins\nZwei – drei\n", "notes", path.as_posix())

    def test_markdown_is_titled_by_its_first_heading(self, tmp_path: Path) -> None:
        assert read_one(write(tmp_path / "a.md", "\n# The *Title* #\n\nText")).title == "The *Title*"
        assert read_one(write(tmp_path / "b.md", "Text\n# Later")).title == "b"
        assert read_one(write(tmp_path / "c.md", "#hashtag")).title == "c"

    def test_other_encodings_are_refused_with_the_byte(self, tmp_path: Path) -> None:
        path = write(tmp_path / "latin.txt", "caf\u00e9".encode("latin-1"))
        assert failure(path) == f"{path}: not UTF-8 text (byte 3): save it as UTF-8"

    def test_binary_content_is_refused(self, tmp_path: Path) -> None:
        assert "binary or UTF-16 file (NUL at byte 3)" in failure(write(tmp_path / "a.txt", b"abc\0def"))
        assert "binary or UTF-16 file (NUL at byte 1)" in failure(write(tmp_path / "b.md", "ab".encode("utf-16-le")))

    @pytest.mark.parametrize("name", ["a.txt", "a.md", "a.html", "a.jsonl"])
    def test_empty_document_is_refused(self, tmp_path: Path, name: str) -> None:
        path = write(tmp_path / name, " \n\n")
        assert failure(path) == f"{path}: empty document: fill or remove it"


class TestHtml:
    def test_visible_text_with_blocks_on_lines_of_their_own(self, tmp_path: Path) -> None:
        page = """<!DOCTYPE html><html><head><title>Fish &amp; chips</title><style>p {color: red}</style></head>
        <body><script>var hidden = "<p>no</p>";</script><!-- neither this -->
        <h1>Menu</h1><p>Best <b>cod</b>, caf&eacute;&nbsp;style,
        with   peas.</p><ul><li>one</li><li>two<br>lines</li></ul>
        <table><tr><td>a</td><td>b</td></tr><tr><td>c</td></tr></table></body></html>"""
        document = read_one(write(tmp_path / "menu.html", page))
        assert document.title == "Fish & chips"
        assert document.text == "Menu\n\nBest cod, café style, with peas.\n\none\ntwo\nlines\n\na b\nc"

    def test_preformatted_text_keeps_its_blanks(self, tmp_path: Path) -> None:
        page = "<p>Code:</p><pre>def f():\n    return  1\n\ttab</pre>"
        assert read_one(write(tmp_path / "a.htm", page)).text == "Code:\n\ndef f():\n    return  1\n    tab"

    def test_page_without_a_title_is_titled_by_the_file_name(self, tmp_path: Path) -> None:
        assert read_one(write(tmp_path / "a.html", "<p>x")).title == "a"

    def test_declared_character_set_is_honoured(self, tmp_path: Path) -> None:
        page = '<meta charset="iso-8859-1"><p>caf\u00e9</p>'.encode("latin-1")
        assert read_one(write(tmp_path / "a.html", page)).text == "café"
        assert "not UTF-8 text" in failure(write(tmp_path / "b.html", page.replace(b"<meta", b"<m")))

    @pytest.mark.parametrize("name", ["klingon", "hex", "utf\0", "undefined"])
    def test_unknown_character_set_is_refused(self, tmp_path: Path, name: str) -> None:
        path = write(tmp_path / "a.html", f'<meta charset="{name}">x')
        assert f"unknown character set {name!r}" in failure(path)

    def test_deeply_nested_page_is_read(self, tmp_path: Path) -> None:
        assert read_one(write(tmp_path / "a.html", "<div>" * 5000 + "core")).text == "core"


class TestPdf:
    def test_pages_in_order(self, tmp_path: Path) -> None:
        document = read_one(write(tmp_path / "paper.pdf", pdf_bytes("First page", "", "Third page")))
        assert document.text.split() == ["First", "page", "Third", "page"]
        assert document.title == "paper"

    def test_title_of_the_file_is_taken(self, tmp_path: Path) -> None:
        writer = PdfWriter(clone_from=BytesIO(pdf_bytes("Text")))
        writer.add_metadata({"/Title": "A study"})
        writer.write(tmp_path / "a.pdf")
        assert read_one(tmp_path / "a.pdf").title == "A study"

    def test_scanned_pages_are_refused(self, tmp_path: Path) -> None:
        assert "PDF without text (scanned pages?): run it through OCR" in failure(
            write(tmp_path / "a.pdf", pdf_bytes(""))
        )

    def test_encrypted_file_is_refused(self, tmp_path: Path) -> None:
        writer = PdfWriter(clone_from=BytesIO(pdf_bytes("Secret")))
        writer.encrypt("password", algorithm="RC4-128")
        writer.write(tmp_path / "a.pdf")
        assert "encrypted PDF: save a copy without a password" in failure(tmp_path / "a.pdf")

    def test_file_that_opens_without_a_password_is_read(self, tmp_path: Path) -> None:
        writer = PdfWriter(clone_from=BytesIO(pdf_bytes("Open")))
        writer.encrypt("", "owner", algorithm="RC4-128")
        writer.write(tmp_path / "a.pdf")
        assert read_one(tmp_path / "a.pdf").text == "Open"

    @pytest.mark.parametrize("data", [b"", b"not a pdf", b"%PDF-1.4\nnonsense\n%%EOF", pdf_bytes("Text")[:300]])
    def test_damaged_file_is_refused(self, tmp_path: Path, data: bytes) -> None:
        assert "damaged PDF (" in failure(write(tmp_path / "a.pdf", data))


class TestJsonl:
    def test_rows_with_all_fields(self, tmp_path: Path) -> None:
        rows = [{"id": "a", "text": "one", "title": "t", "source": "s", "year": 1999}, {"text": "two\u2028still two"}]
        text = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
        path = write(tmp_path / "rows.jsonl", f"\n{text}\r\n\n")
        first, second = read_paths([path])
        assert first == Document("a", "one", "t", "s", {"year": 1999})
        assert (second.text, second.title, second.source) == ("two\u2028still two", "", path.as_posix())

    @pytest.mark.parametrize(
        ("line", "told"),
        [
            ("{", "not JSON ("),
            ('{"text": "x", "score": NaN}', "not JSON ("),
            ("[" * 200_000, "not JSON ("),
            ('["text"]', "not a JSON object"),
            ("{}", 'no "text" (a string)'),
            ('{"text": " "}', "empty document"),
            ('{"text": "x\\ud800"}', "half a surrogate pair"),
            ('{"paragraphs": "x"}', '"paragraphs" must be objects'),
            ('{"paragraphs": [{"title": "t"}]}', '"paragraphs" must be objects'),
            ('{"paragraphs": [{"title": "t", "sentences": [1]}]}', '"sentences" must be strings'),
            ('{"paragraphs": [{"title": 1, "sentences": ["x"]}]}', '"title" is 1'),
        ],
    )
    def test_bad_row_is_named_with_its_line(self, tmp_path: Path, line: str, told: str) -> None:
        path = write(tmp_path / "rows.jsonl", '{"text": "good"}\n\n' + line)
        assert failure(path).startswith(f"{path}, line 3: {told}")

    def test_one_id_for_two_texts_is_refused(self, tmp_path: Path) -> None:
        path = write(tmp_path / "rows.jsonl", '{"id": "a", "text": "x"}\n{"id": "a", "text": "y"}')
        assert 'two documents have the id "a"' in failure(path)

    def test_hotpotqa_row_is_a_document_for_each_different_paragraph(self, tmp_path: Path) -> None:
        shared = {"title": "T", "sentences": ["One.", " Two."]}
        rows = [{"paragraphs": [shared, {"title": "U", "sentences": ["Three."]}]}, {"paragraphs": [shared]}]
        path = write(tmp_path / "rows.jsonl", "\n".join(map(json.dumps, rows)))
        assert [(d.title, d.text) for d in read_paths([path])] == [("T", "One. Two."), ("U", "Three.")]

    def test_row_with_text_and_paragraphs_is_one_document(self, tmp_path: Path) -> None:
        document = read_one(write(tmp_path / "rows.jsonl", '{"text": "x", "paragraphs": 3}'))
        assert (document.text, document.metadata) == ("x", {"paragraphs": 3})

    def test_bundled_sample_is_a_collection_with_the_gold_paragraphs(self) -> None:
        rows = [json.loads(line) for line in SAMPLE.read_text("utf-8").split("\n") if line]
        titles = {document.title for document in read_paths([SAMPLE])}
        assert len(rows) == 50
        assert len(titles) == 500
        assert all(title in titles for row in rows for title, _ in row["supporting"])


class TestPaths:
    def test_folder_is_read_in_sorted_order_without_hidden_and_other_files(self, tmp_path: Path) -> None:
        for name in ["b/2.txt", "b/1.md", "a.txt", "B.txt", ".hidden.txt", ".git/x.txt", "b/.h/y.txt", "image.png"]:
            write(tmp_path / name, name)
        assert [document.text for document in read_paths([tmp_path])] == ["B.txt", "a.txt", "b/1.md", "b/2.txt"]

    def test_order_of_the_arguments_is_kept_and_nothing_is_read_twice(self, tmp_path: Path) -> None:
        b, a = write(tmp_path / "b.txt", "b"), write(tmp_path / "a.txt", "a")
        (tmp_path / "link.txt").symlink_to(a)
        assert [document.text for document in read_paths([b, tmp_path, a])] == ["b", "a"]

    def test_single_path_is_taken_for_a_list_of_one(self, tmp_path: Path) -> None:
        assert [document.text for document in read_paths(str(write(tmp_path / "b.txt", "b")))] == ["b"]

    def test_links_out_of_the_folder_are_not_followed(self, tmp_path: Path) -> None:
        secret = write(tmp_path / "secret/passwords.txt", "secret")
        write(tmp_path / "docs/a.txt", "a")
        (tmp_path / "docs/file.txt").symlink_to(secret)
        (tmp_path / "docs/folder").symlink_to(secret.parent)
        (tmp_path / "docs/loop").symlink_to(tmp_path / "docs")
        with pytest.warns(UserWarning, match="leaves .*, not followed") as warned:
            assert [document.text for document in read_paths([tmp_path / "docs"])] == ["a"]
        assert len(warned) == 2

    def test_link_that_is_named_itself_is_followed(self, tmp_path: Path) -> None:
        write(tmp_path / "real/a.txt", "a")
        (tmp_path / "link").symlink_to(tmp_path / "real")
        assert read_one(tmp_path / "link").text == "a"

    @pytest.mark.parametrize("target", ["nowhere.txt", "broken.txt"])
    def test_broken_link_in_a_folder_is_an_error(self, tmp_path: Path, target: str) -> None:
        (tmp_path / "broken.txt").symlink_to(tmp_path / target)
        assert "broken.txt: not a regular file, or a broken link" in failure(tmp_path)

    def test_pipe_in_a_folder_is_an_error_and_does_not_hang(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe.txt")
        assert "pipe.txt: not a regular file" in failure(tmp_path)

    def test_missing_path(self, tmp_path: Path) -> None:
        assert failure(tmp_path / "no.txt") == f"{tmp_path / 'no.txt'}: no such file or folder: check the path"

    def test_no_paths(self) -> None:
        assert failure() == "no documents given: name files or folders"

    def test_folder_with_nothing_to_read_names_the_suffixes(self, tmp_path: Path) -> None:
        write(tmp_path / "image.png", b"x")
        assert failure(tmp_path).endswith("no files to read: put .txt, .md, .html, .htm, .pdf, .jsonl files there")

    def test_unknown_suffix_is_refused_when_named(self, tmp_path: Path) -> None:
        assert 'cannot read ".docx" files: convert it to one of .txt' in failure(write(tmp_path / "a.docx", b"x"))

    def test_unreadable_file_in_a_folder_stops_the_reading(self, tmp_path: Path) -> None:
        write(tmp_path / "a.txt", "a")
        write(tmp_path / "b.pdf", b"damaged")
        assert failure(tmp_path).startswith(f"{tmp_path / 'b.pdf'}: damaged PDF")

    def test_unreadable_file_is_skipped_with_a_warning_on_request(self, tmp_path: Path) -> None:
        write(tmp_path / "a.txt", "a")
        write(tmp_path / "b.pdf", b"damaged")
        with pytest.warns(UserWarning, match=r"b\.pdf: damaged PDF"):
            documents = read_paths([tmp_path], skip_unreadable=True)
        assert [document.text for document in documents] == ["a"]

    def test_nothing_but_unreadable_files_is_an_error(self, tmp_path: Path) -> None:
        write(tmp_path / "b.pdf", b"damaged")
        with pytest.warns(UserWarning), pytest.raises(DocumentError, match="none of 1 files could be read"):  # noqa: PT030
            read_paths([tmp_path], skip_unreadable=True)

    def test_progress_counts_files(self, tmp_path: Path) -> None:
        for name in ("a.txt", "b.txt"):
            write(tmp_path / name, name)
        calls: list[tuple[str, int, int]] = []
        read_paths([tmp_path], lambda *call: calls.append(call))
        assert calls == [("reading", 1, 2), ("reading", 2, 2)]
