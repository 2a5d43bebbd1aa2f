"""results/stories15m.py: a model in llama2.c's format gives the same logits and tokens in transformers' layout."""

import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

SCRIPT = Path(__file__).parents[2] / "results" / "stories15m.py"
WIDTH, INNER, LAYERS, LENGTH = 24, 40, 2, 16
# Behind the special tokens and the bytes: single characters, then pieces, of which the better one has the higher score.
PIECES = [(" ", -9), ("a", -9), ("b", -9), ("ab", -2), ("bb", -1), (" a", -3), ("ä", -4), (" abb", -5)]


def in_pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return a weight's rows in llama2.c's order: the two that are rotated together follow each other."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def stored(model: LlamaForCausalLM) -> bytes:
    """Return the model as llama2.c writes it."""
    config = model.config
    layers = model.model.layers
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    shared = config.tie_word_embeddings
    parts = [
        model.model.embed_tokens.weight,
        *(layer.input_layernorm.weight for layer in layers),
        *(in_pairs(layer.self_attn.q_proj.weight, heads) for layer in layers),
        *(in_pairs(layer.self_attn.k_proj.weight, kv_heads) for layer in layers),
        *(layer.self_attn.v_proj.weight for layer in layers),
        *(layer.self_attn.o_proj.weight for layer in layers),
        *(layer.post_attention_layernorm.weight for layer in layers),
        *(layer.mlp.gate_proj.weight for layer in layers),
        *(layer.mlp.down_proj.weight for layer in layers),
        *(layer.mlp.up_proj.weight for layer in layers),
        model.model.norm.weight,
        torch.zeros(2, LENGTH, WIDTH // heads // 2),
        *([] if shared else [model.lm_head.weight]),
    ]
    vocabulary = config.vocab_size if shared else -config.vocab_size
    header = struct.pack("<7i", WIDTH, INNER, LAYERS, heads, kv_heads, vocabulary, LENGTH)
    return header + b"".join(part.detach().numpy().astype("<f4").tobytes() for part in parts)


def stored_tokenizer() -> bytes:
    first = [("<unk>", 0), ("\n<s>\n", 0), ("\n</s>\n", 0), *((chr(byte), 0) for byte in range(256))]
    entries = [(piece.encode(), score) for piece, score in first + PIECES]
    return struct.pack("<i", 4) + b"".join(struct.pack("<fi", score, len(piece)) + piece for piece, score in entries)


def convert(*arguments: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True)


@pytest.mark.parametrize(("kv_heads", "shared"), [(4, True), pytest.param(2, False, marks=pytest.mark.full)])
def test_logits_and_tokens_are_those_of_the_source(kv_heads, shared, tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=259 + len(PIECES), hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=kv_heads, max_position_embeddings=LENGTH, rms_norm_eps=1e-5,
        tie_word_embeddings=shared,
    )  # fmt: skip
    source = LlamaForCausalLM(config).eval()
    (tmp_path / "both.bin").write_bytes(stored(source) + stored_tokenizer())
    result = convert(tmp_path / "both.bin", tmp_path / "folder")
    assert result.returncode == 0, result.stderr
    assert "tokenizer" in result.stdout
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "folder").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "folder")
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, source(ids).logits)
    first = 259
    # Of " abb" first "bb" is joined, which has the best score, then " a", then both; of " aab" first "ab".
    assert tokenizer("abb").input_ids == [first + 7]
    assert tokenizer("aab").input_ids == [first + 5, first + 3]
    assert tokenizer("ä").input_ids == [first, first + 6]
    assert tokenizer("z").input_ids == [first, 3 + ord("z")], "a byte"
    for text in ("abb aab", "ä z\n€"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.eos_token == "<s>"


@pytest.mark.full
def test_half_a_file_is_refused(tmp_path):
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=259 + len(PIECES), hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=LENGTH, tie_word_embeddings=True,
    ))  # fmt: skip
    whole = stored(model) + stored_tokenizer()
    for name, content, problem in (
        ("model", whole[:-9000], "bytes; there are"),
        ("tokenizer", whole[:-10], "its tokenizer ends after"),
        ("nothing", b"", "too few for a header"),
        ("other", b"PK\x03\x04" * 100, "its header says"),
    ):
        (tmp_path / name).write_bytes(content)
        result = convert(tmp_path / name, tmp_path / "folder")
        assert (result.returncode, result.stdout) == (1, "")
        assert problem in result.stderr
        assert result.stderr.count("\n") == 1
    assert not (tmp_path / "folder").exists()
