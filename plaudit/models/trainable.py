"""A causal language model as plaudit trains it: loaded from and saved in Hugging Face format, with or without LoRA.

Weights are loaded and saved as safetensors; a model with only pickled weights is refused.
"""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from plaudit.data.templates import ChatTemplate
from plaudit.errors import RecipeError
from plaudit.host import return_freed_memory
from plaudit.hub import model_folder
from plaudit.lora_folder import QUANTISED, read_lora_folder
from plaudit.models import attention
from plaudit.models.checkpointing import checkpoint_layers
from plaudit.models.folder import config_to_load, count_labels
from plaudit.models.fused import merge_adapters, prepare_layers, quantise_base
from plaudit.models.host_memory import HostMemory
from plaudit.models.layer_blocks import own_layers
from plaudit.models.lora import PEFT_PREFIX, attach_lora, iter_merged_weights, merge_lora, merged_weights, saved_by_peft
from plaudit.models.quantised import QuantisedLinear, round_linears
from plaudit.models.sharded import gather_on_host, is_sharded, iter_some, iter_whole
from plaudit.models.verify import verify_packed, verify_shared
from plaudit.recipe import LoraSettings, ModelSettings
from plaudit.redaction import redact
from plaudit.response_files import read_response_files
from plaudit.threads import fit_threads

if TYPE_CHECKING:
    from peft import PeftModel

# Config settings of models that compute more than packed attention and a product with the head's weight.
UNSUPPORTED = ("final_logit_softcapping", "attn_logit_softcapping", "logits_scaling", "logit_scale", "attention_chunk_size")

# While loading, transformers patches methods of all models. Reward models load in threads of their own, and two loads at once would
# leave tied weights untied for good.
LOAD_LOCK = threading.Lock()


@dataclass
class TrainableModel:
    """The model on its device, with everything saved alongside it."""

    model: PreTrainedModel
    template: ChatTemplate
    lora: LoraSettings | None = None
    peft: "PeftModel | None" = None
    """Wraps `model`, whose layers carry the adapters."""
    response_files: dict[str, bytes] = field(default_factory=dict)
    """How its responses are written (plaudit/response_files.py), by file name."""
    _tokenizer: dict[str, bytes] | None = None
    """The tokenizer's files, once they were needed."""

    @property
    def device(self) -> torch.device:
        return self.model.device

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, p) for name, p in self.model.named_parameters() if p.requires_grad)

    def saved_bytes(self) -> int:
        """Size of the saved weights, roughly."""
        if self.peft is not None and not self._merges:
            return sum(p.numel() * p.element_size() for _, p in self.trainable())
        quantised = sum(m.in_features * m.out_features for m in self.model.modules() if isinstance(m, QuantisedLinear))
        weights = sum(p.numel() for p in self.model.parameters()) + quantised
        return weights * self.model.dtype.itemsize  # (a shard may be finer)

    @property
    def _merges(self) -> bool:
        return self.lora is not None and self.lora.merge_on_save

    def save(self, folder: Path | None) -> None:
        """Write a folder that transformers and vLLM can load: weights, config, tokenizer, chat template, end-of-turn tokens, and
        how its responses are written. Without one, only help to gather a sharded model's weights."""
        write = self.snapshot(None, keep=folder is not None)
        if folder is not None:
            write(folder)

    def snapshot(self, memory: HostMemory | None, *, keep: bool) -> Callable[[Path], None]:
        """What writes that folder, in any thread; from copies in `memory`, or without one from the model itself. `keep`: whether
        this process needs it, or only helps to gather a sharded model's weights."""
        merge = self.peft is not None and self._merges
        weights = self._saved_weights(memory, merge=merge, keep=keep)
        tokenizer = self._tokenizer_files() if keep else {}
        base = None if merge else next((m for m in self.model.modules() if isinstance(m, QuantisedLinear)), None)
        described = {} if base is None else {"base_bits": base.bits, "dtype": str(base.dtype).removeprefix("torch.")}
        quantised = {QUANTISED: json.dumps(described).encode()} if described else {}

        def write(folder: Path) -> None:
            folder.mkdir(parents=True, exist_ok=True)
            if self.peft is None or merge:
                self.model.save_pretrained(folder, state_dict=weights)
            else:
                self.peft.save_pretrained(str(folder), state_dict=weights)
            for name, content in (tokenizer | self.response_files | quantised).items():
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_bytes(content)

        return write

    def _saved_weights(self, memory: HostMemory | None, *, merge: bool, keep: bool) -> dict[str, Tensor] | None:
        """By the names that are saved; None for the model's own."""
        adapters = saved_by_peft(self.peft) if self.peft is not None and not merge else None
        if is_sharded(self.model):
            if adapters is not None:
                whole = iter_some(self.model, adapters)
            else:
                whole = iter_merged_weights(self.model) if merge else iter_whole(self.model)
            weights = gather_on_host(self.model, whole, memory, keep=keep)
        elif merge and keep:
            weights = merged_weights(self.model, memory)
        elif memory is not None and keep:
            state = self.model.state_dict()
            weights = memory.copies("model", {name: state[name] for name in adapters or state})
        else:
            return None
        return weights if adapters is None else {f"{PEFT_PREFIX}{name}": tensor for name, tensor in weights.items()}

    def _tokenizer_files(self) -> dict[str, bytes]:
        """They never change. A tokenizer must not be saved in one thread while it is used in another."""
        if self._tokenizer is None:
            with TemporaryDirectory() as folder:
                self.template.tokenizer.save_pretrained(folder)
                files = (file for file in Path(folder).rglob("*") if file.is_file())
                self._tokenizer = {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}
        return self._tokenizer


def resolve_dtype(dtype: Literal["auto", "float32", "bfloat16"], device: torch.device) -> torch.dtype:
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, dtype)


def load_policy(recipe: ModelSettings, template: ChatTemplate, device: torch.device, *, seed: int = 0) -> TrainableModel:
    """The recipe's model, ready to train."""
    model = load_model(recipe, device)
    vocabulary, known = model.get_output_embeddings().weight.shape[0], len(template.tokenizer)  # pyright: ignore
    if known > vocabulary:
        raise RecipeError(
            f"{recipe.path}: the tokenizer has {known:,} tokens, the model only {vocabulary:,}; choose a matching model.tokenizer"
        )
    stop_at_end_of_turn(model, template)
    fix_generation_config(model)
    peft = attach_lora(model, recipe.lora, seed) if recipe.lora is not None else None
    if peft is not None:
        merge_adapters(model)
    checkpoint_layers(model, recipe)
    model.train()
    return TrainableModel(model, template, recipe.lora, peft, read_response_files(recipe.path))


def load_sampled(recipe: ModelSettings, policy: TrainableModel, *, copy: bool = False) -> PreTrainedModel:
    """The model that an engine samples: the policy's own; or a whole copy, which gets its weights from it, if the policy is sharded
    or a `copy` is needed."""
    if not (copy or is_sharded(policy.model)):
        return policy.model
    model = load_model(recipe.model_copy(update={"lora": None}), policy.device).eval().requires_grad_(False)
    model.generation_config = policy.model.generation_config  # the tokens that end a response
    return model


def load_model(recipe: ModelSettings, device: torch.device) -> PreTrainedModel:
    """The recipe's model as it is on disk, verified to be one that plaudit computes correctly."""
    model: Any = load_pretrained(
        AutoModelForCausalLM, recipe.path, resolve_dtype(recipe.dtype, device), trust_remote_code=recipe.trust_remote_code
    )
    quantise_base(model, recipe.lora, device)
    model = model.to(device)
    fit_threads(model.config, device)
    prepare_layers(model, liger=recipe.liger)
    verify_packed(model)
    verify_shared(model.get_decoder())
    return model


def load_pretrained(
    auto: Any,
    path: str,
    dtype: torch.dtype | None,
    *,
    trust_remote_code: bool,
    new: Sequence[str] = (),
    partial: bool = False,
    **config: Any,
) -> PreTrainedModel:
    """Load a model with one of transformers' auto classes, complete and from safetensors, onto the CPU. A LoRA adapter is merged
    into its base; one that was trained on a quantised base, into that.

    `dtype`: None for the one it was saved in, or was trained in on a quantised base. `new`: name prefixes of weights that may be
    missing; the caller initialises them. `partial`: `auto` is a model class without the modules of some weights, which are then not
    read.
    `config`: overrides for the model's config."""
    return_freed_memory()
    lora = read_lora_folder(path)
    if lora is not None:
        head = ("score.",) if lora.scores else ()
        labels = {"num_labels": count_labels(lora)} if lora.scores else {}
        more = {"new": (*new, *head), "partial": partial, **labels, **config}
        trained = None if lora.quantised is None else getattr(torch, lora.quantised.dtype)
        base = load_pretrained(auto, lora.base, trained or dtype, trust_remote_code=trust_remote_code, **more)
        if lora.quantised is not None:  # rounded as in training, and only then to another dtype
            for layer in own_layers(base.get_decoder()):
                round_linears(layer, lora.quantised.bits)
        merged = merge_lora(base, lora)
        return merged if trained is None or dtype in (None, trained) else _converted(merged, dtype)
    transformers_logging.disable_progress_bar()  # its bars would break ours
    folder = model_folder(path)
    settings = config_to_load(folder, trust_remote_code=trust_remote_code, **config)
    settings._attn_implementation = attention.NAME  # a `_attn_implementation` in config.json would win over the argument
    try:
        with LOAD_LOCK, _quiet_loading(bool(new) or partial):
            model, report = auto.from_pretrained(
                folder,
                config=settings,
                dtype="auto" if dtype is None else dtype,
                attn_implementation=attention.NAME,
                trust_remote_code=trust_remote_code,
                use_safetensors=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except Exception as error:  # whatever transformers makes of an odd config or damaged weights
        reason = redact(" ".join(str(error).split()))[:300] or type(error).__name__
        raise RecipeError(f"no model could be loaded from {path} (safetensors only, never pickled weights): {reason}") from None
    # transformers would silently initialise these at random.
    lacking = sorted({*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])})
    lacking = [name for name in lacking if not name.startswith(tuple(new))]
    if lacking:
        more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
        raise RecipeError(f"{path}: weights are missing, or of another shape than config.json says: {', '.join(lacking[:3])}{more}")
    if model.config._attn_implementation != attention.NAME:
        raise RecipeError(f"{path}: its code replaces the attention that plaudit chooses ({model.config._attn_implementation})")
    rope: dict[str, Any] = getattr(model.config, "rope_parameters", None) or {}
    for kind in (part.get("rope_type") for part in (rope, *rope.values()) if isinstance(part, dict)):
        if kind in ("longrope", "dynamic"):
            raise RecipeError(f"{path}: {kind} position embeddings depend on what else is in the batch, so rows cannot be packed")
    for name in UNSUPPORTED:
        if getattr(model.config, name, None) not in (None, 1, 1.0):
            raise RecipeError(f"{path}: models with {name} are not supported yet")
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise RecipeError(f"{path}: models whose output head has a bias are not supported yet")
    return model


def _converted(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Weights of the decoder and an output head; buffers and a score head, which are in fp32 in any case, are left."""
    kept = {id(parameter) for parameter in getattr(model, "score", nn.Identity()).parameters()}
    for parameter in (p for p in model.parameters() if id(p) not in kept):
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype  # pyright: ignore (transformers sets it)
    return model


@contextmanager
def _quiet_loading(quiet: bool) -> Iterator[None]:
    """Suppress transformers' table of missing and unused weights where they are expected."""
    before = transformers_logging.get_verbosity()
    if quiet:
        transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def stop_at_end_of_turn(model: PreTrainedModel, template: ChatTemplate) -> None:
    """Make samplers of the saved model stop where its template ends a turn (a base model's EOS is a different token)."""
    config: Any = model.generation_config
    known = config.eos_token_id if config.eos_token_id is not None else []
    known = known if isinstance(known, list) else [known]
    ends = dict.fromkeys(known if template.end_token is None else [*known, template.end_token])
    config.eos_token_id = list(ends) if len(ends) > 1 else next(iter(ends), None)


def fix_generation_config(model: PreTrainedModel) -> None:
    """Published models often set a temperature with sampling disabled, which transformers loads but then refuses to save."""
    config: Any = model.generation_config
    if not config.do_sample:
        for name in ("temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"):
            setattr(config, name, None)
    try:
        config.validate(strict=True)
    except ValueError as error:
        reason = " ".join(str(error).split())[:300]
        raise RecipeError(f"{model.name_or_path}: its generation_config.json could not be saved again: {reason}") from None
