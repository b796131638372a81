"""Kernels of the chunk codecs: CUDA source, the twin in C, and a numpy reference.

``planes/`` and ``rans/`` are the rooms; ``native`` calls the C twins, ``cuda`` launches the CUDA
kernels by CuPy, ``batch`` measures their memory, ``worker`` does so in a process of its own.
``shim/`` runs the CUDA source on a CPU, for the tests. The formats are in docs/planes.md. Importing
this package loads nothing.
"""
