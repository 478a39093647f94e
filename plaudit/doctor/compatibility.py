"""Mismatches between policy and reward model: chat template, context length, thoughts, special tokens.

They are mostly warnings: scoring works, but the model reads something other than what the policy wrote.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from plaudit.data.templates import MARK, RENDER_ERRORS, ChatTemplate, load_tokenizer
from plaudit.doctor.findings import Finding, quoted
from plaudit.doctor.recording import DryRunBackend, ModelInput
from plaudit.doctor.reward_models import InputRenderer, ModelRewardCheck, plain_text
from plaudit.doctor.rewards import synthetic_group
from plaudit.doctor.sanity_pairs import format_answer
from plaudit.recipe import RLRecipe, View
from plaudit.response_files import CLOSE, LONGCOT, OPEN, join_thought, read_longcot_config, response_file, stop_strings
from plaudit.reward_models.backend import Backend, GenerationRequest
from plaudit.rewards.judges.group_judge import GroupJudge
from plaudit.rewards.judges.judge import Judge
from plaudit.rewards.judges.model_rewards import ModelReward
from plaudit.rewards.runner import RewardRunner
from plaudit.rewards.view import see
from plaudit.types import Prompt

MAX_MEASURED_PROMPTS = 200
"""Prompts whose length is measured in the reward model's tokens."""
FILLER = "The quick brown fox jumps over the lazy dog, and then it sleeps in the shade of an old tree until evening comes. "


@dataclass(frozen=True)
class PolicyContext:
    """The policy's recipe, template and prompts, which a reward model must be compatible with."""

    recipe: RLRecipe
    template: ChatTemplate
    prompts: Sequence[Prompt]
    """The prompts that the reward scores."""

    @property
    def thinks(self) -> bool:
        """A guess: its chat template handles thoughts, a reward requires them, or its folder says where they end."""
        in_template, required = (
            OPEN in self.template.text,
            any(reward.kind == "think_format" for reward in self.recipe.rewards),
        )
        return in_template or required or self.ends_thoughts

    @property
    def longcot_file(self) -> Path:
        return response_file(self.recipe.model.path, LONGCOT)

    @property
    def ends_thoughts(self) -> bool:
        """Its folder says where thoughts end."""
        return self.longcot_file.is_file() and read_longcot_config(self.longcot_file).start is not None

    @property
    def prefills_think(self) -> bool:
        """The generation prompt opens <think>, so a response contains only the closing tag."""
        try:
            return self.template.render([{"role": "user", "content": "?"}], generation_prompt=True).rstrip().endswith(OPEN)
        except RENDER_ERRORS:
            return False


def check_compatibility(check: ModelRewardCheck, policy: PolicyContext | None) -> Iterator[Finding]:
    for name, (reward, backend) in check.backends.items():
        if not backend.opened:
            continue
        if backend.inputs:
            yield from _template(name, reward, check.renderers.get(name), backend.inputs[0])
        yield from _answer_room(name, reward, backend.model_info.context)
        yield from _final_answer(name, reward)
    if policy is None or check.name not in check.renderers:
        return
    renderer = check.renderers[check.name]
    yield from _thoughts(check.name, check.reward, renderer, policy)
    column = getattr(check.reward, "prompt_column", None) or "rm_prompt"
    yield from _tokens(check.name, check.backends[check.name][1].inputs, renderer, policy, column)


# The reward model's chat template ------------------------------------------------------------------------------------


def _template(name: str, reward: ModelReward, renderer: InputRenderer | None, model_input: ModelInput) -> Iterator[Finding]:
    raw = isinstance(model_input, GenerationRequest) and model_input.text is not None
    if renderer is None:
        if raw and reward.model.dialect != "vllm":
            yield (
                "!",
                f"{name}: {reward.model.dialect} may prepend a second BOS token to a raw prompt: leave it out of the template",
            )
        return
    tokenizer, chat_template = renderer.tokenizer, reward.model.chat_template
    if not raw and chat_template is not None:
        # Loading a template overwrites the tokenizer's default, so the tokenizer is loaded again.
        default = load_tokenizer(tokenizer.name_or_path, trust_remote_code=reward.model.trust_remote_code).chat_template
        usage = f"has no chat template; using {chat_template}" if default is None else f"using {chat_template}, not its own"
        if default != renderer.template_text:
            yield "!", f"{name}: {usage}: make sure that it was trained with this one"
    messages = model_input.messages if isinstance(model_input, GenerationRequest) else model_input
    if not raw and not any(message["role"] == "system" for message in messages) and (added := _default_system(renderer)):
        fix = "set `system` on the reward" if not reward.scalar else "add a system message to the rows"
        yield (
            "!",
            f"{name}: its chat template adds a default system prompt, {quoted(added)}. If it was not trained with that, {fix} "
            "or set another model.chat_template",
        )
    try:
        tokens = renderer.tokens(model_input)
    except RENDER_ERRORS:
        return
    bos = tokenizer.bos_token_id
    if bos is not None and tokens[:2] == [bos, bos]:
        yield (
            "!",
            f"{name}: its prompt begins with two BOS tokens ({tokenizer.bos_token}): remove one from the template or the text",
        )
    elif bos is not None and tokens[:1] != [bos] and tokenizer("a")["input_ids"][:1] == [bos]:
        yield (
            "!",
            f"{name}: its tokenizer prepends {tokenizer.bos_token} to text, but its prompt has none: set a model.chat_template "
            "that adds it",
        )


def _default_system(renderer: InputRenderer) -> str:
    """The text that the template adds before the first user turn only."""
    user = {"role": "user", "content": MARK}
    try:
        first = renderer.template.render([user]).partition(MARK)[0]
        later = renderer.template.render([user, {"role": "assistant", "content": MARK}, user]).split(MARK)[2]
    except (*RENDER_ERRORS, IndexError):
        return ""
    for token in sorted(renderer.tokenizer.get_added_vocab(), key=len, reverse=True):
        first, later = first.replace(token, ""), later.replace(token, "")
    suffix = 0
    while suffix < min(len(first), len(later)) and first[-1 - suffix] == later[-1 - suffix]:
        suffix += 1
    added = first[: len(first) - suffix].strip().removeprefix("system").strip()
    return added if any(character.isalpha() for character in added) else ""


def _answer_room(name: str, reward: ModelReward, context: int | None) -> Iterator[Finding]:
    """Whether the context leaves room for the judge's own answer."""
    sampling = getattr(reward, "sampling", None)
    if sampling is None or context is None:
        return
    longest, new = reward.model.max_prompt_tokens, sampling.max_new_tokens
    if new >= context:
        yield (
            "✗",
            f"{name}: sampling.max_new_tokens is {new:,} and the model's context {context:,}: no room for a prompt. Lower it",
        )
    elif longest is not None and longest + new > context:
        yield (
            "!",
            f"{name}: model.max_prompt_tokens {longest:,} plus sampling.max_new_tokens {new:,} exceeds its context of {context:,}: "
            f"answers to long prompts would be truncated. Set max_prompt_tokens: {context - new:,}",
        )


# The policy's output -------------------------------------------------------------------------------------------------


def _final_answer(name: str, reward: ModelReward) -> Iterator[Finding]:
    """Whether a verifier with our prompt reads what that prompt announces."""
    if isinstance(reward, Judge) and reward.template is None and reward.parser == "true_false" and reward.view.extract == "none":
        yield (
            "!",
            f"{name}: its prompt says that only the final answer is shown, and it reads the whole response, which may argue for "
            "itself. view: {extract: answer} shows the answer alone",
        )


def _thoughts(name: str, reward: ModelReward, renderer: InputRenderer | None, policy: PolicyContext) -> Iterator[Finding]:
    view = reward.view
    if not policy.thinks:
        if view.think == "strict":
            yield (
                "!",
                f"{name}: view.think is strict, but the policy does not seem to think: responses without thoughts are malformed",
            )
        return
    if view.longcot_file == policy.longcot_file and policy.ends_thoughts:
        return  # at its own delimiter
    bare = View(extract=view.extract, tag=view.tag)
    seen = see(view, join_thought("Many thoughts.", format_answer(bare, "42")))
    if not seen.scorable or "42" not in seen.text:
        why = seen.problem or "the answer is removed"
        yield "!", f"{name}: its view leaves nothing to score of a response with <think> tags ({why}): fix `view`"
    elif "Many thoughts." in seen.text:
        tokens = _num_tokens(renderer, CLOSE)
        split = f", with </think> split into {tokens} tokens" if tokens > 1 else ""
        yield (
            "!",
            f"{name}: the policy thinks, and the reward model would read its thoughts{split}. view: {{think: strip}} removes them",
        )
    elif view.think == "strip" and policy.prefills_think:
        yield (
            "!",
            f"{name}: the policy's prompt already opens <think>, so truncated thoughts contain no tag, and view.think: strip "
            "passes them on as the answer. think: strict makes such responses malformed",
        )


def _tokens(
    name: str, inputs: Sequence[ModelInput], renderer: InputRenderer | None, policy: PolicyContext, column: str
) -> Iterator[Finding]:
    """The policy's special tokens spelt out in the reward model's input."""
    tokenizer: Any = policy.template.tokenizer
    # Special tokens are stripped from a response's text; other added tokens are not.
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    stops = stop_strings(policy.recipe.model.path, policy.recipe.rollout.stop)
    raw = [one.text for one in inputs if isinstance(one, GenerationRequest) and one.text is not None]
    data = [str(message.get("content") or "") for prompt in policy.prompts for message in prompt.messages]
    data += [str(prompt.extra_info[column]) for prompt in policy.prompts if column in prompt.extra_info]
    for token in sorted(special | set(tokenizer.get_added_vocab())):
        if matches := sum(token in text for text in data):
            where, advice = f"it occurs in {matches:,} of {len(data):,} messages of the data", "remove it"
        elif token in stops and token not in special:
            where, advice = "rollout.stop keeps it in responses", "have `view` extract the text before it"
        elif any(token in text for text in raw) and _num_tokens(renderer, token) > 1:
            where, advice = "it occurs in the raw prompt", "use the reward model's own tokens there"
        else:
            continue
        yield "!", f"{name}: the policy's {token} would be read {_read_as(renderer, token)}: {where}; {advice}"


def _read_as(renderer: InputRenderer | None, token: str) -> str:
    if renderer is None:
        return "literally"
    if token in renderer.template.control_tokens.names:
        return "as plain text, not as the reward model's own special token"
    tokens = _num_tokens(renderer, token)
    return f"as {tokens} tokens of plain text" if tokens > 1 else "as a single token"


def _num_tokens(renderer: InputRenderer | None, text: str) -> int:
    return 1 if renderer is None else len(renderer.tokenizer(text, add_special_tokens=False)["input_ids"])


# Lengths -------------------------------------------------------------------------------------------------------------


def check_lengths(check: ModelRewardCheck, policy: PolicyContext | None) -> Iterator[Finding]:
    """Whether the longest responses fit into the reward model's context, measured without querying it."""
    if policy is None or not policy.prompts or check.name not in check.renderers:
        return
    prompts = policy.prompts[:MAX_MEASURED_PROMPTS]
    new = policy.recipe.rollout.max_new_tokens
    short = _measure(check, policy, prompts, 1)
    long = _measure(check, policy, prompts[:1], new)
    for name, (reward, backend) in check.backends.items():
        limit = longest_prompt(reward, backend.model_info.context)
        if limit is None or not short[name] or not long[name]:
            continue
        growth = long[name][0] - short[name][0]
        lengths = [length + growth for length in short[name]]
        share = sum(length > limit for length in lengths) / len(lengths)
        estimate = "" if check.renderers[name] is not None else " (an estimate in the policy's tokens)"
        text = f"{name}: with rollout.max_new_tokens = {new:,} it reads up to {max(lengths):,} of {limit:,} tokens{estimate}"
        if not share:
            yield "✓", text
            continue
        never_fits = sum(length > limit for length in short[name]) / len(lengths)
        room = max(0, int((limit - median(short[name])) * new / max(1, growth)))
        fits = f"responses of up to about {room:,} tokens fit" if room else "most prompts do not fit even with an empty response"
        more = "Raise model.max_prompt_tokens" if reward.model.max_prompt_tokens else "Use a model with a longer context"
        less = "rollout.max_new_tokens" if reward.scalar else "rollout.max_new_tokens or sampling.max_new_tokens"
        yield (
            "✗" if never_fits == 1 else "!",
            f"{text}: longer samples would be malformed for {share:.0%} of the prompts; {fits}. {more}, lower {less}, or have "
            "`view` extract less",
        )


def longest_prompt(reward: ModelReward, context: int | None) -> int | None:
    """The model's prompt limit, in its own tokens."""
    new = 0 if reward.scalar else getattr(reward, "sampling").max_new_tokens  # noqa: B009 (judges and plugins have it)
    return reward.model.max_prompt_tokens or (None if context is None else context - new)


def _measure(check: ModelRewardCheck, policy: PolicyContext, prompts: Sequence[Prompt], tokens: int) -> dict[str, list[int]]:
    """By model: the longest input per prompt, in tokens, for responses of `tokens` tokens."""
    count = policy.recipe.rollout.n if isinstance(check.reward, GroupJudge) else 1 if check.reward.scores_alone else 2
    responses = [_filler(policy.template.tokenizer, tokens, i) for i in range(count)]
    dry_runs: dict[str, DryRunBackend] = {}
    for name, (reward, _) in check.backends.items():
        critique = 0 if reward.scalar else getattr(reward, "sampling").max_new_tokens  # noqa: B009
        # A critique is part of its scorer's input.
        dry_runs[name] = DryRunBackend(_filler(policy.template.tokenizer, critique, 0) if len(check.backends) > 1 else "")
    backends: dict[str, Backend] = dict(dry_runs)

    longest: dict[str, list[int]] = {name: [] for name in dry_runs}
    with RewardRunner([check.with_backends(backends)], tolerant=True) as runner:
        for prompt in prompts:
            runner.collect([synthetic_group(prompt, responses)])
            for name, dry_run in dry_runs.items():
                lengths = [_length(check.renderers[name], policy, model_input) for model_input in dry_run.inputs]
                longest[name] += [max(lengths)] if lengths else []
                dry_run.inputs.clear()
    return longest


def _length(renderer: InputRenderer | None, policy: PolicyContext, model_input: ModelInput) -> int:
    try:
        if renderer is not None:
            return len(renderer.tokens(model_input))
    except RENDER_ERRORS:
        pass
    return len(InputRenderer(policy.template).tokenizer(plain_text(model_input), add_special_tokens=False)["input_ids"])


def _filler(tokenizer: Any, tokens: int, index: int) -> str:
    """Text of about `tokens` tokens, distinct for each index."""
    text = f"{index}. " + FILLER * (1 + tokens // 8)
    return tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"][:tokens])
