"""32-lane interleaved rANS: C twin (rans.c), CUDA (rans.cuh), numpy reference, plain Python."""
