"""Put labelled data together: hold out validation rows, check the splits against each other, hash the result."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...errors import DataError
from .examples import Examples, LabelledData, digest, first_share, split_off
from .tasks import to_prompt


@dataclass(kw_only=True)
class Draft:
    """The splits of a task before they become a LabelledData; the methods are called in the order of this file."""

    name: str
    about: str
    labels: tuple[str, ...]
    splits: dict[str, Examples] = field(default_factory=dict)
    sources: dict[str, dict[str, Any]] = field(default_factory=dict)
    synthetic: bool = False

    def hold_out_validation(self, share: float) -> None:
        """Turn a share of the training rows into the validation split.

        Rows with the same first text stay on the same side, so that no text is in both.
        """
        train = self.splits["train"]
        held_out = split_off([digest(text) for text in train.texts], train.classes(), share)
        if not held_out.any():
            raise DataError(f"{self.name}: {len(train):,} training rows are too few to cut a validation split from")
        del self.splits["train"]
        source = self.sources.pop("train")
        validation_source = {name: value for name, value in source.items() if name != "no_consensus"}
        validation_source |= {"cut_from": "train", "share": share}
        # Validation comes second, since the order of the splits is part of the data's hash.
        self.splits = {"train": train.subset(~held_out), "validation": train.subset(held_out)} | self.splits
        self.sources = {"train": source, "validation": validation_source} | self.sources

    def check(self) -> dict[str, list[bytes]]:
        """Check that train and validation have every class and that held-out rows were not trained on.

        Return the digests of every split's rows.
        """
        for split in ("train", "validation"):
            absent = [name for index, name in enumerate(self.labels) if index not in self.splits[split].labels]
            if absent:
                raise DataError(
                    f"{self.name}: no row of {split} has the label {', '.join(absent)}; train and validation need "
                    f"every one of {', '.join(self.labels)}"
                )
        digests = {split: examples.digests() for split, examples in self.splits.items()}
        for split, rows in digests.items():
            for earlier in ("train", "validation"):
                if split == earlier:
                    break
                shared = sum(map(set(digests.get(earlier, ())).__contains__, rows))
                if shared == len(rows):
                    raise DataError(
                        f"{self.name}: every row of {split} is also in {earlier}: they must be different data"
                    )
                if shared:
                    self.sources[split][f"also_in_{earlier}"] = shared
        return digests

    def keep_fraction(self, fraction: float, digests: list[bytes]) -> None:
        """Keep a fraction of the training rows; `digests` are those that `check` returned for them."""
        train = self.splits["train"]
        self.splits["train"] = train.subset(first_share(digests, train.classes(), fraction))
        self.sources["train"] |= {"fraction": fraction, "of": len(train)}

    def to_text(self) -> None:
        """Turn classification into text-to-text: prompts as texts, and the names of the classes as answers."""
        for split, examples in self.splits.items():
            pairs = examples.pairs or [""] * len(examples)
            texts = [to_prompt(self.name, text, pair) for text, pair in zip(examples.texts, pairs, strict=True)]
            answers = [self.labels[index] for index in examples.labels.tolist()]
            self.splits[split] = Examples(texts, None, np.empty(0, dtype=np.int64), answers)
        self.labels = ()

    def finish(self) -> LabelledData:
        """Return the data with hashes of its content and a description of where it is from."""
        total_hash = hashlib.sha256(json.dumps(self.labels).encode())
        for split, examples in self.splits.items():
            split_hash = hashlib.sha256()
            answers: Iterable[Any] = examples.labels.tolist() if examples.answers is None else examples.answers
            for row in zip(examples.contents(), answers, strict=True):
                split_hash.update(json.dumps(row, ensure_ascii=False).encode() + b"\n")
            self.sources[split] |= {"rows": len(examples), "sha256": split_hash.hexdigest()}
            total_hash.update(f"\n{split} {split_hash.hexdigest()}".encode())
        return LabelledData(
            name=self.name,
            description=self._description(),
            synthetic=self.synthetic,
            labels=self.labels,
            splits=self.splits,
            sources=self.sources,
            sha256=total_hash.hexdigest(),
        )

    def _description(self) -> str:
        counts = ", ".join(f"{len(examples):,} {split}" for split, examples in self.splits.items())
        notes = [self.about, f"rows: {counts}"]
        for split, source in self.sources.items():
            if "no_consensus" in source:
                notes.append(f"{split}: {source['no_consensus']:,} rows without a consensus label left out")
            if "cut_from" in source:
                notes.append(f"validation is cut from train ({source['share']:g} of it)")
            if "fraction" in source:
                notes.append(f"trained on {source['fraction']:g} of {source['of']:,} rows")
        return "; ".join(notes)
