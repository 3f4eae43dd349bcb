"""Text from a causal LM: batched greedy completion, and a chat that streams."""

from __future__ import annotations

from typing import Any

import torch


@torch.no_grad()
def complete_prompts(
    model: Any, tokenizer: Any, prompts: list[list[int]], *, max_new_tokens: int = 256, batch_size: int = 8
) -> list[str]:
    """Greedy completions of tokenised prompts, in order. Prompts of a batch are padded on the left, as generation needs."""
    device = next(model.parameters()).device
    texts: list[str] = []
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        width = max(map(len, batch))
        ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(p)) + p for p in batch], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch], device=device)
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=max_new_tokens,
            pad_token_id=tokenizer.pad_token_id,
        )
        texts += tokenizer.batch_decode(out[:, width:], skip_special_tokens=True)
    return [text.strip() for text in texts]


def stream_reply(model: Any, tokenizer: Any, messages: list[dict[str, str]], *, max_new_tokens: int = 512) -> str:
    """Print the model's reply to a chat as it is written, and return it. Text models without a template get the last turn."""
    from transformers import TextStreamer

    if tokenizer.chat_template is not None:
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        inputs = tokenizer(messages[-1]["content"], return_tensors="pt")
    inputs = {key: value.to(next(model.parameters()).device) for key, value in inputs.items()}
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    with torch.no_grad():
        out = model.generate(
            **inputs,
            streamer=streamer,
            do_sample=False,
            max_new_tokens=max_new_tokens,
            pad_token_id=tokenizer.pad_token_id,
        )
    return tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()
