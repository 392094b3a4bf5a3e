"""Bytes that one rank has read on their way to the other ranks that want them."""
