"""Encodings of Python objects as msgpack, without pickle, and of tensors in eight bits."""
