"""Chunk encodings: each turns plain bytes into stored bytes and back, with stock libraries."""
