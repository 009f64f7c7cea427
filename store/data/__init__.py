"""The bytes of a part: the layout of its region, packing, and checksums."""
