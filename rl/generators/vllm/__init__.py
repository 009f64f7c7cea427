"""A generator that draws completions with vLLM, and gets its weights from the store."""
