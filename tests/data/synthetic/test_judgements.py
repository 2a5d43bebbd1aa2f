"""The built-in judgements: reproducible, balanced, correctly labelled, and not predictable from single words."""

import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.data import DataError, builtin_labelled, judgement_tokenizer, open_labelled
from oelm.data.synthetic.judgements import BAD, GOOD, KINDS, judgements


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_rows_and_a_smaller_count_gives_the_first_of_them(kind):
    rows = judgements(kind, 3, 200)
    assert judgements(kind, 3, 60) == rows[:60]
    assert judgements(kind, 4, 60) != rows[:60]


def test_rows_do_not_depend_on_the_process():
    code = "from oelm.data import builtin_labelled as b; print(b('sentiment').sha256, b('inference').sha256)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"}
    )
    assert result.stdout.split() == [open_labelled(f"builtin:{kind}").sha256 for kind in KINDS]


@pytest.mark.parametrize("kind", KINDS)
def test_the_default_data_is_balanced_disjoint_and_marked_as_synthetic(kind):
    data = open_labelled(f"builtin:{kind}")
    assert data.synthetic
    assert "synthetic" in data.description
    assert all(source["synthetic"] for source in data.sources.values())
    assert data.labels == KINDS[kind].labels
    rows = {}
    for split, size in (("train", 2000), ("validation", 400)):
        examples = data.splits[split]
        rows[split] = set(zip(examples.texts, examples.pairs or [None] * size, strict=True))
        assert len(examples) == len(rows[split]) == size
        counts = Counter(examples.labels.tolist())
        assert max(counts.values()) - min(counts.values()) <= 1
    assert not rows["train"] & rows["validation"]


def test_sizes_and_seed_can_be_chosen_and_are_checked():
    data = builtin_labelled("inference", seed=5, train=30, validation=9)
    assert (len(data.splits["train"]), len(data.splits["validation"])) == (30, 9)
    assert data.sha256 != builtin_labelled("inference", seed=6, train=30, validation=9).sha256
    with pytest.raises(DataError, match=r"1,000,400 rows.*20,000"):
        builtin_labelled("sentiment", train=10**6)
    with pytest.raises(DataError, match=r"'irony'.*sentiment, inference"):
        builtin_labelled("irony")
    with pytest.raises(DataError, match="seed -1"):
        builtin_labelled("sentiment", seed=-1)
    with pytest.raises(DataError, match="no row of train has the label negative, positive"):
        builtin_labelled("sentiment", train=0)


def opinion(text: str) -> bool:
    """Return whether the writer is pleased, worked out independently of the generator."""
    words = text.split()
    good = [word in GOOD for word in words if word in GOOD or word in BAD]
    if "disagree" in words or {"not", "never", "nobody"} & set(words):
        return not good[0]
    if words[0] == "although" or ("but" in words and "i" not in words[: words.index("but")]):
        return good[-1]
    return good[0]


def test_sentiment_labels_are_the_writers_opinion():
    rows = judgements("sentiment", 0, 1500)
    assert {opinion(row.text) for row in rows} == {True, False}
    assert [row for row in rows if opinion(row.text) != (row.label == "positive")] == []


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_inference_labels_hold_in_every_small_world(seed):
    """Check each label by going through all small worlds in which the premise is true."""
    kinds = [(colour, room) for colour in ("asked", "other") for room in ("asked", "other")]
    for row in judgements("inference", seed, 12):
        premise, hypothesis = row.text.split(), row.pair.split()
        outcomes = set()
        # A world is what the person has of each colour in each room: nothing, something, or the stated number.
        for world in np.ndindex(3, 3, 3, 3):
            possessions = dict(zip(kinds, world, strict=True))
            if claim_holds(premise, possessions):
                outcomes.add(claim_holds(hypothesis, possessions) if hypothesis[0] == premise[0] else None)
        expected = {"entailment": {True}, "contradiction": {False}}
        if row.label == "neutral":
            assert outcomes in ({True, False}, {None})
        else:
            assert outcomes == expected[row.label], row


def claim_holds(words: list[str], possessions: dict[tuple[str, str], int]) -> bool:
    """Return whether a sentence is true; the amounts are 0 for none, 1 for some, 2 for the stated number."""
    coloured = len(words[: words.index("in")] if "in" in words else words[:-1]) == 5
    amounts = [
        amount
        for (colour, room), amount in possessions.items()
        if (colour == "asked" or not coloured) and (room == "asked" or "in" not in words)
    ]
    if words[2] == "no":
        return not any(amounts)
    return 2 in amounts if words[2] != "some" else any(amounts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["labels", "text"])
def test_the_tokenizer_knows_every_word(kind, form):
    data = open_labelled(f"builtin:{kind}", form=form)
    tokenizer = judgement_tokenizer()
    for examples in data.splits.values():
        texts = [*examples.texts, *(examples.pairs or []), *(examples.answers or [])]
        assert not any(tokenizer.unk_token_id in ids for ids in tokenizer(texts).input_ids)
        ids = tokenizer(examples.texts[0], add_special_tokens=False).input_ids
        assert tokenizer.decode(ids).replace(" :", ":") == examples.texts[0]
    assert tokenizer("zebra", add_special_tokens=False).input_ids == [tokenizer.unk_token_id]


def test_the_tokenizer_adds_special_tokens_to_pairs_as_bert_does(tmp_path):
    tokenizer = judgement_tokenizer()
    encoded = tokenizer("anna has hats .", "ben has cups .")
    tokens = tokenizer.convert_ids_to_tokens(encoded.input_ids)
    assert tokens == ["[CLS]", "anna", "has", "hats", ".", "[SEP]", "ben", "has", "cups", ".", "[SEP]"]
    assert encoded.token_type_ids == [0] * 6 + [1] * 5
    assert (tokenizer.pad_token_id, tokenizer.eos_token, tokenizer.mask_token) == (0, "[SEP]", "[MASK]")
    assert len(tokenizer) == max(tokenizer.get_vocab().values()) + 1
    padded = tokenizer(["anna .", "anna has hats ."], padding=True)
    assert padded.attention_mask[0][-2:] == [0, 0]
    tokenizer.save_pretrained(tmp_path)
    from oelm.data import load_model_tokenizer

    again = load_model_tokenizer(tmp_path)
    assert again("anna has hats .", "ben has cups .").data == encoded.data


def bag_of_words_accuracy(kind: str) -> float:
    """Return the validation accuracy of least squares on word counts, separate for the two texts."""
    data = builtin_labelled(kind)
    vocabulary = judgement_tokenizer().get_vocab()

    def counts(examples):
        rows = np.zeros((len(examples), 2 * len(vocabulary) + 1))
        rows[:, -1] = 1
        for part, texts in enumerate((examples.texts, examples.pairs or [])):
            for row, text in enumerate(texts):
                for word in text.split():
                    rows[row, part * len(vocabulary) + vocabulary[word]] += 1
        return rows

    train, validation = counts(data.splits["train"]), counts(data.splits["validation"])
    targets = np.eye(len(data.labels))[data.splits["train"].labels]
    ridge = train.T @ train + np.eye(train.shape[1])
    weights = np.linalg.solve(ridge, train.T @ targets)
    return float(((validation @ weights).argmax(1) == data.splits["validation"].labels).mean())


@pytest.mark.parametrize(("kind", "limit"), [("sentiment", 0.65), ("inference", 0.6)])
def test_single_words_do_not_predict_the_label(kind, limit):
    assert bag_of_words_accuracy(kind) < limit


def tiny_bert_accuracy(kind: str, seed: int = 0, steps: int = 600) -> float:
    """Return the validation accuracy of a BERT with two layers of width 64 after `steps` batches of 32 rows."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    data, tokenizer = builtin_labelled(kind), judgement_tokenizer()
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, num_labels=len(data.labels), **sizes)
    model = BertForSequenceClassification(config)
    inputs = {
        split: tokenizer(rows.texts, rows.pairs, padding=True, return_tensors="pt")
        for split, rows in data.splits.items()
    }
    labels = {split: torch.tensor(rows.labels) for split, rows in data.splits.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) / 60, (steps - s) / (steps - 60)))
    for step in range(steps):
        epoch, index = divmod(step, 2000 // 32)
        chosen = np.random.default_rng((seed, epoch)).permutation(2000)[32 * index : 32 * (index + 1)]
        batch = {name: tensor[chosen] for name, tensor in inputs["train"].items()}
        model(**batch, labels=labels["train"][chosen]).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    with torch.no_grad():
        predicted = model.eval()(**inputs["validation"]).logits.argmax(1)
    return float((predicted == labels["validation"]).float().mean())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_tiny_bert_learns_the_labels(kind):
    assert tiny_bert_accuracy(kind) > bag_of_words_accuracy(kind) + 0.2


if __name__ == "__main__":
    for name in KINDS:
        accuracies = [tiny_bert_accuracy(name, seed) for seed in range(3)]
        print(f"{name}: single words {bag_of_words_accuracy(name):.3f}, tiny BERT", *(f"{a:.3f}" for a in accuracies))
