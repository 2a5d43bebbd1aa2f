"""Your own CSV to a classifier: train on its rows with Query and Key frozen, then classify a text.

`oelm finetune folder --data reviews --model roberta-base task.text=review task.label=stars` does the same on the
command line. Here the model is small and random and the rows are made up, so nothing is downloaded.
"""

import csv
from pathlib import Path

import oelm
from oelm.data import builtin_labelled, judgement_tokenizer
from oelm.evaluation.use import predict_one

# Put your own files here: train.csv, and if you have them validation.csv and test.csv. Without any, some are made up.
folder = Path("reviews")
if not folder.exists():
    folder.mkdir()
    for split, examples in builtin_labelled("sentiment", seed=0).splits.items():
        with open(folder / f"{split}.csv", "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["review", "stars"])
            for text, label in zip(examples.texts, examples.labels, strict=True):
                writer.writerow([text, "good" if label else "bad"])
judgement_tokenizer().save_pretrained("tokenizer")

config = oelm.RunConfig.load(
    {
        "experiment": "reviews",
        "task": {"name": "folder", "text": "review", "label": "stars"},
        "data": {"path": str(folder), "sequence_length": 64},
        "model": {"name": "random:bert", "tokenizer": "tokenizer"},  # or {"name": "roberta-base"} alone
        "method": "oelm-freeze",
        "optimizer": {"learning_rate": 1e-3},  # 2e-5 for a pretrained model
        "train": {"epochs": 10, "batch_size": 32},
    }
)
result = oelm.train(config)
majority = result["last"]["majority"]["accuracy"]
print(f"accuracy {result['accuracy']:.3f}; always the most frequent class: {majority:.3f}")
print(predict_one(config.folder, "the story was not very funny"))
