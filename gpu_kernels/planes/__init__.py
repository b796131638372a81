"""Byte planes: C twin (planes.c), CUDA source (planes.cuh), numpy reference, plain Python."""
