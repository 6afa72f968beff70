"""Cited answers in LangChain: retrieve, read on a compressed KV cache, and stream an answer that names its sources.

pip install "ragkv[langchain]"
python examples/langchain_rag.py [MODEL]
"""

import sys

from langchain_ragkv import ChatSnapKV, RagkvRetriever, create_cited_answer_chain
from ragkv import Document, Index
from ragkv.embedding import SentenceTransformerEmbedder

PAGES = {
    "Toad Hall": "Toad Hall is a residential hall of the Australian National University in Canberra.",
    "Burgmann College": "Burgmann College is a residential college in Canberra, opened in 1971.",
    "Lake Burley Griffin": "Lake Burley Griffin is an artificial lake in the centre of Canberra, finished in 1963.",
    "Kerry Saxby-Junna": "Kerry Saxby-Junna is a retired race walker, born in Ballina, New South Wales.",
    "Senet": "Senet is a board game of ancient Egypt, and one of the oldest known.",
    "Medici": "Medici is a board game by Reiner Knizia in which players bid for goods.",
}


def main(model: str = "qwen2.5-coder-1.5b") -> None:
    documents = [Document(id=title, title=title, text=text) for title, text in PAGES.items()]
    retriever = RagkvRetriever(index=Index.build(documents, SentenceTransformerEmbedder()), k=4)
    llm = ChatSnapKV(model=model, max_capacity_prompt=1024, max_tokens=64)
    chain = create_cited_answer_chain(llm, retriever)

    question = "Who designed the board game Medici?"
    print(question)
    answer = None
    for chunk in chain.stream(question):  # the first chunk has the sources, the others the text
        print(chunk.answer, end="", flush=True)
        answer = chunk if answer is None else answer + chunk
    assert answer is not None
    print()
    for citation in answer.citations:
        print(f"  [{citation.number}] {citation.document.metadata['title']}: {citation.document.page_content}")
    print(f"  {len(answer.sources)} sources, cited in vain: {answer.invalid_citations}")

    for reply in chain.batch(["What is Senet?", "When was Lake Burley Griffin finished?"]):  # one batched generation
        print(reply.answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
