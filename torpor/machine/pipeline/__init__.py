"""The pipelines: disk to store and store to disk, in bounded memory, every stage overlapped.

A part is worked by one thread that reads, hashes, encodes and sends (or fetches, checks, decodes
and writes) one chunk after the other; every one of these releases Python's global lock, so a
handful of such threads overlaps all stages without queues between them, and the bound on memory is
threads times what one part holds.
"""
