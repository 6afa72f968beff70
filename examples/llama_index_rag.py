"""A LlamaIndex query engine whose answers cite: documents are retrieved, numbered, read onto a compressed KV cache.

pip install "ragkv[llama-index]"
python examples/llama_index_rag.py [MODEL]
"""

import sys

from llama_index.core import Document, VectorStoreIndex

from llama_index.llms.ragkv import ChatSnapKV, CitedAnswerSynthesizer, RagkvEmbedding

DOCUMENTS = {
    "Kiss and Tell": "Kiss and Tell is a 1945 American film in which Shirley Temple plays Corliss Archer.",
    "Shirley Temple": "Shirley Temple was an American actress who later served as United States ambassador to Ghana "
    "and to Czechoslovakia, and as Chief of Protocol of the United States.",
    "Corliss Archer": "Meet Corliss Archer is a radio programme that ran on CBS from 1943 to 1956.",
    "Janet Waldo": "Janet Waldo was the voice of Corliss Archer on the radio and of Judy Jetson on television.",
}
QUESTION = "Which government positions did Shirley Temple hold?"


def main(model: str = "qwen2.5-coder-1.5b") -> None:
    llm = ChatSnapKV(model=model, max_capacity_prompt=4096, max_tokens=64)
    documents = [Document(text=text, metadata={"title": title}) for title, text in DOCUMENTS.items()]
    index = VectorStoreIndex.from_documents(documents, embed_model=RagkvEmbedding())

    # Every passage goes into one prompt: the context window that LlamaIndex sees is the model's own.
    engine = index.as_query_engine(
        llm=llm,
        similarity_top_k=4,
        response_synthesizer=CitedAnswerSynthesizer(llm, streaming=True),
    )
    response = engine.query(QUESTION)
    print(QUESTION)
    for text in response.response_gen:
        print(text, end="", flush=True)
    print()

    for scored in response.source_nodes:
        about = scored.node.metadata
        print(f"{'*' if about['ragkv_cited'] else ' '} [{about['ragkv_number']}] {about['title']} ({scored.score:.2f})")
    if response.metadata["ragkv_invalid_citations"]:
        print("cited, but no document:", response.metadata["ragkv_invalid_citations"])


if __name__ == "__main__":
    main(*sys.argv[1:])
