"""LoRA without plaudit: peft's adapters on transformers' model, with torch's AdamW over padded rows."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from plaudit.types import Example

IGNORED = -100


def load_peft(folder: Path, adapters: Mapping[str, Tensor], *, rank: int, alpha: float, targets: Any = "all-linear") -> Any:
    """The model in fp32 with these adapters, named as in a file of peft's."""
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    peft = get_peft_model(model, LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM"))  # pyright: ignore
    loaded = set_peft_model_state_dict(peft, dict(adapters))
    assert not loaded.unexpected_keys
    assert not [name for name in loaded.missing_keys if "lora_" in name]
    return peft


def saved_adapters(peft: Any) -> dict[str, Tensor]:
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(peft)


def padded(rows: Sequence[Example]) -> dict[str, Tensor]:
    """Rows as transformers takes them."""
    width = max(map(len, rows))
    batch = {name: torch.zeros(len(rows), width, dtype=torch.long) for name in ("input_ids", "attention_mask")}
    batch["labels"] = torch.full((len(rows), width), IGNORED)
    for i, row in enumerate(rows):
        tokens, trained = torch.from_numpy(row.tokens).long(), torch.from_numpy(row.loss_mask)
        batch["input_ids"][i, : len(row)] = tokens
        batch["attention_mask"][i, : len(row)] = 1
        batch["labels"][i, : len(row)] = tokens.where(trained, IGNORED)
    return batch


def train_with_peft(
    peft: Any, steps: Sequence[Sequence[Example]], *, lr: float, weight_decay: float, max_grad_norm: float
) -> list[float]:
    """Each step's loss, the mean over its targets. The learning rate falls linearly, to 0 after the last step."""
    parameters = [parameter for parameter in peft.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1 - step / len(steps))
    losses = []
    peft.train()
    for rows in steps:
        batch = padded(rows)
        logits = peft(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    return losses
