"""Chat templates: conversations → text → tokens, and which of those tokens the assistant wrote.

transformers can only mask templates that carry `{% generation %}` marks, and most carry none; its mask is then all zero. So the
assistant's turns are found by rendering. Turn i begins where the prompt for it ends and stops where the conversation up to it ends:

    prompt_i = render(messages[:i], generation prompt)     upto_i = render(messages[:i+1])     turn_i = full[len(prompt_i):len(upto_i)]

which is right whenever both are prefixes of the full text. Some templates rewrite history (they drop old thoughts, or move the
system prompt into the last user turn); there the turn's ends are found by rendering once more with marks around its content.

What is learnt is what the model will have to write when it is sampled: what the generation prompt pre-fills (`<think>`) is not,
the end token is, white space behind it is not.
"""

import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import jinja2
import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from plaudit.errors import DataError, RecipeError
from plaudit.types import Conversation, Example, Message

NAMED = ("chatml", "llama3", "qwen", "plain")
# Private-use characters stand around a turn's content while we look for it: START, AFTER_THOUGHTS … END.
START, AFTER_THOUGHTS, END = "\ue000", "\ue001", "\ue002"
MARKS = str.maketrans("", "", START + AFTER_THOUGHTS + END)


class ChatTemplate:
    """A tokenizer with the template its conversations are written in."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: str):
        if not tokenizer.is_fast:
            raise RecipeError(f"{tokenizer.name_or_path}: plaudit needs a fast tokenizer (a tokenizer.json), to tell which text a token covers")
        self.tokenizer = tokenizer
        self.text = text
        self._reads_reasoning = "reasoning_content" in text
        tokenizer.chat_template = text
        self._require_generation_prompt()

    # Rendering

    def render(self, messages: Sequence[Message], tools: list[Any] | None = None, *, generation_prompt: bool = False) -> str:
        return self.tokenizer.apply_chat_template(  # pyright: ignore[reportReturnType]
            [self._fold_reasoning(m) for m in messages],
            tools=tools,
            add_generation_prompt=generation_prompt,
            tokenize=False,
        )

    def prompt_tokens(self, messages: Sequence[Message], tools: list[Any] | None = None) -> list[int]:
        """What the policy is given to continue."""
        text = self.render(messages, tools, generation_prompt=True)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]  # pyright: ignore[reportReturnType]

    def _fold_reasoning(self, message: Message) -> Message:
        """Thoughts given apart go into the content when the template would not show them."""
        if self._reads_reasoning or not message.get("reasoning_content"):
            return message
        thoughts = f"<think>\n{message['reasoning_content'].strip()}\n</think>\n\n"
        return {**message, "content": thoughts + message["content"], "reasoning_content": ""}

    def _require_generation_prompt(self) -> None:
        user, mark = {"role": "user", "content": "?"}, {"role": "assistant", "content": START}
        try:
            without, with_prompt = self.render([user]), self.render([user], generation_prompt=True)
            header = self.render([user, mark]).partition(START)[0].removeprefix(without)
        except jinja2.TemplateError as error:
            raise RecipeError(f"the chat template cannot render a user and an assistant message: {error}") from None
        if with_prompt == without and header.strip():
            raise RecipeError(
                "the chat template has no generation prompt: add_generation_prompt adds nothing, though assistant turns start "
                f"with {header.strip()!r}. Choose another with model.chat_template ({', '.join(NAMED)}, a .jinja file, or a model)."
            )

    # Masks

    def example(self, conversation: Conversation, where: str, train_on: Literal["all", "last"] = "all") -> Example:
        return self.examples([(where, conversation)], train_on)[0]

    def examples(self, conversations: Sequence[tuple[str, Conversation]], train_on: Literal["all", "last"]) -> list[Example]:
        """Each conversation as tokens and a mask of those to learn."""
        texts, spans = zip(*(self.spans(conversation, where) for where, conversation in conversations), strict=True)
        encoded = self.tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=True)
        result = []
        for i, (where, _) in enumerate(conversations):
            tokens = np.asarray(encoded["input_ids"][i], dtype=np.int32)  # pyright: ignore
            starts = np.asarray([start for start, _ in encoded["offset_mapping"][i]], dtype=np.int64)  # pyright: ignore
            mask = np.zeros(len(tokens), dtype=bool)
            for begin, end in spans[i] if train_on == "all" else spans[i][-1:]:
                mask |= (starts >= begin) & (starts < end)
            mask[:1] = False
            if not mask.any():
                raise DataError(f"{where}: the chat template leaves no token to learn; `plaudit doctor` shows how rows are rendered")
            result.append(Example(tokens, mask))
        return result

    def spans(self, conversation: Conversation, where: str) -> tuple[str, list[tuple[int, int]]]:
        """The rendered conversation, and for each assistant turn the part of it that the model must write."""
        messages, tools = conversation.messages, conversation.tools
        try:
            full = self.render(messages, tools)
            spans = []
            for i, message in enumerate(messages):
                if message["role"] == "assistant":
                    full, span = self._span(messages, i, tools, full)
                    spans.append(span)
        except (jinja2.TemplateError, _TurnNotFound) as error:
            raise DataError(f"{where}: the chat template cannot render these messages: {error}") from None
        return full, spans

    def _span(self, messages: list[Message], i: int, tools: list[Any] | None, full: str) -> tuple[str, tuple[int, int]]:
        prompt = self.render(messages[:i], tools, generation_prompt=True) if i else ""
        upto = full if i == len(messages) - 1 else self.render(messages[: i + 1], tools)
        start = len(prompt) if full.startswith(prompt) else None
        end = len(upto) if full.startswith(upto) else None
        if start is None or end is None:
            marked_start, marked_end = self._marked_span(messages, i, tools, full)
            start = marked_start if start is None else start
            end = marked_end if end is None else end
        if i == len(messages) - 1 and (lost := _lost_thoughts(self._fold_reasoning(messages[i])["content"], full[start:end])):
            # Templates drop thoughts from finished turns, the last one too; yet it is what the model must learn to write here.
            ending = full[self._marked_span(messages, i, tools, full)[0] :].rstrip()
            begun = prompt.rstrip().endswith("<think>")
            full = prompt + (lost if begun else "<think>\n" + lost) + "\n</think>\n\n" + ending.lstrip()
            start, end = len(prompt), len(full)
        return full, (start, start + len(full[start:end].rstrip()))

    def _marked_span(self, messages: list[Message], i: int, tools: list[Any] | None, full: str) -> tuple[int, int]:
        marked = self.render([*messages[:i], _marked(self._fold_reasoning(messages[i])), *messages[i + 1 :]], tools)
        alone = self.render([*messages[:i], _marked(self._fold_reasoning(messages[i]))], tools)
        if END not in marked or marked.translate(MARKS) != full:
            raise _TurnNotFound(
                f"it rewrites message {i}, so plaudit cannot tell which tokens the assistant wrote; choose another model.chat_template"
            )
        before, tail = marked.split(END)
        end = len(before.translate(MARKS))
        end_token = _common_prefix(tail, alone.split(END)[1]).rstrip()
        start = before.find(START) if START in before else before.find(AFTER_THOUGHTS)
        if start < 0:
            raise _TurnNotFound(f"it cuts the start of message {i}; choose another model.chat_template")
        return start, end + len(end_token)


class _TurnNotFound(ValueError):
    pass


def _marked(message: Message) -> Message:
    """The message with marks around its content, inside the white space that templates may trim."""
    content = message["content"]
    core = content.strip()
    if not core:
        raise _TurnNotFound("an assistant message without text cannot be located")
    thoughts = re.search(r"</think>\s*", core)
    marked = START + core if not thoughts else START + core[: thoughts.end()] + AFTER_THOUGHTS + core[thoughts.end() :]
    lead, trail = content[: len(content) - len(content.lstrip())], content[len(content.rstrip()) :]
    return {**message, "content": lead + marked + END + trail}


def _lost_thoughts(content: str, rendered: str) -> str:
    """The thoughts in a message's content, if its rendering has dropped them."""
    before, closed, _ = content.partition("</think>")
    thoughts = before.rpartition("<think>")[2].strip() if closed else ""
    return thoughts if thoughts and thoughts not in rendered else ""


def _common_prefix(a: str, b: str) -> str:
    return a[: next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))]


# Loading -------------------------------------------------------------------------------------------------------------


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise RecipeError(f"no tokenizer could be loaded from {path}: {str(error).splitlines()[0]}") from None


def load_template(tokenizer: PreTrainedTokenizerBase, chosen: str | None) -> ChatTemplate:
    """The template a recipe chooses: a name, a .jinja file, another model's, or (None) the tokenizer's own."""
    if chosen is None:
        if not isinstance(tokenizer.chat_template, str):
            raise RecipeError(
                f"{tokenizer.name_or_path}: the tokenizer has no chat template (a base model?). Choose one with "
                f"model.chat_template: {', '.join(NAMED)}, a .jinja file, or another model's folder or name."
            )
        return ChatTemplate(tokenizer, tokenizer.chat_template)
    if chosen in NAMED:
        text = resources.files("plaudit.data").joinpath(f"named_templates/{chosen}.jinja").read_text(encoding="utf-8")
        return ChatTemplate(tokenizer, _with_known_tokens(tokenizer, text, chosen))
    if chosen.endswith(".jinja"):
        if not Path(chosen).exists():
            raise RecipeError(f"model.chat_template: {chosen} does not exist")
        return ChatTemplate(tokenizer, Path(chosen).read_text(encoding="utf-8"))
    other = load_tokenizer(chosen)
    if not isinstance(other.chat_template, str):
        raise RecipeError(f"model.chat_template: the tokenizer of {chosen} has no chat template")
    return ChatTemplate(tokenizer, other.chat_template)


def _with_known_tokens(tokenizer: PreTrainedTokenizerBase, text: str, name: str) -> str:
    """A named template's special tokens must be single tokens, or turns would end in a string nobody stops at."""
    vocabulary = tokenizer.get_vocab()
    missing = sorted(set(re.findall(r"<\|\w+\|>", text)) - set(vocabulary))
    if missing:
        raise RecipeError(
            f"model.chat_template: {name} needs the tokens {', '.join(missing)}, which this tokenizer lacks. "
            "Use `plain`, or the instruct model's tokenizer with model.tokenizer."
        )
    if name == "plain" and not tokenizer.eos_token:
        raise RecipeError("model.chat_template: plain ends turns with the EOS token, and this tokenizer has none")
    return text
