"""Measuring stores, codecs and peers, and judging what was measured."""
