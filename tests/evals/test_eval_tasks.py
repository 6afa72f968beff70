"""What tasks make of small files in the formats of the real ones: document sets, gold numbers, prompts, scores."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from ragkv.documents import Document
from ragkv.errors import DocumentError
from ragkv.prompt import CitePrompt
from ragkv_evals.tasks import TASKS
from ragkv_evals.tasks.base import Example, Layout, read_rows
from ragkv_evals.tasks.bioasq import passage
from ragkv_evals.tasks.citation import PROMPT
from ragkv_evals.tasks.question import drawn


@dataclass(frozen=True)
class Words:
    """Counts words: a document's, and two for its header; ten around a question."""

    def document(self, document: Document) -> int:
        return len(document.text.split()) + 2

    def text(self, text: str) -> int:
        return len(text.split())

    def frame(self, question: str, prompt: CitePrompt | None) -> int:
        return len(question.split()) + 10

    def prompt(self, example: Example) -> int:
        return self.frame(example.question, example.prompt) + sum(map(self.document, example.documents))


WORDS = Words()


def layout(context_tokens: int | None = None, depth: float | None = None, seed: int = 0) -> Layout:
    return Layout(context_tokens, depth, seed, WORDS)


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def hotpot_rows(questions: int, paragraphs: int = 4) -> list[dict[str, Any]]:
    """Every question has two gold paragraphs, the second and the last; all paragraphs have 8 words."""
    return [
        {
            "id": f"q{q}",
            "question": f"What is {q}?",
            "answer": f"answer {q}",
            "type": "bridge",
            "level": "hard",
            "supporting": [[f"title {q}-1", 0], [f"title {q}-{paragraphs - 1}", 0], [f"title {q}-1", 1]],
            "paragraphs": [
                {"title": f"title {q}-{p}", "sentences": ["Four words are here.", f" Others say {q} {p}."]}
                for p in range(paragraphs)
            ],
        }
        for q in range(questions)
    ]


def titles(example: Example) -> list[str]:
    return [document.title for document in example.documents]


def shared(context_tokens: int | None, seed: int = 0) -> Layout:
    return Layout(context_tokens, None, seed, WORDS, shared=True)


def test_questions_share_sets_of_documents(tmp_path: Path) -> None:
    """Ten words a paragraph, four paragraphs a question, 13 words around: three questions fit into 140 words."""
    cases = TASKS["hotpotqa"].open(write(tmp_path / "dev.jsonl", hotpot_rows(9)))
    examples = [cases.build(index, shared(140)) for index in range(9)]
    sets: dict[tuple[str, ...], list[int]] = {}
    for index, example in enumerate(examples):
        sets.setdefault(tuple(titles(example)), []).append(index)
        assert {titles(example)[number - 1] for number in example.gold} == {f"title {index}-1", f"title {index}-3"}
        assert WORDS.prompt(example) <= 140
    assert sorted(map(len, sets.values())) == [3, 3, 3]
    order = drawn(9, 0)
    assert sorted(map(sorted, sets.values())) == sorted(sorted(order[n : n + 3]) for n in (0, 3, 6))
    again = TASKS["hotpotqa"].open(tmp_path / "dev.jsonl")
    assert again.build(order[-1], shared(140)) == examples[order[-1]]  # asked for in another order
    assert titles(again.build(0, shared(140, seed=1))) != titles(examples[0])


def test_what_shared_sets_have_left_is_filled(tmp_path: Path) -> None:
    cases = TASKS["hotpotqa"].open(write(tmp_path / "dev.jsonl", hotpot_rows(9)))
    example = cases.build(0, shared(90))
    assert len(example.documents) == 7  # one question, and three paragraphs of others
    assert {f"title 0-{p}" for p in range(4)} < set(titles(example))
    short = cases.build(0, shared(45))  # the gold ones, and of the others what fits
    assert len(short.documents) == 3
    assert {"title 0-1", "title 0-3"} < set(titles(short))
    with pytest.raises(DocumentError, match="gold documents do not fit into --context-tokens 30"):
        cases.build(0, shared(30))
    with pytest.raises(DocumentError, match="shared document sets need a length"):
        cases.build(0, shared(None))


def test_evidence_in_other_words_is_not_shared(tmp_path: Path) -> None:
    """Two questions over one title with another text: each must find its own."""
    rows = hotpot_rows(2)
    for row in rows:
        row["paragraphs"][1]["title"] = "common"
        row["supporting"] = [["common", 0]]
    cases = TASKS["hotpotqa"].open(write(tmp_path / "dev.jsonl", rows))
    for index in range(2):
        example = cases.build(index, shared(200))
        (gold,) = example.gold
        assert example.documents[gold - 1].text.endswith(f"say {index} 1.")


def test_documents_of_one_title_are_all_there(tmp_path: Path) -> None:
    """As in MuSiQue: evidence shares its title with evidence and with what misleads, in one question."""
    rows = hotpot_rows(9)
    paragraphs = [
        {
            "title": f"title {n // 2}",
            "text": f"Eight words that stand here for number {n}.",
            "is_supporting": n in (0, 2, 3),
        }
        for n in range(4)
    ]
    asked = {"question": "Who is it?", "answer": "G", "answer_aliases": []}
    musique = [{"id": f"2hop__{q}", **asked, "paragraphs": paragraphs} for q in range(2)]
    padding = [
        {
            "id": row["id"],
            **asked,
            "paragraphs": [{"title": p["title"], "text": p["title"], "is_supporting": True} for p in row["paragraphs"]],
        }
        for row in rows
    ]
    cases = TASKS["musique"].open(write(tmp_path / "m.jsonl", [*musique, *padding]))
    for tokens in (60, 200):  # the first of a set, and one that joins it
        for index in range(2):
            example = cases.build(index, shared(tokens))
            texts = [document.text for document in example.documents]
            assert {texts[number - 1][-2] for number in example.gold} == {"0", "2", "3"}
            assert (
                sum(text.startswith("Eight") for text in texts)
                == len(set(texts) & {p["text"] for p in paragraphs})
                == 4
            )
            assert WORDS.prompt(example) <= tokens


def test_evidence_is_never_lost_to_another_questions_text(tmp_path: Path) -> None:
    """A question whose evidence shares its title with its own distractor, which an earlier question brought."""
    texts = ("The first text of them.", "Another text of that title.")
    asked = {"question": "Who is it?", "answer": "G", "answer_aliases": []}
    rows = [
        {"id": "a", **asked, "paragraphs": [{"title": "T", "text": texts[1], "is_supporting": True}]},
        {
            "id": "b",
            **asked,
            "paragraphs": [{"title": "T", "text": text, "is_supporting": text == texts[0]} for text in texts],
        },
    ]
    cases = TASKS["musique"].open(write(tmp_path / "m.jsonl", rows))
    for index, text in ((0, texts[1]), (1, texts[0])):
        example = cases.build(index, shared(200))
        assert [example.documents[number - 1].text for number in example.gold] == [text]


def test_hotpotqa_without_a_length_is_the_question_with_its_own_paragraphs(tmp_path: Path) -> None:
    cases = TASKS["hotpotqa"].open(write(tmp_path / "dev.jsonl", hotpot_rows(3)))
    assert cases.ids == ["q0", "q1", "q2"]
    example = cases.build(1, layout())
    assert sorted(titles(example)) == [f"title 1-{p}" for p in range(4)]
    assert {titles(example)[number - 1] for number in example.gold} == {"title 1-1", "title 1-3"}
    assert example.answers == (("answer 1",),)
    assert example.documents[0].text.startswith("Four words are here. Others say 1 ")


def test_hotpotqa_is_padded_to_the_length_with_other_questions_paragraphs(tmp_path: Path) -> None:
    cases = TASKS["hotpotqa"].open(write(tmp_path / "dev.jsonl", hotpot_rows(30)))
    example = cases.build(7, layout(300))
    assert 300 - 10 < WORDS.prompt(example) <= 300  # a paragraph is 10
    assert len(set(titles(example))) == len(example.documents) == 28
    assert {f"title 7-{p}" for p in range(4)} <= set(titles(example))
    assert {titles(example)[number - 1] for number in example.gold} == {"title 7-1", "title 7-3"}
    assert not titles(example)[0].startswith("title 7") or not titles(example)[1].startswith("title 7")


def test_documents_are_drawn_by_the_seed_and_the_question(tmp_path: Path) -> None:
    open_task, path = TASKS["hotpotqa"].open, write(tmp_path / "dev.jsonl", hotpot_rows(30))
    first = open_task(path).build(3, layout(200))
    cases = open_task(path)
    cases.build(5, layout(200))  # what was built before makes no difference
    assert cases.build(3, layout(200)) == first
    assert titles(cases.build(3, layout(200, seed=1))) != titles(first)
    # A longer prompt holds all of a shorter one's documents.
    assert set(titles(first)) < set(titles(cases.build(3, layout(250))))


def test_hotpotqa_as_its_authors_publish_it(tmp_path: Path) -> None:
    (row,) = hotpot_rows(1)
    theirs = {name: row[name] for name in ("question", "answer", "type", "level")} | {
        "_id": row["id"],
        "supporting_facts": row["supporting"],
        "context": [[paragraph["title"], paragraph["sentences"]] for paragraph in row["paragraphs"]],
    }
    (tmp_path / "dev.json").write_text(json.dumps([theirs], indent=1))
    ours = TASKS["hotpotqa"].open(write(tmp_path / "dev.jsonl", [row])).build(0, layout())
    assert TASKS["hotpotqa"].open(tmp_path / "dev.json").build(0, layout()) == ours


def test_titles_are_never_repeated(tmp_path: Path) -> None:
    rows = hotpot_rows(30)
    for row in rows[1:]:
        row["paragraphs"][0]["title"] = "title 0-0"
    example = TASKS["hotpotqa"].open(write(tmp_path / "dev.jsonl", rows)).build(0, layout(1000))
    assert titles(example).count("title 0-0") == 1
    assert len(example.documents) == 4 + 29 * 3


@pytest.mark.parametrize(("depth", "first"), [(0, 1), (50, 14), (100, 27)])
def test_gold_documents_stand_at_the_depth(tmp_path: Path, depth: float, first: int) -> None:
    cases = TASKS["hotpotqa"].open(write(tmp_path / "dev.jsonl", hotpot_rows(30)))
    assert cases.build(2, layout(300, depth)).gold == (first, first + 1)


def test_distractors_give_way_and_gold_documents_do_not(tmp_path: Path) -> None:
    cases = TASKS["hotpotqa"].open(write(tmp_path / "dev.jsonl", hotpot_rows(2)))
    example = cases.build(0, layout(13 + 30))
    assert len(example.documents) == 3
    assert {"title 0-1", "title 0-3"} < set(titles(example))
    with pytest.raises(DocumentError, match="q0: its gold documents need 1 tokens more than --context-tokens 32"):
        cases.build(0, layout(13 + 19))


def test_the_bundled_sample_is_the_default() -> None:
    cases = TASKS["hotpotqa"].open(None)
    assert len(cases.ids) == 50
    example = cases.build(0, layout(4000))
    assert len(example.gold) == 2
    assert WORDS.prompt(example) > 3700


def test_hotpotqa_is_scored_with_its_citations() -> None:
    example = Example("q", "Where?", (), (4, 9), (("Canberra",),))
    figures = TASKS["hotpotqa"].score(example, "Canberra [4]")
    assert (figures["em"], figures["f1"], figures["citation_precision"], figures["citation_recall"]) == (1, 1, 1, 0.5)
    assert figures["joint_f1"] == pytest.approx(2 / 3)


def test_citation_asks_for_numbers_alone(tmp_path: Path) -> None:
    task = TASKS["citation"]
    example = task.open(write(tmp_path / "dev.jsonl", hotpot_rows(3))).build(0, layout())
    assert example.prompt == PROMPT
    wrong = next(number for number in range(1, 5) if number not in example.gold)
    assert task.score(example, f"[{example.gold[0]}][{wrong}]") == {
        "citation_precision": 0.5,
        "citation_recall": 0.5,
        "citation_f1": 0.5,
    }


def test_musique(tmp_path: Path) -> None:
    names = ("text", "paragraph_text")  # here, and as its authors publish it
    paragraphs = [{"title": "Same", names[p % 2]: f"Text {p}.", "is_supporting": p in (1, 3)} for p in range(5)]
    row = {"id": "3hop__1_2_3", "question": "Who?", "answer": "G. Hall", "answer_aliases": ["Hall"]}
    task = TASKS["musique"]
    example = task.open(write(tmp_path / "m.jsonl", [{**row, "paragraphs": paragraphs}])).build(0, layout())
    assert example.kind == "3hop"
    assert len(example.documents) == 5  # its own paragraphs may share a title
    assert sorted(example.documents[number - 1].text for number in example.gold) == ["Text 1.", "Text 3."]
    assert task.score(example, "Hall")["em"] == 1


def bioasq_rows(questions: int) -> list[dict[str, Any]]:
    """Questions in turn of short snippets and of long abstracts, whose evidence stands in the middle."""
    rows = []
    for q in range(questions):
        long = q % 2 == 0
        sentence = f"Filler words about number {q} stand here."
        text = (
            " ".join([sentence] * 20 + [f"Evidence for {q} is this."] + [sentence] * 20) if long else f"Just {q} here."
        )
        documents: list[dict[str, Any]] = [
            {"pmid": f"{q}-{d}", "text": f"{text} {d}", "text_kind": "abstract" if long else "snippets"}
            for d in range(2)
        ]
        rows.append(
            {
                "id": f"b{q}",
                "question": f"Is {q}?",
                "type": "yesno",
                "exact_answer": "yes",
                "ideal_answer": ["Yes."],
                "documents": [*documents, {"pmid": f"{q}-x", "text": None, "text_kind": "none"}],
                "snippets": [{"pmid": f"{q}-0", "text": f"Evidence for {q} is this."}],
            }
        )
    return rows


def test_lengths_of_bioasq_documents_do_not_tell_gold_from_others(tmp_path: Path) -> None:
    cases = TASKS["bioasq"].open(write(tmp_path / "b.jsonl", bioasq_rows(100)))
    gold, others = list[int](), list[int]()
    for index in range(100):
        example = cases.build(index, layout(9000))
        for number, document in enumerate(example.documents, 1):
            (gold if number in example.gold else others).append(len(document.text))
    assert fmean(gold) == pytest.approx(fmean(others), rel=0.1)
    assert 1100 < max(others) <= 1200
    assert min(others) == min(gold)


def test_bioasq_leaves_out_documents_without_text_and_says_how_to_answer(tmp_path: Path) -> None:
    example = TASKS["bioasq"].open(write(tmp_path / "b.jsonl", bioasq_rows(3))).build(1, layout())
    assert sorted(document.id for document in example.documents) == ["1-0", "1-1"]
    assert example.gold == (1, 2)
    assert example.question == "Is 1? Answer yes or no."


def test_passages_of_one_abstract_are_counted_each_by_itself(tmp_path: Path) -> None:
    """What was built before makes no difference, and no prompt is longer than it may be."""
    rows = bioasq_rows(80)[1::2]  # the short ones
    for q, row in enumerate(rows):  # one abstract: its passage for every other question is ten times as long
        text = " ".join(["Words of it."] * (40 if q % 2 else 4))
        row["documents"][0] |= {"pmid": "same", "text": text}
        row["snippets"] = []
    path = write(tmp_path / "b.jsonl", rows)
    for first in (0, 1):
        cases = TASKS["bioasq"].open(path)
        cases.build(first, layout(200))
        for index in range(6):
            example = cases.build(index, layout(200))
            assert WORDS.prompt(example) <= 200
            assert example == TASKS["bioasq"].open(path).build(index, layout(200))


def test_bioasq_holds_at_most_200_documents(tmp_path: Path) -> None:
    example = TASKS["bioasq"].open(write(tmp_path / "b.jsonl", bioasq_rows(240))).build(1, layout(100_000))
    assert len(example.documents) == 200


@pytest.mark.parametrize(
    ("kind", "exact", "answers"),
    [
        ("factoid", [["Srrm4"], ["nSR100"]], (("Srrm4", "nSR100"),)),
        ("list", [["Srrm4", "nSR100"], ["Nova1"]], (("Srrm4", "nSR100"), ("Nova1",))),
        ("yesno", "no", (("no",),)),
        ("summary", None, (("It is so.", "It is."),)),
    ],
)
def test_bioasq_answers(tmp_path: Path, kind: str, exact: object, answers: tuple[tuple[str, ...], ...]) -> None:
    row = bioasq_rows(1)[0] | {"type": kind, "exact_answer": exact, "ideal_answer": ["It is so.", "It is."]}
    example = TASKS["bioasq"].open(write(tmp_path / "b.jsonl", [row])).build(0, layout())
    assert example.answers == answers


def test_a_passage_is_whole_sentences_around_the_evidence() -> None:
    text = "One is first. Two follows it. Three has the proof. Four is next! Five ends it"
    assert passage(text, "Three has", 40) == "Three has the proof. Four is next!"
    assert passage(text, "Three has", 64) == text[len("One is first. ") :]
    assert passage(text, "nowhere", 14) == "One is first."
    assert passage(text, "Five", 10) == "Five ends it"  # a sentence is never cut
    assert passage(text, "Two", 1000) == text


def lines_row() -> dict[str, Any]:
    lines = [f"line a-{n}: REGISTER_CONTENT is <{n}>\n" for n in range(5)]
    end = "\nNow the record is over. Tell me what is the <REGISTER_CONTENT> in line a-3? I need the number. "
    prompt = "Below is a record. Now the record start:\n\n" + "".join(lines) + end
    return {"prompt": prompt, "expected_number": 3, "correct_line": lines[3], "num_lines": 5}


def test_lines(tmp_path: Path) -> None:
    row, task = lines_row(), TASKS["lines"]
    example = task.open(write(tmp_path / "l.jsonl", [row])).build(0, layout())
    assert "".join(document.text for document in example.documents) + example.question == row["prompt"].strip()
    assert [example.documents[number - 1].text for number in example.gold] == [row["correct_line"]]
    assert example.reply_start == "The <REGISTER_CONTENT> in line a-3 is <"
    assert task.score(example, "3>. I hope") == {"accuracy": 1}
    assert task.score(example, "30>, not 3") == {"accuracy": 0}
    assert task.score(example, "I do not know") == {"accuracy": 0}


def test_ruler(tmp_path: Path) -> None:
    text = (
        "A special magic uuid is hidden within the following text.\nOne of the special magic uuids for k1 is: v1.\n"
        "One of the special magic uuids for k2 is: v2.\nWhat is the special magic uuid for k2 mentioned in the "
        "provided text? The special magic uuid for k2 mentioned in the provided text is"
    )
    task = TASKS["ruler"]
    example = task.open(write(tmp_path / "r.jsonl", [{"index": 7, "input": text, "outputs": ["v2"]}])).build(
        0, layout()
    )
    whole = "".join(document.text for document in example.documents) + f"{example.question} {example.reply_start}"
    assert whole == text
    assert example.gold == (3,)
    assert (task.score(example, " V2."), task.score(example, "v1")) == ({"accuracy": 1}, {"accuracy": 0})


def test_ruler_gives_credit_for_a_part_of_the_values(tmp_path: Path) -> None:
    """As its `string_match_all`: the share of the values that are in the reply."""
    text = (
        "One of the special magic numbers for k1 is: 111.\nOne of the special magic numbers for k1 is: 222.\n"
        "One of the special magic numbers for k1 is: 333.\nWhat are all the special magic numbers for k1 mentioned?"
    )
    row, task = {"index": 1, "input": text, "outputs": ["111", "222", "333"]}, TASKS["ruler"]
    example = task.open(write(tmp_path / "r.jsonl", [row])).build(0, layout())
    assert task.score(example, "They are 333 and 111.") == {"accuracy": pytest.approx(2 / 3)}
    assert (task.score(example, "111, 222, 333"), task.score(example, "12")) == ({"accuracy": 1}, {"accuracy": 0})


def test_a_needle_stands_at_its_depth(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("\n\n".join(f"Paragraph number {n} of\nthe book." for n in range(100)))
    (tmp_path / "c.txt").write_text("\n\n".join(f"More of {n} for all." for n in range(100)))
    task = TASKS["needle"]
    assert task.depths == (0, 25, 50, 75, 100)
    cases = task.open(tmp_path)
    middle, start, end = (cases.build(3, layout(400, depth)) for depth in (50, 0, 100))
    before, needle, after = (document.text for document in middle.documents)
    assert middle.gold == (2,)
    assert middle.answers[0][0] in needle
    assert abs(len(before.split()) - len(after.split())) <= 6  # a paragraph
    assert (start.documents[0].text, end.documents[2].text) == ("", "")
    assert start.documents[2].text == end.documents[0].text == before + after
    used = WORDS.frame(middle.question, None) + WORDS.text(middle.reply_start + " " + before + needle + after)
    assert 400 - 7 < used <= 400
    assert task.score(middle, f"It is {middle.answers[0][0]}.") == {"accuracy": 1}
    assert cases.build(4, layout(400, 50)).answers != middle.answers


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("A few words only.")
    with pytest.raises(DocumentError, match="tokens too short for --context-tokens 400"):
        TASKS["needle"].open(tmp_path / "b.txt").build(0, layout(400, 0))


@pytest.mark.parametrize("name", sorted(TASKS))
@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), (b"", "is empty|no text"), (b"\xff\xfe", "cannot be read")],
)
def test_unusable_data_says_how_to_get_it(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    path = tmp_path / "data.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DocumentError, match=f"({message}).*(Give|Make|Register|Leave)"):
        TASKS[name].open(path)


@pytest.mark.parametrize("name", sorted(set(TASKS) - {"hotpotqa", "citation"}))
def test_missing_data_says_how_to_get_it(name: str) -> None:
    with pytest.raises(DocumentError, match=r"--data is missing\. (Give|Make|Register)"):
        TASKS[name].open(None)


@pytest.mark.parametrize("name", sorted(set(TASKS) - {"needle"}))
@pytest.mark.parametrize(
    ("line", "message"), [("no json", "line 1: not JSON"), ("[1]", "no field"), ("{}", "no field")]
)
def test_lines_in_another_format_are_named(tmp_path: Path, name: str, line: str, message: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(line)
    with pytest.raises(DocumentError, match=message):
        TASKS[name].open(path)


def test_a_separator_inside_a_string_does_not_end_a_row(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "one\u2028two"}\r\n\n{"text": "three\x85"}\n', encoding="utf-8")
    assert [row["text"] for row in read_rows(file, ("text",), "Get it.")] == ["one\u2028two", "three\x85"]
