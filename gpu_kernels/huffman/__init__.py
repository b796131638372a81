"""Stock zstd frames of Huffman-coded literals: an encoder in C; libzstd is its decoder."""
