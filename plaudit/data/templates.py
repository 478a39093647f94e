"""Chat templates: conversations → text → tokens, and which of those tokens the assistant wrote.

transformers can only mask templates with `{% generation %}` markers, and most have none. So assistant turns are located
by rendering. Turn i starts where its prompt ends, and ends where the conversation up to and including it ends:

    prompt_i = render(messages[:i], generation prompt)    upto_i = render(messages[:i+1])

provided that the full text starts with these. Some templates rewrite history (they drop old thoughts, or move the system
prompt into the last user turn); there the turn is located by rendering again with a marker in its place.

Targets are what the model has to write when it is sampled: the end token, but neither what the generation prompt
pre-fills (`<think>`) nor what follows the end token.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from importlib import resources
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, Literal

import jinja2
import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from plaudit.data.control_tokens import ControlTokens, Encoded, SpecialTokens
from plaudit.data.conversations import REASONING
from plaudit.data.rendering import render_chat
from plaudit.errors import DataError, RecipeError, nearest_path
from plaudit.hub import model_folder
from plaudit.lora_folder import with_tokenizer
from plaudit.model_files import require_config
from plaudit.recipe import ModelSettings
from plaudit.response_files import CLOSE, OPEN, join_thought
from plaudit.types import Conversation, Example, Message

NAMED = ("chatml", "llama3", "qwen", "plain")
# Unicode noncharacters, reserved for internal use: no text contains them, and no template trims them.
MARK, HIDDEN_THINK, HIDDEN_END_THINK = "\ufdd0", "\ufdd1", "\ufdd2"
MAX_TURNS_LOCATED_ALONE = 32
MAX_RENDERED_MESSAGES = 500_000
"""Messages rendered to locate the turns of one row: seconds."""
# What rendering may raise: the template's own raise_exception, an expression that does not fit the messages, or messages
# nested too deeply.
RENDER_ERRORS = (jinja2.TemplateError, TypeError, ValueError, RecursionError)


class ChatTemplate:
    """A tokenizer and the chat template used with it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: str, special_tokens: SpecialTokens = "text"):
        """`special_tokens`: what control tokens in messages are."""
        if not tokenizer.is_fast:
            raise RecipeError(
                f"{tokenizer.name_or_path}: plaudit needs a fast tokenizer (a tokenizer.json), which maps tokens to text offsets"
            )
        self.tokenizer = tokenizer
        self.text = text
        tokenizer.chat_template = text
        self._shows_reasoning = True
        self.control_tokens = ControlTokens(tokenizer, special_tokens="control")
        self.control_tokens = ControlTokens(tokenizer, self._probe(), special_tokens)

    def _probe(self) -> list[str]:
        """Render markers as contents to learn what the template writes between and after messages. Returns these texts."""
        user, assistant = {"role": "user", "content": MARK}, {"role": "assistant", "content": MARK}
        try:
            after_question = self.render([user]).partition(MARK)[2]
            before_answer = self.render([user], generation_prompt=True).partition(MARK)[2]
            shown = self.render([user, assistant]).split(MARK)
            after_if_followed = self.render([user, assistant, user]).split(MARK)[2:3]
            thinking = {"role": "assistant", "content": "!", "reasoning_content": MARK}
            self._shows_reasoning = MARK in self.render([{"role": "user", "content": "?"}, thinking])
        except RENDER_ERRORS as error:
            raise RecipeError(f"the chat template cannot render a user and an assistant message: {error}") from None
        if len(shown) != 3 or not after_if_followed:
            raise RecipeError("the chat template does not render a user and an assistant message exactly once each")
        _, between, after = shown
        self._before_answer = before_answer
        # What the model has to write between prompt and content: a space, or empty thoughts.
        self._before_content = between.removeprefix(before_answer) if between.startswith(before_answer) else ""
        if after_question == before_answer and self._before_content.strip():
            raise RecipeError(
                "the chat template has no generation prompt: add_generation_prompt adds nothing, though assistant "
                f"turns start with {self._before_content.strip()!r}. Choose another with model.chat_template "
                f"({', '.join(NAMED)}, a .jinja file, or a model)."
            )
        # Text may be split unless the tokenizer prepends a space to its input (as SentencePiece does).
        line, letter, both = self.tokenizer(["\n", "a", "\na"], add_special_tokens=False)["input_ids"]
        openings = [before_answer, between] if before_answer.startswith(between) else [before_answer]
        openings = [re.escape(opening) for opening in openings if opening.strip() and line + letter == both]
        self._split_after = re.compile("|".join(openings) or "(?!)")
        # The end token appears whether or not another turn follows; Phi-3 adds one more at the end of the conversation.
        (tokens, covered), (tokens_if_followed, _) = self._encode([(after, ""), *((text, "") for text in after_if_followed)])
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, tokens_if_followed, strict=False)))
        self._end_token = after[: covered[:shared, 1].max(initial=0)].rstrip() or after.rstrip()
        self._after_end_token = after.removeprefix(self._end_token)
        return [before_answer, *shown, *after_if_followed]

    @property
    def end_token(self) -> int | None:
        """The token that ends an assistant turn, if the template has one."""
        return self.tokenizer.get_vocab().get(self._end_token.strip())

    # Rendering

    def render(self, messages: Sequence[Message], tools: list[Any] | None = None, *, generation_prompt: bool = False) -> str:
        folded = [self._fold_reasoning(m) for m in messages]
        text = render_chat(self.tokenizer, self.text, folded, tools, generation_prompt=generation_prompt)
        return text.replace(HIDDEN_THINK, OPEN).replace(HIDDEN_END_THINK, CLOSE)

    def prompt_tokens(self, messages: Sequence[Message], tools: list[Any] | None = None) -> list[int]:
        """The rendered and tokenised prompt, including the generation prompt."""
        marked, tools, mark = self.control_tokens.quote(messages, tools)
        return self._encode([(self.render(marked, tools, generation_prompt=True), mark)])[0][0]

    def prefill_tokens(self, text: str) -> list[int]:
        """What a response begins with, as tokens that follow the prompt's; none if the generation prompt ends with it already."""
        if not text.strip() or self._before_answer.rstrip().endswith(text.strip()):
            return []
        return self.tokenizer(self._before_content + text, add_special_tokens=False)["input_ids"]  # pyright: ignore

    def conversation_tokens(self, messages: Sequence[Message]) -> list[int]:
        """A complete conversation in one piece, as scalar models are trained on it."""
        marked, _, mark = self.control_tokens.quote(messages)
        return self.control_tokens.encode([self.render(marked)], [mark])[0][0]

    def _fold_reasoning(self, message: Message) -> Message:
        """Move a separate reasoning field into the content if the template would not show it."""
        reasoning = next((message[name] for name in REASONING if message.get(name)), "")
        if self._shows_reasoning or not reasoning:
            return message
        rest = {name: value for name, value in message.items() if name not in REASONING}
        return {**rest, "content": join_thought(reasoning, message["content"])}

    def _keep_last_thoughts(self, messages: list[Message], tools: list[Any] | None) -> list[Message]:
        """Keep the thoughts of the last turn, which are targets, though templates drop thoughts from finished turns.

        The tags are hidden from the template, and the thoughts start the way the generation prompt starts them.
        """
        last = self._fold_reasoning(messages[-1])
        before, closed, answer = last["content"].partition(CLOSE)
        intro, opened, thoughts = before.rpartition(OPEN)
        if last["role"] != "assistant" or not closed:
            return messages
        marked = {**last, "content": f"{intro}{opened}{thoughts}{MARK}{closed}{answer}"}
        rendered = self.render([*messages[:-1], marked], tools)
        prompt = self._render_if_possible(messages[:-1], tools, generation_prompt=True)
        if MARK in rendered and rendered.startswith(prompt or ""):
            return messages
        if not intro.strip():
            intro, thoughts, answer = "", f"\n{thoughts.strip()}\n", f"\n\n{answer.lstrip()}"
        return [*messages[:-1], {**last, "content": f"{intro}{HIDDEN_THINK}{thoughts}{HIDDEN_END_THINK}{answer}"}]

    def _render_if_possible(
        self, messages: list[Message], tools: list[Any] | None, *, generation_prompt: bool = False
    ) -> str | None:
        """None if the template rejects the messages, as with part of a conversation (none at all, or only a system prompt)."""
        try:
            return self.render(messages, tools, generation_prompt=generation_prompt) if messages else None
        except RENDER_ERRORS:
            return None

    # Masks

    def example(self, conversation: Conversation, where: str, train_on: Literal["all", "last"] = "all") -> Example:
        return self.examples([(where, conversation)], train_on)[0]

    def examples(self, conversations: Sequence[tuple[str, Conversation]], train_on: Literal["all", "last"]) -> list[Example]:
        """Tokenise each conversation and mask its target tokens."""
        texts, spans = zip(*(self._marked_spans(c, where, train_on) for where, c in conversations), strict=True)
        result = []
        for (where, _), targets, (tokens, covered) in zip(conversations, spans, self._encode(texts), strict=True):
            mask = _overlapping(covered, targets)
            mask[:1] = False
            if not mask.any():
                raise DataError(f"{where}: the chat template leaves no target tokens; `plaudit doctor` shows how rows are rendered")
            result.append(Example(np.asarray(tokens, dtype=np.int32), mask))
        return result

    def _encode(self, texts: Sequence[tuple[str, str]]) -> list[Encoded]:
        """The tokens of each rendered text, given with its mark, and their character offsets.

        Texts are split after generation prompts, so that a prompt's tokens do not depend on how its answer begins.
        """
        cuts = [[0, *(match.end() for match in self._split_after.finditer(text)), len(text)] for text, _ in texts]
        pieces = [(text[begin:end], mark) for (text, mark), at in zip(texts, cuts, strict=True) for begin, end in pairwise(at)]
        encoded_pieces = iter(self.control_tokens.encode(*zip(*pieces, strict=True)))
        result = []
        for at in cuts:
            tokens, covered = [], [np.zeros((0, 2), dtype=np.int64)]
            for begin in at[:-1]:
                ids, span = next(encoded_pieces)
                tokens += ids
                span[:, 1] = span[:, 1].clip(min=1)  # some tokenizers report empty spans for white space
                covered.append(begin + span)
            result.append((tokens, np.concatenate(covered)))
        return result

    def spans(
        self, conversation: Conversation, where: str, train_on: Literal["all", "last"] = "all"
    ) -> tuple[str, list[tuple[int, int]]]:
        """The rendered conversation, and the target span of each assistant turn."""
        (text, mark), spans = self._marked_spans(conversation, where, train_on)
        if not mark:
            return text, spans
        return text.replace(mark, ""), [
            (begin - text.count(mark, 0, begin), end - text.count(mark, 0, end)) for begin, end in spans
        ]

    def _marked_spans(
        self, conversation: Conversation, where: str, train_on: Literal["all", "last"]
    ) -> tuple[tuple[str, str], list[tuple[int, int]]]:
        """The same with the control tokens of messages marked; the text comes with the mark."""
        try:
            messages, tools, mark = self.control_tokens.quote(conversation.messages, conversation.tools)
            messages = self._keep_last_thoughts(messages, tools)
            turns = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= conversation.train_from]
            text, spans = self._spans(messages, turns if train_on == "all" else turns[-1:], tools)
        except RENDER_ERRORS as error:
            raise DataError(f"{where}: the chat template cannot render these messages: {error}") from None
        return (text, mark), spans

    def _spans(self, messages: list[Message], turns: list[int], tools: list[Any] | None) -> tuple[str, list[tuple[int, int]]]:
        full = self.render(messages, tools)
        if messages[-1]["role"] != "assistant":
            return full, self._turn_spans(messages, turns, tools, full)
        *earlier, last = turns
        prompt = self._render_if_possible(messages[:-1], tools, generation_prompt=True)
        start, end = self._span(messages, last, tools, full, prompt)
        if prompt is None or prompt.startswith(full[:start]):
            return full, [*self._turn_spans(messages, earlier, tools, full), (start, end)]
        # The full text contains a different prompt than sampling uses: Mistral's template drops the system prompt once answered.
        spans = self._turn_spans(messages[:-1], earlier, tools, prompt, generation_prompt=True)
        return prompt + full[start:], [*spans, (len(prompt), len(prompt) + end - start)]

    def _turn_spans(
        self, messages: list[Message], turns: list[int], tools: list[Any] | None, full: str, *, generation_prompt: bool = False
    ) -> list[tuple[int, int]]:
        """Where each turn starts and ends. In a long conversation, turns between the same texts are alike: some of each kind are
        located, the others follow from where their contents are. Locating all would render each beginning of the conversation."""

        def locate(i: int) -> tuple[int, int]:
            prompt = self._render_if_possible(messages[:i], tools, generation_prompt=True)
            return self._span(messages, i, tools, full, prompt, generation_prompt=generation_prompt)

        if len(turns) <= MAX_TURNS_LOCATED_ALONE:
            return list(map(locate, turns))
        rendered = self._render_if_possible(list(map(_with_marked_content, messages)), tools, generation_prompt=generation_prompt)
        pieces = rendered.split(MARK) if rendered is not None and rendered.replace(MARK, "") == full else []
        contents = [message["content"].strip() for message in messages]
        if pieces[1::2] != contents:
            _require_few_messages(sum(turns))
            return list(map(locate, turns))
        places = np.cumsum([0, *map(len, pieces)])  # content i is full[places[2i + 1] : places[2i + 2]]
        kinds: dict[Any, list[int]] = defaultdict(list)
        for i in turns:
            kinds[i > 0 and messages[i - 1]["role"], pieces[2 * i], pieces[2 * i + 2], i + 1 < len(messages)].append(i)
        tried = {i for alike in kinds.values() for i in (alike[0], alike[len(alike) // 2], alike[-1])}
        _require_few_messages(sum(tried))
        spans = {i: locate(i) for i in sorted(tried)}
        for alike in kinds.values():
            offsets = {(spans[i][0] - places[2 * i + 1], spans[i][1] - places[2 * i + 2]) for i in tried.intersection(alike)}
            if len(offsets) > 1:
                _require_few_messages(sum(turns))
                return list(map(locate, turns))
            [(before, after)] = offsets
            spans |= {i: (int(places[2 * i + 1] + before), int(places[2 * i + 2] + after)) for i in alike}
        return [spans[i] for i in turns]

    def _span(
        self,
        messages: list[Message],
        i: int,
        tools: list[Any] | None,
        full: str,
        prompt: str | None,
        *,
        generation_prompt: bool = False,
    ) -> tuple[int, int]:
        """Where turn i starts and ends in the full text. `prompt`: the messages before it, if they can be rendered."""
        upto = self._render_if_possible(messages[: i + 1], tools) if i < len(messages) - 1 else full
        upto = upto and upto.removesuffix(self._after_end_token)
        start = len(prompt) if prompt is not None and full.startswith(prompt) else None
        end = len(upto) if upto is not None and full.startswith(upto) else None
        if start is not None and end is not None:
            return start, end
        # The template rewrites history: a marker in the turn's place shows what surrounds it.
        marked = [*messages[:i], {"role": "assistant", "content": MARK}, *messages[i + 1 :]]
        rendered = self._render_if_possible(marked, tools, generation_prompt=generation_prompt)
        before, found, after = (rendered or "").partition(MARK)
        if start is None:
            written = self._before_content if before.endswith(self._before_answer + self._before_content) else ""
            start = len(before) - len(written)
        if end is None:
            end = len(full) - len(after) + (len(self._end_token) if after.startswith(self._end_token) else 0)
        if not (found and full.startswith(before[:start]) and full.endswith(after) and start <= end):
            raise ValueError(
                f"it rewrites message {i}, so the tokens that the assistant wrote cannot be located; "
                "choose another model.chat_template, or data.train_on=last"
            )
        return start, end


def _overlapping(covered: np.ndarray, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Which tokens overlap one of the spans, which are in order."""
    begins, ends = np.array([*spans, (np.iinfo(np.int64).max,) * 2], dtype=np.int64).T
    return begins[np.searchsorted(ends, covered[:, 0], side="right")] < covered[:, 1]


def _with_marked_content(message: Message) -> Message:
    """Markers around the content, inside its outer white space, which a template may trim."""
    content = message["content"]
    start, end = len(content) - len(content.lstrip()), len(content.rstrip())
    return {**message, "content": f"{content[:start]}{MARK}{content[start:end]}{MARK}{content[max(start, end) :]}"}


def _require_few_messages(rendered: int) -> None:
    if rendered > MAX_RENDERED_MESSAGES:
        raise ValueError(
            "the conversation is too long: this template changes turns that others follow, so that each has to be located by "
            "rendering all messages before it. Split the row, or set data.train_on=last"
        )


# Loading -------------------------------------------------------------------------------------------------------------


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    folder = model_folder(with_tokenizer(path), weights=False)
    if (folder / "config.json").is_file():  # transformers reads it too
        require_config(folder)
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # damaged files: tokenizers raises nothing more specific
        raise RecipeError(f"no tokenizer could be loaded from {path}: {' '.join(str(error).split())[:300]}") from None


def load_model_template(model: ModelSettings, special_tokens: SpecialTokens = "text") -> ChatTemplate:
    """Load the tokenizer and chat template of a recipe's model. `special_tokens`: the recipe's data.special_tokens."""
    tokenizer = load_tokenizer(model.tokenizer or model.path, trust_remote_code=model.trust_remote_code)
    return load_template(tokenizer, model.chat_template, special_tokens)


def load_template(tokenizer: PreTrainedTokenizerBase, chosen: str | None, special_tokens: SpecialTokens = "text") -> ChatTemplate:
    """Load the chosen template: a name, a .jinja file, another model's, or (None) the tokenizer's own."""
    return ChatTemplate(tokenizer, template_text(tokenizer, chosen), special_tokens)


def template_text(tokenizer: PreTrainedTokenizerBase, chosen: str | None) -> str:
    if chosen is None:
        text = _own_template(tokenizer)
        if text is None:
            raise RecipeError(
                f"{tokenizer.name_or_path}: the tokenizer has no chat template (a base model?). Choose one with "
                f"model.chat_template: {', '.join(NAMED)}, a .jinja file, or another model's folder or name."
            )
        return text
    if chosen in NAMED:
        text = resources.files("plaudit.data").joinpath(f"named_templates/{chosen}.jinja").read_text(encoding="utf-8")
        return _require_special_tokens(tokenizer, text, chosen)
    if chosen.endswith(".jinja"):
        try:
            text = Path(chosen).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise RecipeError(f"model.chat_template: {chosen} does not exist.{nearest_path(Path(chosen))}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"model.chat_template: {chosen} cannot be read: {error}") from None
        return text
    text = _own_template(load_tokenizer(chosen))
    if text is None:
        raise RecipeError(f"model.chat_template: the tokenizer of {chosen} has no chat template")
    return text


def _own_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The tokenizer's template; the default one if there are several (for tools, for retrieval)."""
    try:
        return tokenizer.get_chat_template()
    except ValueError:
        return None


def _require_special_tokens(tokenizer: PreTrainedTokenizerBase, text: str, name: str) -> str:
    """Require a named template's special tokens to be single tokens; sampling would not stop at an end marker of several."""
    vocabulary = tokenizer.get_vocab()
    missing = sorted(set(re.findall(r"<\|\w+\|>", text)) - set(vocabulary))
    if missing:
        raise RecipeError(
            f"model.chat_template: {name} needs the tokens {', '.join(missing)}, which this tokenizer lacks. "
            "Use `plain`, or the instruct model's tokenizer with model.tokenizer."
        )
    if name == "plain" and not tokenizer.eos_token:
        raise RecipeError("model.chat_template: plain ends turns with the EOS token, but this tokenizer has none")
    return text
