"""Kernels of the chunk codecs: CUDA source, the twin in C, and a numpy reference.

``planes/`` and ``rans/`` are the rooms; ``native`` calls the C twins, ``batch`` the CUDA kernels on
a ``device``, through the ``driver``. In ``shim/`` is the GPU of the tests, which runs on a CPU.
The formats stand in docs/planes.md. Importing this package loads nothing.
"""
