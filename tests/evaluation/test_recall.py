"""The recall of the built-in stories: an oracle reaches 1, an untrained model nearly nothing."""

from types import SimpleNamespace

import torch

from oelm.data.synthetic.story_corpus import recall_examples, story_tokenizer
from oelm.evaluation.recall import story_recall
from oelm.models.gpt import OelmGPTForCausalLM
from oelm.models.gpt_config import gpt_config


class Oracle:
    """Predicts every token of the stories, except at the (row, position) pairs in `wrong`."""

    device = torch.device("cpu")

    def __init__(self, wrong: set[tuple[int, ...]]) -> None:
        self.wrong = wrong

    def __call__(self, input_ids, use_cache):
        following = input_ids.roll(-1, dims=1)
        for row, place in self.wrong:
            following[row, place - 1] = 0
        return SimpleNamespace(logits=torch.nn.functional.one_hot(following, story_tokenizer().get_vocab_size()))


def test_recall_places_are_single_words_of_the_stories():
    words = {story_tokenizer().decode([ids[place]]).strip() for ids, places in recall_examples(20) for place in places}
    assert "red" in words or "blue" in words
    assert all(word.isalpha() for word in words)


def test_recall_counts_each_remembered_word_once():
    examples = recall_examples()
    recalled_words = sum(len([place for place in places if place < 400]) for _, places in examples)
    assert story_recall(Oracle(set()), 400, len(examples)) == {"recall": 1.0, "recalled_words": recalled_words}
    wrong = {(row, places[0]) for row, (_, places) in enumerate(examples[:7])}
    recall = story_recall(Oracle(wrong), 400, len(examples))["recall"]
    assert round((1 - recall) * recalled_words) == 7


def test_an_untrained_model_remembers_next_to_nothing():
    torch.manual_seed(0)
    fields = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "max_position_embeddings": 400}
    model = OelmGPTForCausalLM(gpt_config("modern-tiny", vocab_size=story_tokenizer().get_vocab_size(), **fields))
    assert story_recall(model.eval(), 400)["recall"] < 0.1
    assert story_recall(model, 8) == {}, "no story asks for a fact in its first 8 tokens"
