"""Bit-exact differences between two versions of a part: found, packed, and applied beside the older one."""
