"""Worked GSM8K answers as token ids, which several claims train on."""

from __future__ import annotations

from typing import Any

from acclimate import data

LONGEST = 112  # tokens of a problem with its answer


def problems(tokenizer: Any, count: int, longest: int = LONGEST, split: str = "train") -> list[tuple[list[int], int]]:
    """(token ids, where the answer begins) of the first `count` problems with at most `longest` tokens."""
    found = []
    for row in data.read_table("gsm8k", split=split).rows:
        prompt = tokenizer(f"Question: {row['question']}\nAnswer:")["input_ids"]
        answer = [*tokenizer(" " + row["answer"])["input_ids"], tokenizer.eos_token_id]
        if len(prompt) + len(answer) <= longest:
            found.append((prompt + answer, len(prompt)))
            if len(found) == count:
                break
    return found
