"""Encodings of Python objects and values as msgpack, without pickle, and of tensors in eight bits."""
