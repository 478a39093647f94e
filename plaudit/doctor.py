"""`plaudit doctor`: everything that can be known about a recipe before it trains, in one page.

Each check is one line: ✓ fine, ! look at it, ✗ will fail. A check that fails does not keep the others from being made.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from rich.text import Text
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig

from plaudit.audit.certificate import require_passed
from plaudit.config import LoadedRecipe
from plaudit.data.conversations import Source, read_conversations, read_prompts
from plaudit.data.order import RowOrder
from plaudit.data.rows import read_rows
from plaudit.data.templates import RENDER_ERRORS, ChatTemplate, template_of
from plaudit.errors import DataError, PlauditError, redact
from plaudit.models.memory import plan_memory, total_memory
from plaudit.models.policy import resolve_device, resolve_dtype
from plaudit.recipe import RewardSettings, RLRecipe, ScoreRecipe, SFTRecipe, TrainingRecipe
from plaudit.rewards.combine import has_reward
from plaudit.rewards.runner import RewardRunner
from plaudit.rollout.engine import MAX_SEQUENCES
from plaudit.types import Conversation, Example, Group, Prompt, Sample

TRIED = 3  # prompts that every reward is tried on
Finding = tuple[str, str]
"""✓, ! or ✗, and what was found."""


def examine(loaded: LoadedRecipe, sources: dict[str, list[Source]], *, max_rows: int, console: Console | None = None) -> bool:
    """Print the findings; returns whether training can start."""
    console = console or Console(highlight=False)
    recipe = loaded.recipe
    console.print(f"[bold]{escape(str(loaded.path))}[/] for plaudit {recipe.stage}")
    healthy = True

    def check(name: str, findings: Callable[[], Iterator[Finding]]) -> None:
        nonlocal healthy
        try:
            for mark, text in findings():
                healthy &= mark != "✗"
                _line(console, mark, name, text)
        except PlauditError as error:
            healthy = False
            _line(console, "✗", name, redact(str(error)))

    if isinstance(recipe, ScoreRecipe):
        for reward in recipe.rewards:
            check("reward", lambda reward=reward: _reward(reward, []))
        return healthy

    template: ChatTemplate | None = None
    samples: list[tuple[str, Conversation, Example]] = []
    questions: list[Prompt] = []
    longest_prompt: list[int] = []

    def check_template() -> Iterator[Finding]:
        nonlocal template
        template = template_of(recipe.model)
        yield from _template(template, recipe)

    def check_prompts(part: str) -> Iterator[Finding]:
        assert isinstance(recipe, RLRecipe)
        prompts = list(islice((prompt for source in sources[part] for prompt in read_prompts(source)), max_rows or None))
        if template is None:
            yield "✓", f"{part}: {len(prompts):,} read; without a chat template they cannot be rendered"
            return
        lengths = np.array([len(_prompt_tokens(template, prompt)) for prompt in prompts])
        yield "✓", f"{part}: {len(lengths):,} prompts rendered: {_spread(lengths)}"
        yield from _too_long(part, lengths, "data.max_prompt_tokens", recipe.data.max_prompt_tokens, recipe.data.too_long)
        yield from _looked_at(part, len(prompts), max_rows)
        longest_prompt.append(min(int(lengths.max()), recipe.data.max_prompt_tokens))
        untold = sum(prompt.ground_truth is None for prompt in prompts)
        if untold:
            yield "!", f"{part}: {untold:,} of them have no reward_model.ground_truth"
        untold = [prompt for prompt in prompts if not has_reward(recipe.rewards, prompt)]
        if untold:
            yield "✗", f"{part}: for {len(untold):,} of them no reward's `when` matches (data_source {untold[0].data_source!r})"
        if part == "train":
            questions.extend(_tried(prompts, recipe.rewards))

    def check_rows(part: str) -> Iterator[Finding]:
        assert isinstance(recipe, SFTRecipe)
        rows = islice((item for source in sources[part] for item in read_conversations(source)), max_rows or None)
        if template is None:
            yield "✓", f"{part}: {sum(1 for _ in rows):,} read; without a chat template they cannot be rendered"
            return
        rendered = [(where, row, template.example(row, where, recipe.data.train_on)) for where, row in rows]
        yield from _lengths(recipe, part, [example for *_, example in rendered])
        yield from _looked_at(part, len(rendered), max_rows)
        if part == "train":
            samples.extend(rendered)
            yield from _prompts(template, samples)

    check("files", lambda: _files(sources))
    check("template", check_template)
    for part in [part for part in sources if sources[part]]:
        check("rows", lambda part=part: check_rows(part) if isinstance(recipe, SFTRecipe) else check_prompts(part))
    check("steps", lambda: _steps(recipe, sources))
    if isinstance(recipe, RLRecipe):
        check("context", lambda: _context(recipe, max(longest_prompt, default=recipe.data.max_prompt_tokens)))
        check("algorithm", lambda: _algorithm(recipe))
        if recipe.audit.require is not None:
            check("audit", lambda: _audit(recipe))
        for reward in recipe.rewards:
            check("reward", lambda reward=reward: _reward(reward, questions))
    check("weights", lambda: _weights(Path(recipe.model.path)))
    check("memory", lambda: _memory(recipe))
    if template is not None and samples and isinstance(recipe, SFTRecipe):
        _show_row(console, template, samples[0][1], recipe.data.train_on)
    if template is not None and questions:
        console.print("\nThe first prompt as the model sees it:", style="bold")
        console.print(
            Text(template.render(questions[0].messages, questions[0].tools, generation_prompt=True)[:3000]), soft_wrap=True
        )
    return healthy


def _line(console: Console, mark: str, name: str, text: str) -> None:
    colour = {"✓": "green", "!": "yellow", "✗": "red"}[mark]
    console.print(Text.assemble((f"  {mark} ", colour), (f"{name:<9}", "bold"), text), soft_wrap=True)


def _files(sources: dict[str, list[Source]]) -> Iterator[Finding]:
    for part, files in sources.items():
        for source in files:
            rows = read_rows(source.path)
            yield "✓", f"{part}: {source.path} has {len(rows):,} rows with {', '.join(rows.columns)}"


def _template(template: ChatTemplate, recipe: TrainingRecipe) -> Iterator[Finding]:
    name = recipe.model.chat_template or "the tokenizer's own"
    end = template.end_token
    if end is None:
        yield (
            "!",
            f"{name}: turns end without a special token, so the model will not learn to stop; model.chat_template chooses another",
        )
    else:
        yield "✓", f"{name}; turns end with {template.tokenizer.convert_ids_to_tokens(end)!r} (token {end})"


def _lengths(recipe: SFTRecipe, part: str, examples: list[Example]) -> Iterator[Finding]:
    lengths = np.array([len(example) for example in examples])
    learnt = sum(example.num_targets for example in examples) / lengths.sum()
    yield "✓", f"{part}: {len(lengths):,} rendered: {_spread(lengths)}; {learnt:.0%} of them learnt"
    yield from _too_long(part, lengths, "data.max_tokens", recipe.data.max_tokens, recipe.data.too_long)


def _spread(lengths: np.ndarray) -> str:
    middle, most = int(np.median(lengths)), int(np.quantile(lengths, 0.95))
    return f"{middle:,} tokens in the median, 95 % within {most:,}, longest {lengths.max():,}"


def _too_long(part: str, lengths: np.ndarray, setting: str, limit: int, fate: str) -> Iterator[Finding]:
    over = int((lengths > limit).sum())
    if over:
        fates = {"filter": "left out", "error": "an error", "cut_left": "cut on the left", "cut_right": "cut on the right"}
        fails = fate == "error" or (fate == "filter" and over == len(lengths))
        share = f"{over:,} of them ({over / len(lengths):.1%})"
        yield "✗" if fails else "!", f"{part}: {share} are longer than {setting} = {limit:,}: {fates[fate]}"


def _looked_at(part: str, rows: int, max_rows: int) -> Iterator[Finding]:
    if rows == max_rows:
        yield "!", f"{part}: only the first {max_rows:,} rows were looked at; --rows 0 looks at all of them"


def _prompt_tokens(template: ChatTemplate, prompt: Prompt) -> list[int]:
    try:
        return template.prompt_tokens(prompt.messages, prompt.tools)
    except RENDER_ERRORS as error:
        raise DataError(f"{prompt.id}: the chat template cannot render these messages: {error}") from None


def _context(recipe: RLRecipe, longest_prompt: int) -> Iterator[Finding]:
    """Whether the longest prompt and the longest answer fit into what the model can read."""
    config: Any = AutoConfig.from_pretrained(recipe.model.path, trust_remote_code=recipe.model.trust_remote_code)
    context = getattr(config, "max_position_embeddings", None)
    needed = longest_prompt + max(recipe.rollout.max_new_tokens, recipe.validation.max_new_tokens or 0)
    takes = f"{context:,}" if context else "any number"
    text = f"the longest prompt and max_new_tokens are {needed:,} tokens; the model takes {takes}"
    yield ("✗" if context and needed > context else "✓"), text


def _algorithm(recipe: RLRecipe) -> Iterator[Finding]:
    """What is allowed and yet seldom meant."""
    if recipe.algorithm.kl_coefficient and recipe.algorithm.kl_kind == "k1":
        yield (
            "!",
            "algorithm.kl_kind is k1, which as a loss has no pull towards the reference; k2 has the right gradient, k3 a close one",
        )
    if recipe.model.lora is not None and recipe.model.lora.dropout:
        yield "!", "model.lora.dropout: the policy is sampled without it and trained with it, so ratios are off 1 from the start"


def _reward(reward: RewardSettings, prompts: list[Prompt]) -> Iterator[Finding]:
    """Started, and asked what it pays for the ground truth itself and for nothing at all, where it would run."""
    patient = reward.model_copy(update={"on_failure": "drop", "max_failure_rate": 1.0, "gate": None, "normalise": "none"})
    prompts = [prompt for prompt in prompts if reward.applies_to(prompt)]
    groups = [_pretended(prompt, ["" if prompt.ground_truth is None else str(prompt.ground_truth), ""]) for prompt in prompts]
    with RewardRunner([patient]) as runner:
        scores = [scored.by_reward[patient.label] for scored in runner.collect(groups)]
    failures = [score.failure for pair in scores for score in pair if score.failure is not None]
    if failures:
        told = f"{failures[0].cause}: {failures[0].message}"
        yield (
            "✗" if len(failures) == 2 * len(scores) else "!",
            f"{reward.label}: failed on {len(failures)} of {2 * len(scores)}: {told}",
        )
        return
    truth, nothing = ([pair[i].value for pair in scores] for i in (0, 1))
    paid = f"pays {_listed(truth)} for the ground truth, {_listed(nothing)} for an empty answer" if scores else "starts"
    yield "✓", f"{reward.label}: {paid}; weight {reward.weight:g}, on failure {reward.on_failure}"


def _audit(recipe: RLRecipe) -> Iterator[Finding]:
    require_passed(recipe.audit, recipe.rewards)
    yield "✓", f"{recipe.audit.require} is of these rewards, and they passed"


def _tried(prompts: list[Prompt], rewards: Sequence[RewardSettings]) -> list[Prompt]:
    """A few for each reward."""
    chosen = {prompt.id: prompt for prompt in prompts[:TRIED]}
    for reward in rewards:
        chosen |= {prompt.id: prompt for prompt in islice(filter(reward.applies_to, prompts), TRIED)}
    return list(chosen.values())


def _pretended(prompt: Prompt, responses: list[str]) -> Group:
    none = np.zeros(0, dtype=np.float32)
    samples = (Sample(prompt.id, i, none.astype(np.int32), text, "finished", none, none, 0) for i, text in enumerate(responses))
    return Group(prompt, none.astype(np.int32), tuple(samples))


def _listed(values: Sequence[float | None]) -> str:
    return ", ".join(dict.fromkeys(f"{value:g}" for value in values if value is not None))


def _prompts(template: ChatTemplate, samples: list[tuple[str, Conversation, Example]]) -> Iterator[Finding]:
    """What is trained must continue the very tokens that the policy is given when it is sampled."""
    apart = 0
    for _, conversation, example in samples[:100]:
        last = max(i for i, m in enumerate(conversation.messages) if m["role"] == "assistant")
        with suppress(*RENDER_ERRORS):  # some templates take no conversation without a user's turn; then nobody samples one
            prompt = template.prompt_tokens(conversation.messages[:last], conversation.tools) if last else []
            apart += prompt != example.tokens[: len(prompt)].tolist()
    if apart:
        yield "!", f"in {apart} of {min(100, len(samples))} rows the prompt is tokenised differently in training than in sampling"
    else:
        yield "✓", "prompts are the same tokens in training and in sampling"


def _steps(recipe: TrainingRecipe, sources: dict[str, list[Source]]) -> Iterator[Finding]:
    rows = sum(len(read_rows(source.path)) for source in sources["train"])
    supervised = isinstance(recipe, SFTRecipe)
    per_step = recipe.train.rows_per_step if supervised else recipe.train.prompts_per_step
    noun = "rows" if supervised else f"prompts × {recipe.rollout.n} samples, {recipe.train.updates_per_step} updates each"
    order = RowOrder(rows, per_step=per_step, epochs=recipe.run.epochs, seed=recipe.seed)
    steps = min(order.num_steps, recipe.run.max_steps or order.num_steps)
    yield "✓", f"at most {steps:,} steps of {per_step:,} {noun}"
    if rows < per_step:
        setting = "train.rows_per_step" if supervised else "train.prompts_per_step"
        yield "!", f"{setting} = {per_step:,} is more than all {rows:,} rows"


def _weights(model: Path) -> Iterator[Finding]:
    """Whether the weights of a folder are all there; their headers tell, so nothing large is read."""
    if not model.is_dir():
        return  # on the hub
    index = model / "model.safetensors.index.json"
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values()) if index.exists() else {"model.safetensors"}
        tensors = sum(len(safe_open(model / name, "pt").keys()) for name in sorted(names))
    except (OSError, ValueError, LookupError, SafetensorError) as error:
        yield "✗", f"{model}: its weights cannot be read (safetensors only, never pickled ones): {error}"
        return
    yield "✓", f"{model}: {tensors:,} tensors, none of them cut short"


def _memory(recipe: TrainingRecipe) -> Iterator[Finding]:
    device = resolve_device(recipe.run.device)
    try:
        plan = plan_memory(recipe.model, device, tokens_per_micro_batch=recipe.train.tokens_per_micro_batch)
    except PlauditError:
        raise
    except (OSError, ValueError) as error:
        yield "✗", f"{recipe.model.path}: its config cannot be read: {str(error).splitlines()[0]}"
        return
    if not plan.trainable:
        yield "✗", f"model.lora.targets: {recipe.model.path} has no linear layer of that name"
        return
    if isinstance(recipe, RLRecipe):
        yield "✓", _while_sampling(recipe, device)
    there = total_memory(device)
    dtype = str(resolve_dtype(recipe.model.dtype, device)).removeprefix("torch.")
    text = f"{plan}; {device.type} in {dtype} has {there / 1e9:.0f} GB"
    if plan.total > there:
        text += ". Lower train.tokens_per_micro_batch, set model.gradient_checkpointing=true, or use model.lora"
    yield ("✓" if plan.total < 0.9 * there else "!"), text


def _while_sampling(recipe: RLRecipe, device: torch.device) -> str:
    config: Any = AutoConfig.from_pretrained(recipe.model.path, trust_remote_code=recipe.model.trust_remote_code).get_text_config()
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * kv_heads * head_size * resolve_dtype(recipe.model.dtype, device).itemsize
    most = recipe.rollout.max_sequences or MAX_SEQUENCES[device.type]
    rows = min(most, recipe.train.prompts_per_step * recipe.rollout.n)
    length = recipe.data.max_prompt_tokens + recipe.rollout.max_new_tokens
    reference = " and a copy of the weights as reference" if recipe.algorithm.kl_coefficient and recipe.model.lora is None else ""
    return (
        f"while sampling, keys and values of {rows:,} sequences of {length:,} tokens: up to {rows * length * per_token / 1e9:.1f} "
        f"GB (where there is less memory, some sequences wait for others){reference}"
    )


def _show_row(console: Console, template: ChatTemplate, conversation: Conversation, train_on: Literal["all", "last"]) -> None:
    text, spans = template.spans(conversation, "the first row", train_on)
    shown = Text(text)
    for start, end in spans:
        shown.stylize("black on green", start, end)
    if len(text) > 3000:
        shown = shown[:1500] + Text("\n … \n", "dim") + shown[-1500:]
    console.print("\nThe first row as the model sees it; what it learns to write is green:", style="bold")
    console.print(shown, soft_wrap=True)
