"""A generator that draws completions with vLLM, whose weights come from the store."""
