"""Every codec on a GPU, beside nvCOMP's: `python -m benchmarks.codecs_gpu`."""
