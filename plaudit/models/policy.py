"""A causal language model as plaudit trains it: loaded from and saved in Hugging Face format, with or without LoRA.

Weights are safetensors on both ways; a model that only has pickled weights is refused.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from plaudit.data.templates import ChatTemplate
from plaudit.errors import RecipeError
from plaudit.models import attention
from plaudit.models.logprobs import target_logprobs
from plaudit.recipe import Lora, Model
from plaudit.types import Batch, Conversation

if TYPE_CHECKING:
    from peft import PeftModel

# Settings of models whose logits are more than a product with the head's weight.
UNSUPPORTED_HEADS = ("final_logit_softcapping", "attn_logit_softcapping", "logits_scaling", "logit_scale")


@dataclass
class Policy:
    """The model, on its device, and what goes beside it on disk."""

    model: PreTrainedModel
    template: ChatTemplate
    lora: Lora | None = None
    peft: "PeftModel | None" = None
    """Wraps `model`, whose layers carry the adapters."""

    @property
    def device(self) -> torch.device:
        return self.model.device

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, p) for name, p in self.model.named_parameters() if p.requires_grad)

    def save(self, folder: Path) -> None:
        """A folder that transformers and vLLM load: weights, config, tokenizer, chat template, what ends a turn."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.peft is None:
            self.model.save_pretrained(folder)
        elif self.lora and self.lora.merge_on_save:
            _save_merged(self.model, folder)
        else:
            self.peft.save_pretrained(folder, safe_serialization=True)
        self.template.tokenizer.save_pretrained(folder)


def resolve_device(device: Literal["auto", "cpu", "cuda"]) -> torch.device:
    if device == "cuda" and not torch.cuda.is_available():
        raise RecipeError("run.device is cuda, but torch sees no GPU here. Set run.device=cpu, or install torch with CUDA.")
    return torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")


def resolve_dtype(dtype: Literal["auto", "float32", "bfloat16"], device: torch.device) -> torch.dtype:
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, dtype)


def load_policy(recipe: Model, template: ChatTemplate, device: torch.device, *, seed: int = 0) -> Policy:
    """The recipe's model, ready to train."""
    transformers_logging.disable_progress_bar()  # its bars would break ours
    model = _load_model(recipe.path, resolve_dtype(recipe.dtype, device), recipe.trust_remote_code).to(device)  # pyright: ignore
    vocabulary, known = model.get_output_embeddings().weight.shape[0], len(template.tokenizer)
    if known > vocabulary:
        raise RecipeError(
            f"{recipe.path}: the tokenizer has {known:,} tokens, the model only {vocabulary:,}; choose a matching model.tokenizer"
        )
    _stop_at_end_of_turn(model, template)
    verify_packed(model)
    policy = Policy(model, template)
    if recipe.lora is not None:
        policy = _attach_lora(policy, recipe.lora, seed)
    if recipe.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if recipe.lora is not None:
            model.enable_input_require_grads()
    model.train()
    return policy


def _load_model(path: str, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation=attention.NAME,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise RecipeError(f"no model could be loaded from {path}: {' '.join(str(error).split())[:300]}") from None
    # transformers would go on with new random weights in their place.
    lacking = sorted([*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])])
    if lacking:
        more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
        raise RecipeError(f"{path}: weights are missing, or of another shape than config.json says: {', '.join(lacking[:3])}{more}")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise RecipeError(f"{path}: this is a LoRA adapter, not a whole model; save it with model.lora.merge_on_save")
    for name in UNSUPPORTED_HEADS:
        if getattr(model.config, name, None) not in (None, 1, 1.0):
            raise RecipeError(f"{path}: models with {name} are not supported yet")
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise RecipeError(f"{path}: models whose output head has a bias are not supported yet")
    return model


@torch.no_grad()
def verify_packed(model: PreTrainedModel) -> None:
    """Two short sequences, packed by us and apart by the model itself, must have the same log-probs.

    A model that ignores sequence starts, counts positions its own way or scales its logits is caught here, not after a
    training run.
    """
    was_training = model.training
    model.eval()
    device = model.device
    first, second = torch.arange(10, 17, device=device), torch.arange(40, 45, device=device)
    mask = torch.tensor([False, *[True] * 6, False, *[True] * 4], device=device)
    batch = Batch(
        tokens_T=torch.cat([first, second]),
        positions_T=torch.cat([torch.arange(7, device=device), torch.arange(5, device=device)]),
        loss_mask_T=mask,
        starts_S1=torch.tensor([0, 7, 12], dtype=torch.int32, device=device),
        longest=7,
    )
    try:
        ours = target_logprobs(model, batch).logprobs_N
    except NotImplementedError as error:
        raise RecipeError(f"{model.name_or_path}: {error}") from None
    model.set_attn_implementation("eager")
    theirs = torch.cat([_plain_logprobs(model, sequence) for sequence in (first, second)])
    model.set_attn_implementation(attention.NAME)
    model.train(was_training)
    if not theirs.isfinite().all():
        raise RecipeError(f"{model.name_or_path}: its weights give log-probs that are not finite; the model is damaged")
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.25
    if not (ours - theirs).abs().max() < tolerance:
        raise RecipeError(
            f"{model.name_or_path}: {type(model).__name__} computes other log-probs on packed batches than on its own "
            f"(they differ by {(ours - theirs).abs().max():.3g}), so plaudit cannot train it"
        )


def _plain_logprobs(model: PreTrainedModel, sequence: Tensor) -> Tensor:
    logits = model(input_ids=sequence[None], use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, sequence[1:, None])[:, 0]


def _stop_at_end_of_turn(model: PreTrainedModel, template: ChatTemplate) -> None:
    """Whoever samples the saved model stops where its template ends a turn (a base model's EOS is another token)."""
    config: Any = model.generation_config
    known = config.eos_token_id if config.eos_token_id is not None else []
    known = known if isinstance(known, list) else [known]
    end = end_of_turn(template)
    ends = dict.fromkeys(known if end is None else [*known, end])
    config.eos_token_id = list(ends) if len(ends) > 1 else next(iter(ends), None)


def end_of_turn(template: ChatTemplate) -> int | None:
    """The token that ends an assistant's turn, if the template has one."""
    probe = Conversation([{"role": "user", "content": "?"}, {"role": "assistant", "content": "."}])
    example = template.example(probe, "the probe")
    last = int(example.tokens[example.loss_mask][-1])
    return last if last in template.tokenizer.added_tokens_decoder else None  # pyright: ignore


# LoRA ----------------------------------------------------------------------------------------------------------------


def _attach_lora(policy: Policy, lora: Lora, seed: int) -> Policy:
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer

    torch.manual_seed(seed)  # of the adapters' first weights
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore (peft's annotation says int; it takes floats)
        lora_dropout=lora.dropout,
        target_modules=lora.targets if isinstance(lora.targets, str) else list(lora.targets),
        task_type="CAUSAL_LM",
    )
    try:
        peft = get_peft_model(policy.model, config, autocast_adapter_dtype=True)
    except ValueError as error:
        raise RecipeError(f"model.lora.targets: {str(error).splitlines()[0]}") from None
    head, embeddings = policy.model.get_output_embeddings(), policy.model.get_input_embeddings()
    if isinstance(head, LoraLayer) or (isinstance(embeddings, LoraLayer) and embeddings.weight is head.weight):
        raise RecipeError(
            "model.lora.targets: the output head (and embeddings tied to it) cannot be adapted, log-probs are computed from its "
            "plain weight"
        )
    return Policy(policy.model, policy.template, lora, peft)  # pyright: ignore


def _save_merged(model: PreTrainedModel, folder: Path) -> None:
    """W + ΔW under the model's own names. Adapters stay as they are: merging in place and back would not be exact."""
    from peft.tuners.lora import LoraLayer

    merged: dict[str, Tensor] = {}
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}
    for name, tensor in model.state_dict().items():
        if ".lora_" in name:
            continue
        owner, _, leaf = name.rpartition(".base_layer.")
        if owner in layers:
            if leaf == "weight":
                delta = layers[owner].get_delta_weight("default")  # pyright: ignore
                tensor = (tensor.float() + delta.float()).to(tensor.dtype)
            name = f"{owner}.{leaf}"
        merged[name] = tensor.contiguous()
    model.save_pretrained(folder, state_dict=merged)
