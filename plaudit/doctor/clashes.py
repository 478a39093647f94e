"""Where policy and reward model do not go together: lengths, thoughts, tokens of the one that mean nothing to the other.

Nothing here is a failure yet. Each is a reason why scores would be of something else than what the policy wrote.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from plaudit.data.templates import MARK, RENDER_ERRORS, ChatTemplate, load_tokenizer
from plaudit.doctor.findings import Finding, quoted
from plaudit.doctor.pairs import dressed
from plaudit.doctor.reward_models import Patient, Reader, as_sent
from plaudit.doctor.rewards import pretended
from plaudit.doctor.watched import Asked, Notes
from plaudit.recipe import RLRecipe, View
from plaudit.reward_models.backend import Backend, GenerationRequest
from plaudit.rewards.judges.group_judge import GroupJudge
from plaudit.rewards.judges.model_rewards import ModelReward
from plaudit.rewards.runner import RewardRunner
from plaudit.rewards.view import see
from plaudit.types import Prompt

MEASURED = 200
"""Prompts whose length is measured as the reward model reads it."""
FILLER = "The quick brown fox jumps over the lazy dog, and then it sleeps in the shade of an old tree until evening comes. "


@dataclass(frozen=True)
class PolicySide:
    """What a reward model has to go together with."""

    recipe: RLRecipe
    template: ChatTemplate
    prompts: Sequence[Prompt]
    """Those that the reward is asked about."""

    @property
    def thinks(self) -> bool:
        """As far as can be told: its template knows thoughts, or a reward asks for them."""
        return "<think>" in self.template.text or any(reward.kind == "think_format" for reward in self.recipe.rewards)

    @property
    def begins_thinking(self) -> bool:
        """Its thoughts are opened for it, so that a response holds only their end."""
        try:
            return self.template.render([{"role": "user", "content": "?"}], generation_prompt=True).rstrip().endswith("<think>")
        except RENDER_ERRORS:
            return False


def find_clashes(patient: Patient, policy: PolicySide | None) -> Iterator[Finding]:
    for name, (reward, watched) in patient.watched.items():
        reader = patient.readers.get(name)
        if not watched.opened:
            continue
        if watched.asked:
            yield from _template(name, reward, reader, watched.asked[0])
        yield from _answers(name, reward, watched.reads.context)
    if policy is None or patient.name not in patient.readers:
        return
    yield from _thoughts(patient.name, patient.reward, patient.readers[patient.name], policy)
    yield from _tokens(patient.name, patient.watched[patient.name][1].asked, patient.readers[patient.name], policy)


# The reward model's own template -------------------------------------------------------------------------------------


def _template(name: str, reward: ModelReward, reader: Reader | None, asked: Asked) -> Iterator[Finding]:
    raw = isinstance(asked, GenerationRequest) and asked.text is not None
    if reader is None:
        if raw and reward.model.dialect != "vllm":
            yield (
                "!",
                f"{name}: a ready prompt goes to {reward.model.dialect}, which may put a second BOS token before it: leave it out",
            )
        return
    tokenizer, chosen = reader.tokenizer, reward.model.chat_template
    if not raw and chosen is not None:
        # Loading a template overwrites the tokenizer's own, so it is read once more.
        own = load_tokenizer(tokenizer.name_or_path, trust_remote_code=reward.model.trust_remote_code).chat_template
        what = "it has no chat template of its own, and is asked in" if own is None else "not its own chat template is used, but"
        if own != reader.template_text:
            yield "!", f"{name}: {what} {chosen}: it should be the one that it was trained with"
    messages = asked.messages if isinstance(asked, GenerationRequest) else asked
    if not raw and not any(message["role"] == "system" for message in messages) and (added := _default_system(reader)):
        where = "set `system` on the reward" if not reward.scalar else "give the rows a system message"
        yield (
            "!",
            f"{name}: its chat template adds a system prompt of its own, {quoted(added)}. If it was not trained with that, {where} "
            "or choose another model.chat_template",
        )
    try:
        tokens = reader.tokens(asked)
    except RENDER_ERRORS:
        return
    bos = tokenizer.bos_token_id
    if bos is not None and tokens[:2] == [bos, bos]:
        yield (
            "!",
            f"{name}: its prompt begins with two BOS tokens ({tokenizer.bos_token}): take one out of the template or the text",
        )
    elif bos is not None and tokens[:1] != [bos] and tokenizer("a")["input_ids"][:1] == [bos]:
        yield (
            "!",
            f"{name}: its tokenizer puts {tokenizer.bos_token} before what it reads, and its prompt has none: choose a "
            "model.chat_template that writes it",
        )


def _default_system(reader: Reader) -> str:
    """What the template writes before a first user's turn, and not before a later one."""
    user = {"role": "user", "content": MARK}
    try:
        first = reader.template.render([user]).partition(MARK)[0]
        later = reader.template.render([user, {"role": "assistant", "content": MARK}, user]).split(MARK)[2]
    except (*RENDER_ERRORS, IndexError):
        return ""
    for token in sorted(reader.tokenizer.get_added_vocab(), key=len, reverse=True):
        first, later = first.replace(token, ""), later.replace(token, "")
    shared = 0
    while shared < min(len(first), len(later)) and first[-1 - shared] == later[-1 - shared]:
        shared += 1
    added = first[: len(first) - shared].strip().removeprefix("system").strip()
    return added if any(character.isalpha() for character in added) else ""


def _answers(name: str, reward: ModelReward, context: int | None) -> Iterator[Finding]:
    """Whether there is room for the judge's own answer."""
    sampling = getattr(reward, "sampling", None)
    if sampling is None or context is None:
        return
    longest, new = reward.model.max_prompt_tokens, sampling.max_new_tokens
    if new >= context:
        yield (
            "✗",
            f"{name}: sampling.max_new_tokens is {new:,}, and the model takes {context:,} tokens in all: no room for a prompt. "
            "Lower it",
        )
    elif longest is not None and longest + new > context:
        yield (
            "!",
            f"{name}: model.max_prompt_tokens {longest:,} and sampling.max_new_tokens {new:,} are more than the {context:,} tokens "
            f"that it takes: answers to long prompts would be cut. max_prompt_tokens: {context - new:,} leaves room for them",
        )


# What the policy writes ----------------------------------------------------------------------------------------------


def _thoughts(name: str, reward: ModelReward, reader: Reader | None, policy: PolicySide) -> Iterator[Finding]:
    view = reward.view
    if not policy.thinks:
        if view.think == "strict":
            yield (
                "!",
                f"{name}: view.think is strict, but nothing says that the policy thinks: responses without thoughts are malformed",
            )
        return
    bare = View(extract=view.extract, tag=view.tag)
    seen = see(view, f"<think>\nMany thoughts.\n</think>\n\n{dressed(bare, '42')}")
    if not seen.scorable or "42" not in seen.text:
        why = seen.problem or "nothing of the answer is left"
        yield "!", f"{name}: of a response with <think> tags its view leaves nothing to score ({why}): look at view"
    elif "Many thoughts." in seen.text:
        pieces = _pieces(reader, "</think>")
        torn = f", with </think> in {pieces} pieces" if pieces > 1 else ""
        yield (
            "!",
            f"{name}: the policy thinks, and the reward model would read its thoughts{torn}. view: {{think: strip}} takes them off",
        )
    elif view.think == "strip" and policy.begins_thinking:
        yield (
            "!",
            f"{name}: the policy's prompt opens <think> for it, so thoughts that are cut short hold no tag, and view.think: strip "
            "shows them as the answer. think: strict makes such responses malformed",
        )


def _tokens(name: str, asked: Sequence[Asked], reader: Reader | None, policy: PolicySide) -> Iterator[Finding]:
    """The policy's tokens, written out in what the reward model reads."""
    tokenizer: Any = policy.template.tokenizer
    # What is special is not in a response's text; other tokens of its own are.
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    ready = [one.text for one in asked if isinstance(one, GenerationRequest) and one.text is not None]
    data = [str(message.get("content") or "") for prompt in policy.prompts for message in prompt.messages]
    data += [str(prompt.extra_info["rm_prompt"]) for prompt in policy.prompts if "rm_prompt" in prompt.extra_info]
    for token in sorted(special | set(tokenizer.get_added_vocab())):
        if holding := sum(token in text for text in data):
            where, advice = f"it stands in {holding:,} of {len(data):,} messages of the data", "take it out of them"
        elif token in policy.recipe.rollout.stop and token not in special:
            where, advice = "rollout.stop keeps it in responses", "have `view` extract what stands before it"
        elif any(token in text for text in ready) and _pieces(reader, token) > 1:
            where, advice = "it stands in the ready prompt", "write that with the reward model's own tokens"
        else:
            continue
        yield "!", f"{name}: the policy's {token} would be read {_as(reader, token)}: {where}; {advice}"


def _as(reader: Reader | None, token: str) -> str:
    if reader is None:
        return "literally"
    if token in reader.tokenizer.all_special_tokens:
        return "as a special token of the reward model's own, as if a turn began or ended there"
    pieces = _pieces(reader, token)
    return f"as {pieces} pieces of text" if pieces > 1 else "as a token of its own"


def _pieces(reader: Reader | None, text: str) -> int:
    return 1 if reader is None else len(reader.tokenizer(text, add_special_tokens=False)["input_ids"])


# Lengths -------------------------------------------------------------------------------------------------------------


def check_lengths(patient: Patient, policy: PolicySide | None) -> Iterator[Finding]:
    """Whether the reward model can read what the policy may write: measured on questions that are made and not asked."""
    if policy is None or not policy.prompts or patient.name not in patient.readers:
        return
    prompts = policy.prompts[:MEASURED]
    new = policy.recipe.rollout.max_new_tokens
    short = _measure(patient, policy, prompts, 1)
    long = _measure(patient, policy, prompts[:1], new)
    for name, (reward, watched) in patient.watched.items():
        limit = longest_prompt(reward, watched.reads.context)
        if limit is None or not short[name] or not long[name]:
            continue
        grows = long[name][0] - short[name][0]
        lengths = [length + grows for length in short[name]]
        share = sum(length > limit for length in lengths) / len(lengths)
        counted = "" if patient.readers[name] is not None else " (an estimate: counted in the policy's tokens)"
        reads = f"it reads up to {max(lengths):,} of {limit:,} tokens{counted}"
        text = f"{name}: with responses of rollout.max_new_tokens = {new:,} {reads}"
        if not share:
            yield "✓", text
            continue
        hopeless = sum(length > limit for length in short[name]) / len(lengths)
        room = max(0, int((limit - median(short[name])) * new / max(1, grows)))
        fits = f"responses of up to about {room:,} tokens fit" if room else "not even an empty response fits into most of them"
        more = "Raise model.max_prompt_tokens" if reward.model.max_prompt_tokens else "Take a model with a longer context"
        less = "rollout.max_new_tokens" if reward.scalar else "rollout.max_new_tokens or sampling.max_new_tokens"
        yield (
            "✗" if hopeless == 1 else "!",
            f"{text}: such samples would be malformed for {share:.0%} of the prompts; {fits}. {more}, lower {less}, or have `view` "
            "leave less",
        )


def longest_prompt(reward: ModelReward, context: int | None) -> int | None:
    """What the model can be asked at most, in its tokens."""
    new = 0 if reward.scalar else getattr(reward, "sampling").max_new_tokens  # noqa: B009 (judges and plugins have it)
    return reward.model.max_prompt_tokens or (None if context is None else context - new)


def _measure(patient: Patient, policy: PolicySide, prompts: Sequence[Prompt], tokens: int) -> dict[str, list[int]]:
    """By model: for each prompt, the longest thing that it would read if responses were of so many tokens."""
    count = policy.recipe.rollout.n if isinstance(patient.reward, GroupJudge) else 1 if patient.reward.scores_alone else 2
    responses = [_filler(policy.template.tokenizer, tokens, i) for i in range(count)]
    notes: dict[str, Notes] = {}
    for name, (reward, _) in patient.watched.items():
        written = 0 if reward.scalar else getattr(reward, "sampling").max_new_tokens  # noqa: B009
        # A critique is read by the scorer behind it.
        notes[name] = Notes(_filler(policy.template.tokenizer, written, 0) if len(patient.watched) > 1 else "")
    backends: dict[str, Backend] = dict(notes)
    found: dict[str, list[int]] = {name: [] for name in notes}
    with RewardRunner([patient.noting(backends)], tolerant=True) as runner:
        for prompt in prompts:
            runner.collect([pretended(prompt, responses)])
            for name, one in notes.items():
                lengths = [_length(patient.readers[name], policy, asked) for asked in one.asked]
                found[name] += [max(lengths)] if lengths else []
                one.asked.clear()
    return found


def _length(reader: Reader | None, policy: PolicySide, asked: Asked) -> int:
    try:
        if reader is not None:
            return len(reader.tokens(asked))
    except RENDER_ERRORS:
        pass
    return len(Reader(policy.template).tokenizer(as_sent(asked), add_special_tokens=False)["input_ids"])


def _filler(tokenizer: Any, tokens: int, number: int) -> str:
    """Text of about so many tokens; another one for each number."""
    text = f"{number}. " + FILLER * (1 + tokens // 8)
    return tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"][:tokens])
