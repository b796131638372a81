"""Kernels of the chunk codecs: CUDA source, the twin in C, a numpy reference, and the probe.

``planes/`` and ``rans/`` are the rooms; ``native`` calls the C twins, ``device`` the CUDA kernels.
The formats stand in docs/planes.md. Importing this package loads nothing.
"""
