"""LoRA: peft's adapters on the model's own layers, and the merged weights."""

import re
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from plaudit.errors import RecipeError
from plaudit.lora_folder import LoraFolder
from plaudit.models.host_memory import HostMemory
from plaudit.models.merged import merge_into, merged_weight_of
from plaudit.models.quantised import QuantisedLinear
from plaudit.models.sharded import is_sharded, iter_some, iter_whole
from plaudit.recipe import LoraSettings

if TYPE_CHECKING:
    from peft import PeftModel

PEFT_PREFIX = "base_model.model."
"""Of a model's names within peft's wrapper."""


def attach_lora(
    model: PreTrainedModel,
    lora: LoraSettings,
    seed: int,
    *,
    section: str = "model",
    head: str | None = None,
) -> "PeftModel":
    """Add adapters to the model's layers in place and freeze its own weights, except those of `head`: the name of a layer after the
    decoder, which is trained in full."""
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer

    if head is not None and not isinstance(lora.targets, str) and head in lora.targets:
        raise RecipeError(f"{section}.lora.targets: {head} is trained in full, so it cannot have an adapter too")
    torch.manual_seed(seed)  # for the adapters' initial weights
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore (peft's annotation says int; it takes floats)
        lora_dropout=lora.dropout,
        target_modules=lora.targets if isinstance(lora.targets, str) else list(lora.targets),
        task_type="CAUSAL_LM" if head is None else "SEQ_CLS",
        modules_to_save=None if head is None else [head],
    )
    try:
        peft = get_peft_model(model, config, autocast_adapter_dtype=True)
    except (ValueError, re.error) as error:
        raise RecipeError(f"{section}.lora.targets: {str(error).splitlines()[0]}") from None
    if head is not None:
        return peft  # pyright: ignore
    output, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if isinstance(output, LoraLayer) or (isinstance(embeddings, LoraLayer) and embeddings.weight is output.weight):  # pyright: ignore
        raise RecipeError(
            "model.lora.targets: the output head (and embeddings tied to it) cannot be adapted, log-probs are computed from its "
            "plain weight"
        )
    return peft  # pyright: ignore


def merge_lora(base: PreTrainedModel, lora: LoraFolder) -> PreTrainedModel:
    """The base with a saved adapter merged into it, and no trace of peft: W + ΔW is rounded once to the base's dtype. On a base
    that was quantised, which is always trained with merged weights, it is rounded as in training."""
    from peft import PeftConfig, PeftModel
    from peft.tuners.lora import Linear

    if lora.scores:
        head: Any = getattr(base, "score")  # noqa: B009 (no attribute of every model)
        head.float()  # heads are trained and saved in fp32
    try:
        config = PeftConfig.from_pretrained(str(lora.folder))
        config.task_type = None  # a causal model's adapter may start a reward model; peft's classes for tasks would refuse
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Found missing adapter keys")
            peft: Any = PeftModel.from_pretrained(base, str(lora.folder), config=config)
    except Exception as error:  # whatever peft makes of an odd config or damaged weights
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise RecipeError(f"{lora.folder}: this LoRA adapter does not fit its base, {lora.base}: {reason}") from None
    if lora.quantised is None:
        return peft.merge_and_unload().requires_grad_(True)
    with torch.no_grad():
        adapted: list[Any] = [module for module in peft.modules() if isinstance(module, Linear)]
        for layer in adapted:
            weight, scale = layer.base_layer.weight, layer.scaling["default"]
            merge_into(weight, weight, layer.lora_A["default"].weight, layer.lora_B["default"].weight, scale)
    return peft.unload().requires_grad_(True)


def iter_merged_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """W + ΔW under the model's own names, in layer order. Adapters are left as they are: merging in place and back is not exact."""
    return _iter_own_names(model, merge=True)


def iter_base_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The same without ΔW."""
    return _iter_own_names(model, merge=False)


def _iter_own_names(model: nn.Module, *, merge: bool) -> Iterator[tuple[str, Tensor]]:
    from peft.tuners.lora import LoraLayer

    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}
    quantised = {name: module for name, module in model.named_modules() if isinstance(module, QuantisedLinear)}
    for name, tensor in iter_whole(model):
        if ".lora_" in name or ".original_module." in name:
            continue
        name = name.replace(".modules_to_save.default.", ".")
        linear, _, leaf = name.rpartition(".")
        if linear in quantised:
            if leaf == "scales":
                continue
            if leaf == "codes":
                name, tensor = f"{linear}.weight", quantised[linear].weight
        owner, _, leaf = name.rpartition(".base_layer.")
        if owner in layers:
            if leaf == "weight" and merge:
                tensor = _merged_weight(layers[owner], tensor)
            name = f"{owner}.{leaf}"
        yield name, tensor


def _merged_weight(layer: Any, base: Tensor) -> Tensor:
    """The one that is trained with; if peft computes the layer, the sum rounded once."""
    merged = merged_weight_of(layer)
    return (base.float() + layer.get_delta_weight("default").float()).to(base.dtype) if merged is None else merged


class Adapters:
    """All that is trained of a model with LoRA, in peft's format. Iterating yields (name, tensor): A and B of each adapted layer.
    If the model is sharded, all its processes must iterate over all of them."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._config: Any = model.peft_config["default"]  # pyright: ignore (peft has put it there)

    @classmethod
    def of(cls, model: nn.Module) -> "Adapters | None":
        """None if the model has none, or if other weights are trained too."""
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        return cls(model) if trained and all(".lora_" in name for name in trained) else None

    @property
    def rank(self) -> int:
        return self._config.r

    @property
    def config(self) -> dict[str, Any]:
        """The content of adapter_config.json."""
        config = self._config.to_dict()
        targets = config["target_modules"]
        return config | {"target_modules": targets if isinstance(targets, str) else sorted(targets)}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        names = [name for name, _ in self._model.named_parameters() if ".lora_" in name]
        named = iter_some(self._model, names) if is_sharded(self._model) else ((n, self._model.get_parameter(n)) for n in names)
        for name, tensor in named:
            yield f"{PEFT_PREFIX}{name.replace('.default.', '.')}", tensor.detach()


def merged_weights(model: PreTrainedModel, memory: HostMemory | None = None) -> dict[str, Tensor]:
    """The same for saving. Merged tensors are moved to the CPU, since a GPU may not have room for a second model; with `memory`,
    all are copied there."""
    own = {tensor.data_ptr() for tensor in model.state_dict().values()}
    weights: dict[str, Tensor] = {}
    for name, tensor in iter_merged_weights(model):
        if tensor.data_ptr() in own:
            weights[name] = tensor.contiguous() if memory is None else memory.copies("model", {name: tensor})[name]
        else:
            weights[name] = tensor.cpu().contiguous() if memory is None else memory.copy(f"model/{name}", tensor)
    return weights


def saved_by_peft(peft: "PeftModel") -> list[str]:
    """Names of those weights of the model in it that peft saves: adapters, and what is trained in full."""
    from peft import get_peft_model_state_dict

    everything = peft.state_dict()
    saved = {id(tensor) for tensor in get_peft_model_state_dict(peft, state_dict=everything).values()}
    return [name.removeprefix(PEFT_PREFIX) for name, tensor in everything.items() if id(tensor) in saved]
