"""A llama model with random weights: ``PYTHON random_gguf.py FILE MIB [BF16|F16]``. Needs gguf.

llama.cpp loads it and answers as it would with a real one; what it says means nothing.
"""

from __future__ import annotations

import sys
from typing import Final

import gguf
import numpy as np

VOCABULARY: Final = 300
_CONTEXT: Final = 256
_DEVIATION: Final = 0.02  # as trained weights have


def main(path: str, mib: int, kind: str = "BF16") -> None:
    stored = gguf.GGMLQuantizationType[kind]
    width, hidden, heads = (256, 512, 4) if mib <= 32 else (2048, 5632, 16)
    layer_bytes = 2 * (4 * width * width + 3 * width * hidden)
    layers = max(1, round(mib * 2**20 / layer_bytes))
    dice = np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(width // heads)
    writer.add_vocab_size(VOCABULARY)
    _add_tokens(writer)

    def weights(name: str, *shape: int) -> None:
        drawn = dice.standard_normal(shape, dtype=np.float32) * _DEVIATION
        writer.add_tensor(f"{name}.weight", gguf.quantize(drawn, stored), raw_dtype=stored)

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(width, dtype=np.float32))

    weights("token_embd", VOCABULARY, width)
    weights("output", VOCABULARY, width)
    norm("output_norm")
    for layer in range(layers):
        block = f"blk.{layer}."
        norm(f"{block}attn_norm")
        norm(f"{block}ffn_norm")
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            weights(block + name, width, width)
        weights(f"{block}ffn_gate", hidden, width)
        weights(f"{block}ffn_up", hidden, width)
        weights(f"{block}ffn_down", width, hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokens(writer: gguf.GGUFWriter) -> None:
    """Every byte, so that any prompt has tokens, and some words."""
    tokens = [b"<unk>", b"<s>", b"</s>"] + [b"<0x%02X>" % byte for byte in range(256)]
    kinds = [2, 3, 3] + [6] * 256  # unknown, control, byte
    words = VOCABULARY - len(tokens)
    tokens += [b"\xe2\x96\x81w%d" % number for number in range(words)]
    kinds += [1] * words
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * VOCABULARY)
    writer.add_token_types(kinds)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
