"""Pairs, and the losses over them."""

from dataclasses import replace
from pathlib import Path

import torch

from plaudit.data.conversations import Source
from plaudit.data.pairs import load_pairs
from plaudit.data.templates import load_template, load_tokenizer
from plaudit.data.transcript import Transcript
from plaudit.models.classifier import load_classifier
from plaudit.models.trainable import load_policy
from plaudit.recipe import DPOLossSettings, ModelSettings, RewardModelLossSettings
from plaudit.types import Pair

CPU = torch.device("cpu")


def make_pairs(folder: Path, file: Path, *, scalar: bool) -> list[Pair]:
    template = load_template(load_tokenizer(str(folder)), None)
    tokenise = Transcript(template.tokenizer, template.text).examples if scalar else (lambda c: template.examples(c, "all"))
    pairs = load_pairs([Source(file)], tokenise, max_tokens=256, too_long="error").pairs[:8]
    return [replace(pair, margin=0.1 * i, ref_chosen=-20.0 - i, ref_rejected=-25.0 + i) for i, pair in enumerate(pairs)]


def load_model(folder: Path, *, scalar: bool, **model):
    template = load_template(load_tokenizer(str(folder)), None)
    return (load_classifier if scalar else load_policy)(ModelSettings(path=str(folder), dtype="float32", **model), template, CPU)


LOSSES = {
    "sigmoid": DPOLossSettings(),
    "cDPO with nll": DPOLossSettings(label_smoothing=0.2, nll_coefficient=0.3),
    "ipo": DPOLossSettings(kind="ipo"),
    "hinge": DPOLossSettings(kind="hinge", beta=0.01),
    "reward model": RewardModelLossSettings(),
    "reward model, centred": RewardModelLossSettings(centring_coefficient=0.1),
}
