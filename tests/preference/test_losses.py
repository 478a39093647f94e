"""Preference pairs: losses by hand, steps that do not depend on packing, micro-batches or order, and reading rows."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from plaudit.data.conversations import Source, resolve_sources
from plaudit.data.pack import pack_pairs, pair_micro_batches
from plaudit.data.pairs import load_pairs, read_pairs
from plaudit.data.templates import load_template, load_tokenizer
from plaudit.data.transcript import Transcript
from plaudit.errors import DataError
from plaudit.objectives.preference import (
    bradley_terry_loss,
    calibration_error,
    hinge_loss,
    ipo_loss,
    share_preferred,
    sigmoid_loss,
)
from plaudit.preference.losses import answer_logprobs, answer_scores, dpo_loss, measure, reward_model_loss
from plaudit.recipe import DPOLossSettings, LoraSettings, RewardModelLossSettings
from plaudit.types import Pair
from plaudit.world import World
from support.preferences import LOSSES, load_model, make_pairs
from support.rows import pair_rows, write_jsonl

CPU = torch.device("cpu")
USER, GOOD, BAD = (
    {"role": "user", "content": "What is 1 + 2?"},
    {"role": "assistant", "content": "3"},
    {"role": "assistant", "content": "4, I guess"},
)


# Losses by hand ------------------------------------------------------------------------------------------------------


def log_sigmoid(x: float) -> float:
    return -math.log(1 + math.exp(-x))


def assert_values(values, expected):
    assert values.tolist() == pytest.approx(expected, abs=1e-12)


def test_sigmoid_loss():
    margins = tensor([0.0, 2.0, -1.0], dtype=torch.float64)
    assert_values(sigmoid_loss(margins), [math.log(2), -log_sigmoid(2), -log_sigmoid(-1)])
    assert_values(
        sigmoid_loss(margins, label_smoothing=0.1),
        [math.log(2), -0.9 * log_sigmoid(2) - 0.1 * log_sigmoid(-2), -0.9 * log_sigmoid(-1) - 0.1 * log_sigmoid(1)],
    )


def test_hinge_loss():
    assert_values(hinge_loss(tensor([0.0, 0.25, 1.0, 3.0, -1.0], dtype=torch.float64)), [1.0, 0.75, 0.0, 0.0, 2.0])


def test_ipo_loss():
    """β = 0.25 wants a difference of 2 per token: (3 − 1 − 2)² = 0, (0 − 0 − 2)² = 4, (1 − 2 − 2)² = 9."""
    chosen, rejected = tensor([3.0, 0.0, 1.0], dtype=torch.float64), tensor([1.0, 0.0, 2.0], dtype=torch.float64)
    assert_values(ipo_loss(chosen, rejected, beta=0.25), [0.0, 4.0, 9.0])


def test_bradley_terry_loss():
    chosen, rejected, margins = (tensor(v, dtype=torch.float64) for v in ([1.0, 0.0, 2.0], [1.0, 1.0, -1.0], [0.0, 0.0, 3.0]))
    assert_values(bradley_terry_loss(chosen, rejected, margins), [math.log(2), -log_sigmoid(-1), math.log(2)])
    assert_values(
        bradley_terry_loss(chosen, rejected, margins, centring_coefficient=0.5),
        [math.log(2) + 2.0, -log_sigmoid(-1) + 0.5, math.log(2) + 0.5],
    )


def test_a_tie_is_half_right():
    assert share_preferred(tensor([1.0, 0.0, -1.0])).tolist() == [1.0, 0.5, 0.0]


def test_calibration_error_by_hand():
    """σ(ln 3) = 3/4: of four pairs at that distance three should be right. If only two are, the error is a quarter."""
    distance = math.log(3)
    assert calibration_error(tensor([distance, distance, distance, -distance])).item() == pytest.approx(0.0, abs=1e-7)
    assert calibration_error(tensor([distance, distance, -distance, -distance])).item() == pytest.approx(0.25, abs=1e-7)
    # Another bin: certain and always right. Half of the pairs have an error of a quarter, the others none.
    mixed = tensor([distance, distance, -distance, -distance, 50.0, 50.0, 50.0, 50.0])
    assert calibration_error(mixed).item() == pytest.approx(0.125, abs=1e-7)
    assert calibration_error(torch.zeros(5)).item() == 0.0, "a coin flip, predicted as one"


@given(st.lists(st.floats(-20, 20), min_size=1, max_size=20))
@settings(max_examples=50, deadline=None)
def test_properties_for_any_margins(values):
    margins = tensor(values, dtype=torch.float64)
    zeros = torch.zeros_like(margins)
    assert torch.equal(sigmoid_loss(margins), bradley_terry_loss(margins, zeros, zeros)), "DPO is Bradley–Terry on implicit rewards"
    assert (sigmoid_loss(margins) >= 0).all()
    assert torch.allclose(sigmoid_loss(margins) - sigmoid_loss(-margins), -margins)
    assert torch.allclose(share_preferred(margins) + share_preferred(-margins), torch.ones_like(margins))
    assert 0 <= calibration_error(margins).item() <= 1
    assert torch.allclose(bradley_terry_loss(margins + 5, zeros + 5, zeros), bradley_terry_loss(margins, zeros, zeros))


# A step --------------------------------------------------------------------------------------------------------------


def step(policy, pairs: list[Pair], settings, batches) -> tuple[float, dict[str, float], dict[str, torch.Tensor]]:
    """Loss, metrics and gradients of an update."""
    make = dpo_loss if isinstance(settings, DPOLossSettings) else reward_model_loss
    loss, total, sums = make(policy.model, pairs, settings), 0.0, {}
    policy.model.zero_grad()
    for batch in batches:
        share, metrics = loss(batch)
        share.backward()
        total += share.item()
        sums = {name: sums.get(name, 0.0) + value.item() for name, value in metrics.items()}
    return total, sums, {name: p.grad.clone() for name, p in policy.trainable() if p.grad is not None}


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", LOSSES)
def test_splitting_a_step_changes_nothing(tiny_models, pairs_file, name):
    """All pairs in one batch, one by one, within a token budget, and reversed: the same loss, metrics and gradients."""
    scalar = isinstance(LOSSES[name], RewardModelLossSettings)
    policy, pairs = load_model(tiny_models["qwen2"], scalar=scalar), make_pairs(tiny_models["qwen2"], pairs_file, scalar=scalar)
    full = step(policy, pairs, LOSSES[name], [pack_pairs(pairs)])
    splits = {
        "one by one": [pack_pairs([pair]) for pair in pairs],
        "by tokens": pair_micro_batches(pairs, 150),
        "reversed": [pack_pairs(pairs[::-1])],
    }
    assert len(splits["by tokens"]) not in (1, len(pairs))
    assert sum(gradient.norm() for gradient in full[2].values()) > 0
    for how, batches in splits.items():
        loss, metrics, gradients = step(policy, pairs, LOSSES[name], batches)
        assert loss == pytest.approx(full[0], abs=1e-5), how
        assert metrics == pytest.approx(full[1], abs=1e-4), how
        assert gradients.keys() == full[2].keys()
        for parameter, gradient in gradients.items():
            torch.testing.assert_close(gradient, full[2][parameter], rtol=1e-4, atol=1e-5, msg=f"{how}: {parameter}")


def test_pairs_are_never_split(tiny_model, pairs_file):
    pairs = make_pairs(tiny_model, pairs_file, scalar=False)
    for budget in (1, 60, 10_000):
        batches = pair_micro_batches(pairs, budget)
        assert sum(len(batch.starts_S1) - 1 for batch in batches) == 2 * len(pairs)
        assert all(
            len(batch.starts_S1) % 2 == 1 and len(batch.pairs.margins_P) * 2 + 1 == len(batch.starts_S1) for batch in batches
        )


def test_log_probs_match_transformers(tiny_model, pairs_file):
    policy, pairs = load_model(tiny_model, scalar=False), make_pairs(tiny_model, pairs_file, scalar=False)
    chosen, rejected = measure(policy.model, pairs, answer_logprobs, 150, World.alone())
    policy.model.set_attn_implementation("eager")
    for values, side in ((chosen, "chosen"), (rejected, "rejected")):
        for value, pair in zip(values, pairs, strict=True):
            example = getattr(pair, side)
            tokens = torch.from_numpy(example.tokens.astype(np.int64))
            with torch.no_grad():
                logits = policy.model(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1)
            logprobs = logits.gather(-1, tokens[1:, None])[:, 0][torch.from_numpy(example.loss_mask[1:])]
            assert value.item() == pytest.approx(logprobs.sum().item(), abs=1e-4)


@pytest.mark.parametrize("kind", ["sigmoid", "ipo", "hinge"])
def test_losses_of_a_policy_equal_to_its_reference(tiny_model, pairs_file, kind):
    """The losses are log 2, (1 / 2β)² and a hinge of 1; every reward is 0, and accuracy is that of a coin flip."""
    policy, pairs = load_model(tiny_model, scalar=False), make_pairs(tiny_model, pairs_file, scalar=False)
    batch = pack_pairs(pairs)
    chosen, rejected = (values.detach().tolist() for values in answer_logprobs(policy.model, batch))
    pairs = [replace(p, ref_chosen=c, ref_rejected=r) for p, c, r in zip(pairs, chosen, rejected, strict=True)]
    loss, metrics, _ = step(policy, pairs, DPOLossSettings(kind=kind, beta=0.2), [pack_pairs(pairs)])
    assert loss == pytest.approx({"sigmoid": math.log(2), "ipo": 2.5**2, "hinge": 1.0}[kind], abs=1e-12)
    assert (metrics["accuracy"], metrics["margin"], metrics["reward_chosen"], metrics["reward_rejected"]) == (0.5, 0.0, 0.0, 0.0)


def test_dpo_by_hand_from_log_probs(tiny_model, pairs_file):
    policy, pairs = load_model(tiny_model, scalar=False), make_pairs(tiny_model, pairs_file, scalar=False)
    chosen, rejected = measure(policy.model, pairs, answer_logprobs, 10_000, World.alone())
    loss, metrics, _ = step(policy, pairs, DPOLossSettings(beta=0.3, label_smoothing=0.1, nll_coefficient=0.5), [pack_pairs(pairs)])
    ratios = [(c - p.ref_chosen, r - p.ref_rejected) for c, r, p in zip(chosen.tolist(), rejected.tolist(), pairs, strict=True)]
    margins = [0.3 * (a - b) for a, b in ratios]
    nll = -chosen.sum().item() / sum(pair.chosen.num_targets for pair in pairs)
    expected = sum(-0.9 * log_sigmoid(m) - 0.1 * log_sigmoid(-m) for m in margins) / len(pairs) + 0.5 * nll
    assert loss == pytest.approx(expected, abs=1e-4)
    assert metrics["nll"] == pytest.approx(nll, abs=1e-5)
    assert metrics["margin"] == pytest.approx(sum(margins) / len(pairs), abs=1e-4)
    assert metrics["reward_chosen"] == pytest.approx(0.3 * sum(a for a, _ in ratios) / len(pairs), abs=1e-4)
    assert metrics["logprob_rejected"] == pytest.approx(rejected.mean().item(), abs=1e-4)


def test_equal_scores_give_a_loss_of_log_2(tiny_model, pairs_file):
    policy, pairs = load_model(tiny_model, scalar=True), make_pairs(tiny_model, pairs_file, scalar=True)
    twins = [replace(pair, rejected=pair.chosen, margin=0.0) for pair in pairs]
    loss, metrics, _ = step(policy, twins, RewardModelLossSettings(), [pack_pairs(twins)])
    assert loss == pytest.approx(math.log(2), abs=1e-6)
    assert metrics["margin"] == pytest.approx(0.0, abs=1e-5)


def test_lora_trains_the_full_head_and_starts_from_the_same_scores(tiny_model, pairs_file):
    pairs = make_pairs(tiny_model, pairs_file, scalar=True)
    full, lora = load_model(tiny_model, scalar=True), load_model(tiny_model, scalar=True, lora=LoraSettings(rank=4))
    scores = (measure(one.model, pairs, answer_scores, 500, World.alone()) for one in (full, lora))
    for a, b in zip(*scores, strict=True):
        torch.testing.assert_close(a, b)
    names = [name for name, _ in lora.trainable()]
    assert [name for name in names if "lora_" not in name] == ["score.modules_to_save.default.weight"]
    _, _, gradients = step(lora, pairs, RewardModelLossSettings(), [pack_pairs(pairs)])
    assert "score.modules_to_save.default.weight" in gradients


# Rows ----------------------------------------------------------------------------------------------------------------


def read(folder: Path, *rows: dict, **settings) -> list:
    return [pair for _, pair in read_pairs(Source(write_jsonl(folder / "rows.jsonl", list(rows))), **settings)]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "What is 1 + 2?", "chosen": "3", "rejected": "4, I guess"},
        {"prompt": [USER], "chosen": "3", "rejected": "4, I guess"},
        {"prompt": json.dumps([USER]), "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [USER], "chosen": GOOD, "rejected": BAD},
        {"prompt": "What is 1 + 2?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},  # as in UltraFeedback
        {"chosen": [USER, GOOD], "rejected": [USER, BAD], "score_chosen": 8.0},
        {"chosen": json.dumps([USER, GOOD]), "rejected": json.dumps([USER, BAD])},
    ],
)
def test_every_format_of_a_pair(tmp_path, row):
    [pair] = read(tmp_path, row)
    assert pair.chosen.messages == [USER, GOOD]
    assert pair.rejected.messages == [USER, BAD]
    assert pair.chosen.train_from == pair.rejected.train_from == 1


def test_the_shared_start_of_both_conversations_is_the_prompt(tmp_path, tiny_model):
    """The first answer is the same on both sides, the next two differ: only those two are compared."""
    shared = [USER, GOOD, {"role": "user", "content": "And twice that?"}]
    more = {"role": "user", "content": "Why?"}
    chosen = [*shared, {"role": "assistant", "content": "6"}, more, {"role": "assistant", "content": "3 + 3"}]
    rejected = [*shared, {"role": "assistant", "content": "7"}, more, {"role": "assistant", "content": "4 + 3"}]
    [pair] = read(tmp_path, {"chosen": chosen, "rejected": rejected})
    assert pair.chosen.train_from == 3
    template = load_template(load_tokenizer(str(tiny_model)), None)
    example = template.example(pair.chosen, "row")
    targets = template.tokenizer.decode(example.tokens[example.loss_mask])
    assert targets == "6<|im_end|>3 + 3<|im_end|>"


def test_parquet_and_margins(tmp_path):
    rows = [
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD], "by": 2},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD], "by": 0},
    ]
    pa.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    pairs = [pair for _, pair in read_pairs(Source(tmp_path / "rows.parquet"), "by")]
    assert [pair.margin for pair in pairs] == [2.0, 0.0]


def test_llama_factory_rankings(tmp_path):
    write_jsonl(tmp_path / "sharegpt.jsonl", [
        {"conversations": [{"from": "human", "value": USER["content"]}], "chosen": {"from": "gpt", "value": "3"},
         "rejected": {"from": "gpt", "value": "4, I guess"}},
    ])  # fmt: skip
    write_jsonl(tmp_path / "alpaca.jsonl", [{"q": USER["content"], "good": "3", "bad": "4, I guess"}])
    info = {
        "a": {"file_name": "sharegpt.jsonl", "formatting": "sharegpt", "ranking": True},
        "b": {"file_name": "alpaca.jsonl", "ranking": True, "columns": {"prompt": "q", "chosen": "good", "rejected": "bad"}},
        "c": {"file_name": "alpaca.jsonl"},
    }
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    sources = resolve_sources(["a", "b"], str(tmp_path / "dataset_info.json"), "data.train", ranked=True)
    for source in sources:
        [(_, pair)] = read_pairs(source)
        assert (pair.chosen.messages, pair.rejected.messages) == ([USER, GOOD], [USER, BAD])
    with pytest.raises(DataError, match="c is not a file of pairs: it has no `ranking: true`"):
        resolve_sources(["c"], str(tmp_path / "dataset_info.json"), "data.train", ranked=True)
    with pytest.raises(DataError, match="ranked pairs"):
        resolve_sources(["a"], str(tmp_path / "dataset_info.json"), "data.train")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "?", "chosen": "3"}, r"row 1: column 'rejected' is missing \(found: prompt, chosen\). Preference rows have"),
        ({"question": "?", "good": "3", "bad": "4"}, "column 'chosen' is missing"),
        ({"chosen": "3", "rejected": "4"}, "row 1: chosen: is text, but the row has no `prompt`"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "row 1: chosen: begins with an assistant message, but the row has no `prompt`"),
        ({"prompt": "?", "chosen": "", "rejected": "4"}, "row 1: chosen: every assistant message is empty"),
        ({"prompt": "?", "chosen": "3", "rejected": "  "}, "row 1: rejected: every assistant message is empty"),
        ({"prompt": "?", "chosen": None, "rejected": "4"}, r"row 1: column 'chosen' is null \(found: prompt, rejected\)"),
        ({"prompt": "?", "chosen": 3, "rejected": "4"}, r"row 1: chosen: has no messages \(found int\)"),
        ({"prompt": 7, "chosen": "3", "rejected": "4"}, r"row 1: chosen: has no messages \(found int\)"),
        ({"prompt": "?", "chosen": ["3"], "rejected": "4"}, "row 1: chosen: a message should have `role` and `content`, not str"),
        ({"chosen": [USER, GOOD], "rejected": [USER]}, "row 1: rejected: has no assistant message"),
        ({"chosen": [USER, GOOD], "rejected": [USER, GOOD, USER]}, "row 1: rejected: ends with a message of role user"),
        ({"chosen": [USER, GOOD], "rejected": [USER, GOOD, USER, BAD]}, "row 1: one of `chosen` and `rejected` only extends"),
        ({"prompt": [USER, GOOD], "chosen": "3", "rejected": "4"}, "row 1: chosen: its `prompt` ends with an assistant message"),
        ({"prompt": "Other?", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "does not contain this row's `prompt`"),
        ({"prompt": "?", "chosen": "\ud800", "rejected": "4"}, "unpaired surrogate"),
    ],
)  # fmt: skip
def test_invalid_rows_are_reported(tmp_path, row, message):
    with pytest.raises(DataError, match=message):
        read(tmp_path, row)


@pytest.mark.parametrize(
    ("value", "message"),
    [("2", "by should be a number, not str"), (None, "not nothing"), (True, "not bool"), (float("nan"), "not nan")],
)
def test_invalid_margins_are_reported(tmp_path, value, message):
    with pytest.raises(DataError, match=message):
        read(tmp_path, {"prompt": "?", "chosen": "3", "rejected": "4", "by": value}, margin_column="by")


def test_a_margin_column_must_exist(tmp_path):
    with pytest.raises(DataError, match="column 'by' is missing"):
        read(tmp_path, {"prompt": "?", "chosen": "3", "rejected": "4"}, margin_column="by")


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_text("")
    with pytest.raises(DataError, match="the file is empty"):
        list(read_pairs(Source(tmp_path / "rows.jsonl")))


# Filtering and truncation --------------------------------------------------------------------------------------------


def load_rows(folder: Path, model: Path, rows: list[dict], *, scalar: bool = False, **settings):
    template = load_template(load_tokenizer(str(model)), None)
    tokenise = Transcript(template.tokenizer, template.text).examples if scalar else (lambda c: template.examples(c, "all"))
    file = write_jsonl(folder / "pairs.jsonl", rows)
    return load_pairs([Source(file)], tokenise, **{"max_tokens": 64, "too_long": "filter", **settings}), template.tokenizer


PLAIN = {"prompt": "What is 1 + 2?", "chosen": "3", "rejected": "4"}
LONG = {"prompt": "What is 1 + 2? " * 20, "chosen": "3", "rejected": "4"}
ALIKE = {"prompt": "What is 1 + 2?", "chosen": "1 + 2 = 3. " * 20 + "Yes", "rejected": "1 + 2 = 3. " * 20 + "No"}


def test_equal_answers_are_an_error_or_filtered(tmp_path, tiny_model):
    rows = [PLAIN, {"prompt": "?", "chosen": "3", "rejected": "3"}]
    with pytest.raises(DataError, match="row 2: chosen and rejected are the same, so neither is preferred"):
        load_rows(tmp_path, tiny_model, rows)
    result, _ = load_rows(tmp_path, tiny_model, rows, equal="filter")
    assert (len(result.pairs), result.counts.rows, result.counts.equal) == (1, 2, 1)
    assert "1 left out because both answers are the same" in result.summary("filter", 64)


@pytest.mark.parametrize("scalar", [False, True], ids=["dpo", "reward model"])
def test_pairs_that_are_too_long(tmp_path, tiny_model, scalar):
    result, _ = load_rows(tmp_path, tiny_model, [PLAIN, LONG], scalar=scalar)
    assert (len(result.pairs), result.counts.too_long) == (1, 1)
    assert "1 longer than 64 left out" in result.summary("filter", 64)
    with pytest.raises(DataError, match=r"row 2: .* tokens, more than data.max_tokens = 64"):
        load_rows(tmp_path, tiny_model, [PLAIN, LONG], scalar=scalar, too_long="error")
    with pytest.raises(DataError, match="no usable pairs among 1"):
        load_rows(tmp_path, tiny_model, [LONG], scalar=scalar)


@pytest.mark.parametrize("scalar", [False, True], ids=["dpo", "reward model"])
def test_pairs_that_truncation_makes_equal_are_dropped_and_counted(tmp_path, tiny_model, scalar):
    result, _ = load_rows(tmp_path, tiny_model, [PLAIN, ALIKE], scalar=scalar, too_long="cut_right")
    assert (len(result.pairs), result.counts.too_long, result.counts.equal_when_cut) == (1, 1, 1)
    assert "1 left out because the cut made both the same" in result.summary("cut_right", 64)


def test_pairs_that_lose_their_answers_to_truncation_are_dropped(tmp_path, tiny_model):
    result, _ = load_rows(tmp_path, tiny_model, [PLAIN, LONG], too_long="cut_right")
    assert (len(result.pairs), result.counts.emptied) == (1, 1)


@pytest.mark.parametrize("scalar", [False, True], ids=["dpo", "reward model"])
def test_left_truncation_leaves_both_sides_the_same_prompt(tmp_path, tiny_model, scalar):
    row = {**LONG, "rejected": "I guess that it may be 4"}
    result, tokenizer = load_rows(tmp_path, tiny_model, [row], scalar=scalar, too_long="cut_left")
    [pair] = result.pairs
    assert max(len(pair.chosen), len(pair.rejected)) == 64
    chosen, rejected = (tokenizer.decode(side.tokens).split("assistant\n") for side in (pair.chosen, pair.rejected))
    assert chosen[0] == rejected[0]
    assert chosen[1].startswith("3<|im_end|>")
    hopeless = {"prompt": "?", "chosen": "3", "rejected": "I guess " * 100}
    result, _ = load_rows(tmp_path, tiny_model, [PLAIN, hopeless], scalar=scalar, too_long="cut_left")
    assert (len(result.pairs), result.counts.emptied) == (1, 1)


def test_tools_are_refused_by_reward_models(tmp_path, tiny_model):
    with pytest.raises(DataError, match="row 1: has tools, which reward models are not shown"):
        load_rows(tmp_path, tiny_model, [{**PLAIN, "tools": [{"type": "function"}]}], scalar=True)


def test_all_generated_pairs_are_read(pairs_file):
    pairs = [pair for _, pair in read_pairs(Source(pairs_file))]
    assert len(pairs) == len(pair_rows())
    assert not any(pair.equal for pair in pairs)


def test_answers_that_render_the_same_count_as_equal(tmp_path, tiny_model):
    """Equal even without truncation: a template may strip its input."""
    template = tmp_path / "trims.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    rows = [{"prompt": "Which day?", "chosen": "Friday.", "rejected": "Friday. "}, {"prompt": "a", "chosen": "b", "rejected": "c"}]
    source = Source(write_jsonl(tmp_path / "pairs.jsonl", rows))
    rendered = load_template(load_tokenizer(str(tiny_model)), str(template))

    def tokenise(conversations):
        return rendered.examples(conversations, "all")

    with pytest.raises(DataError, match="row 1: chosen and rejected are the same once they are rendered"):
        load_pairs([source], tokenise, max_tokens=64, too_long="filter")
    result = load_pairs([source], tokenise, max_tokens=64, too_long="filter", equal="filter")
    assert (len(result.pairs), result.counts.equal, result.counts.equal_when_cut) == (1, 1, 0)


def test_answers_to_different_questions_are_not_a_pair(tmp_path):
    sides = [[{"role": "user", "content": f"{day}?"}, {"role": "assistant", "content": day}] for day in ("Tuesday", "Friday")]
    with pytest.raises(DataError, match=r"differ before any answer \(message 1, of role user\)"):
        read(tmp_path, {"chosen": sides[0], "rejected": sides[1]})
