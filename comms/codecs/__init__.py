"""Encodings of Python objects and values as msgpack, without pickle."""
