"""Citations alone: the model names the documents that a question of HotpotQA rests on, and nothing else."""

from ragkv.prompt import CitePrompt
from ragkv_evals.metrics import citation_figures, citation_overlap, cited
from ragkv_evals.tasks import hotpotqa
from ragkv_evals.tasks.base import Example, Figures, Task
from ragkv_evals.tasks.document_set import DocumentSets

# Questions of HotpotQA's training set; the numbers are only shapes to imitate.
PROMPT = CitePrompt(
    system="You find the numbered documents that are needed to answer a question.",
    rules="Give the numbers of the documents above that are needed to answer the last question, as in these examples.",
    examples="""\
Question: Toad Hall is a residential hall in a university located in what Australian city?
Answer: [4][9]

Question: Who is the oldest, Sid Haig or Vic Darchinyan?
Answer: [2][7]""",
)


def score(example: Example, reply: str) -> Figures:
    """Figures of the citations."""
    return citation_figures(citation_overlap(cited(reply, example.titles), example.gold))


CITATION = Task(
    name="citation",
    help="Which paragraphs a question of HotpotQA rests on, without the answer.",
    open=lambda data: DocumentSets(hotpotqa.load(data), prompt=PROMPT),
    score=score,
    headline=("citation_f1", "citation_precision", "citation_recall"),
    max_tokens=24,
    prompt=PROMPT,
)
