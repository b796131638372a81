"""32-lane interleaved rANS: C twin (rans.c), CUDA source (rans.cuh), numpy reference, plain Python."""
