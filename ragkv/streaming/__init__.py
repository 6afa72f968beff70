"""StreamingLLM memory (arXiv 2309.17453): sessions on a cache of constant size, and a store for what leaves it."""
