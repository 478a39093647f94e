"""DPO's reference: log-probs of every pair's answers under the model that training starts from, computed once and kept.

The freshly loaded policy is the reference, under LoRA without its adapters: no second model is loaded, unless the recipe names
another one, which is dropped again before training. The file is keyed by the reference and the pairs' tokens; a resumed run reads
it, so that its numbers are the original ones. It has a checksum; damaged, it is computed again.
"""

import hashlib
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from plaudit.checkpoint import clear_write_errors
from plaudit.files import atomic_file, model_fingerprint
from plaudit.models.sharded import is_sharded, shard_model
from plaudit.models.trainable import TrainableModel, load_model
from plaudit.preference.losses import answer_logprobs, measure
from plaudit.recipe import DPORecipe
from plaudit.recipe.training import micro_batch_tokens
from plaudit.report.progress import print_line, show_progress
from plaudit.types import Pair
from plaudit.world import World

FILE = "reference.safetensors"


def with_reference(pairs: Sequence[Pair], recipe: DPORecipe, policy: TrainableModel, folder: Path, world: World) -> list[Pair]:
    """The pairs with the reference's log-probs: from the run folder, or computed and stored there. The policy is untrained."""
    # Once: all tokens are hashed, 2 s for 100,000 pairs of 1,024 tokens.
    file, key = folder / FILE, _key(pairs, recipe) if world.leads else ""
    known = world.agree(_read(file, key) if world.leads else None, "the reference's log-probs")
    if known is None:
        with _reference(recipe, policy, world) as model:
            chosen, rejected = measure(
                model, pairs, answer_logprobs, micro_batch_tokens(recipe.train.tokens_per_micro_batch), world,
                lambda groups: show_progress(groups, "reference: batches"), share=recipe.train.share_prompts,
            )  # fmt: skip
        known = {"chosen": chosen, "rejected": rejected}
        if world.leads:
            with clear_write_errors(file, folder / "checkpoints"), atomic_file(file) as aside:
                save_file(known, aside, metadata={"of": f"{key} {_checksum(known)}"})
        print_line(f"reference: log-probs of {len(pairs):,} pairs under {recipe.reference.path or 'the untrained model'}")
    columns = known["chosen"].tolist(), known["rejected"].tolist()
    return [replace(pair, ref_chosen=c, ref_rejected=r) for pair, c, r in zip(pairs, *columns, strict=True)]


def _key(pairs: Sequence[Pair], recipe: DPORecipe) -> str:
    """Changes when the reference or any token does."""
    path, lora = Path(recipe.reference.path or recipe.model.path), recipe.model.lora
    bits = lora.base_bits if lora is not None and recipe.reference.path is None else None  # another model is not quantised
    described = f"{path if not path.is_dir() else model_fingerprint(path)} {recipe.model.dtype}"
    digest = hashlib.blake2b((described if bits is None else f"{described} {bits} bits").encode(), digest_size=16)
    for pair in pairs:
        for example in (pair.chosen, pair.rejected):
            digest.update(len(example).to_bytes(8, "little"))
            digest.update(example.tokens.tobytes())
            digest.update(example.loss_mask.tobytes())
    return digest.hexdigest()


def _read(file: Path, key: str) -> dict[str, Tensor] | None:
    """The log-probs in the file; None if there are none of this reference and these pairs."""
    if not file.exists():
        return None
    try:
        with safe_open(file, framework="pt") as tensors:
            of, _, checksum = (tensors.metadata() or {}).get("of", "").partition(" ")
            known = {name: tensors.get_tensor(name) for name in ("chosen", "rejected")}
        if checksum != _checksum(known):
            raise ValueError("its checksum does not match")
        return known if of == key else None
    except (OSError, ValueError, SafetensorError) as error:
        print_line(f"{file} is damaged ({error}); the reference's log-probs are computed again", "yellow")
    return None


def _checksum(tensors: dict[str, Tensor]) -> str:
    crc = 0
    for name, tensor in sorted(tensors.items()):
        crc = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), crc)
        crc = zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().data, crc)
    return f"{crc:08x}"


@contextmanager
def _reference(recipe: DPORecipe, policy: TrainableModel, world: World) -> Iterator[PreTrainedModel]:
    if recipe.reference.path is None:
        with policy.peft.disable_adapter() if policy.peft is not None else nullcontext():
            yield policy.model
        return
    settings = recipe.model.model_copy(update={"path": recipe.reference.path, "lora": None})
    model = load_model(settings, policy.device).requires_grad_(False)
    if is_sharded(policy.model):
        shard_model(model, world)
    try:
        yield model
    finally:
        del model
        if policy.device.type == "cuda":
            torch.cuda.empty_cache()
