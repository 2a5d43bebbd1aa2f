# %% [markdown]
# # Hugging Face's Trainer, stopped and resumed
#
# One line, `oelm.apply`, freezes Query and Key; the Trainer needs no change. The model is small and random and the data
# is generated, so nothing is downloaded. With a pretrained model, replace `new_model` by its `from_pretrained`.

# %%
from pathlib import Path

from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

import oelm
from oelm.data import builtin_labelled, judgement_tokenizer

tokenizer = judgement_tokenizer()
data = builtin_labelled("sentiment", seed=0)


def rows(split):
    texts, labels = data.splits[split].texts, data.splits[split].labels
    return [{**tokenizer(text), "labels": int(label)} for text, label in zip(texts, labels, strict=True)]


train_rows, validation_rows = rows("train"), rows("validation")


# %% [markdown]
# Every call builds the model anew, as a script does that is started again. Its first weights are random and differ from
# call to call; what the checkpoint holds counts.


# %%
def new_model():
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = BertForSequenceClassification(config)
    print(oelm.apply(model, "oelm-freeze"))
    return model


def train(steps, folder="trainer"):
    checkpoint = get_last_checkpoint(folder) if Path(folder).is_dir() else None
    done = checkpoint is not None and int(checkpoint.rpartition("-")[2]) >= steps
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        save_steps=100,
        per_device_train_batch_size=32,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=oelm.load(checkpoint) if done else new_model(),
        args=arguments,
        train_dataset=train_rows,
        eval_dataset=validation_rows,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda result: {"accuracy": float((result.predictions.argmax(-1) == result.label_ids).mean())},
    )
    if not done:  # the Trainer would take one step more
        trainer.train(resume_from_checkpoint=checkpoint)
    return trainer


# %% [markdown]
# The first call is stopped after 100 steps; the second goes on from its checkpoint. Started again, neither has a step
# left, and the last checkpoint is loaded.

# %%
train(100)
trainer = train(400)
print(f"accuracy {trainer.evaluate()['eval_accuracy']:.3f}; last checkpoint {get_last_checkpoint('trainer')}")

# %% [markdown]
# `verify` proves that what was frozen is what was sealed, to the bit. `load` brings a saved model back frozen and
# verified, and `export` writes a plain checkpoint, with a model card, that needs no oelm.

# %%
print(oelm.verify(trainer.model))
trainer.save_model("trained")
loaded = oelm.load("trained")
print(oelm.export(loaded, "plain"))
