"""Chat templates and loss masks: the model is trained on exactly what the assistant wrote, whatever the template."""

import string
from dataclasses import dataclass
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from plaudit.data.templates import ChatTemplate, load_template
from plaudit.errors import DataError, RecipeError
from plaudit.types import Conversation, Example, Message
from support.paths import CHAT_TEMPLATES

FOLDER = CHAT_TEMPLATES
CHATML, LLAMA3 = ("<|im_start|>", "<|im_end|>"), ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
# Roles such as <|user|> and words such as [INST] stay ordinary text, of many tokens, as in several real tokenizers.
SPECIAL = (
    *("<s>", "</s>", "<|endoftext|>", "<|end|>", "<think>", "</think>", "<tool_call>", "</tool_call>", *CHATML, *LLAMA3),
    *("<start_of_turn>", "<end_of_turn>", "<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
    *("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<|start|>", "<|message|>", "<|channel|>", "<|return|>"),
    *("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"),
)
# Words that follow each other without spaces, and runs of line breaks: tokens that span turn boundaries.
CORPUS = ["the answer is the assistant's answer", "user\n\n\nassistant\n\n", "\n\n", "\n\n\n", "  \n  ", "](**](**](**"] * 20


@cache
def byte_tokenizer(special: tuple[str, ...] = SPECIAL, trim_offsets: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level BPE, as in Llama 3 and Qwen; some such tokenizers leave white space out of the offsets they report."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    core.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")


@cache
def spaced_tokenizer() -> PreTrainedTokenizerFast:
    """BPE like SentencePiece's, as in Llama 2: spaces are ▁, and one is prepended to any text."""
    core = Tokenizer(models.BPE())
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)])
    alphabet = ["▁", *string.printable, *"東京🗾"]
    core.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False))
    core.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")


@cache
def template(name: str) -> ChatTemplate:
    return ChatTemplate(byte_tokenizer(), (FOLDER / f"{name}.jinja").read_text(encoding="utf-8"))


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str, **more) -> Message:
    return {"role": "assistant", "content": content, **more}


def decode(chat: ChatTemplate, tokens) -> str:
    return chat.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def make_example(chat: ChatTemplate, messages: list[Message], train_on="all", tools=None) -> Example:
    return chat.example(Conversation(messages, tools), "rows.jsonl: row 7", train_on)


def targets(chat: ChatTemplate, messages: list[Message], train_on="all", tools=None) -> list[str]:
    """The text of each contiguous run of target tokens."""
    example = make_example(chat, messages, train_on, tools)
    assert not example.loss_mask[0]
    runs: list[list[int]] = []
    for i in example.loss_mask.nonzero()[0].tolist():
        if i and example.loss_mask[i - 1]:
            runs[-1].append(int(example.tokens[i]))
        else:
            runs.append([int(example.tokens[i])])
    return [decode(chat, run) for run in runs]


# Every template ------------------------------------------------------------------------------------------------------

SYSTEM = {"role": "system", "content": "Be brief."}
TALK = [user("Where is 東京?"), assistant("In Japan 🗾."), user("And Oslo?"), assistant("In Norway.")]
THOUGHTFUL = "<think>\nIt is up north.\n</think>\n\nIn Norway."


@dataclass(frozen=True)
class Format:
    """The target text of a turn with content {}."""

    turn: str
    """For a turn that is not the last."""
    last: str
    thoughtful: str
    """For a last turn whose content is THOUGHTFUL."""
    system: bool = True
    trims: bool = False


def same(turn: str, **more) -> Format:
    return Format(turn, turn, turn.format(THOUGHTFUL), **more)


OPENED = "It is up north.\n</think>\n\nIn Norway."
FORMATS = {
    "qwen25": same("{}<|im_end|>"),
    "llama3": same("{}<|eot_id|>", trims=True),
    "llama2": same(" {} </s>", trims=True),
    "mistral_v01": same("{}</s>", system=False),
    "mistral_v03": same(" {}</s>", trims=True),
    "mistral_nemo": same("{}</s>"),
    "gemma": same("{}<end_of_turn>", system=False, trims=True),
    "phi3": same("{}<|end|>"),
    "zephyr": same("{}</s>"),
    "qwen3": Format("{}<|im_end|>", "<think>\n\n</think>\n\n{}<|im_end|>", THOUGHTFUL + "<|im_end|>"),
    "qwen3_thinking": Format("{}<|im_end|>", "\n</think>\n\n{}<|im_end|>", OPENED + "<|im_end|>"),
    "deepseek_r1": Format(*["{}<｜end▁of▁sentence｜>"] * 2, OPENED + "<｜end▁of▁sentence｜>"),
    "prefilled_think": Format(*["{}<|im_end|>"] * 2, OPENED + "<|im_end|>"),
    "granite": same("{}<|end_of_text|>"),
    "command_r": same("{}<|END_OF_TURN_TOKEN|>", trims=True),
    # Its last turn ends with a token that earlier ones lack; theirs is not a stop token.
    "harmony": Format(
        "<|channel|>final<|message|>{}",
        "<|channel|>final<|message|>{}<|return|>",
        f"<|channel|>final<|message|>{THOUGHTFUL}<|return|>",
    ),
}
PREFILLING = ("deepseek_r1", "prefilled_think")  # their prompts open thoughts, even for an answer without any
every_template = pytest.mark.parametrize("name", FORMATS)


def test_every_template_has_an_expected_format():
    assert {path.stem for path in FOLDER.glob("*.jinja")} == set(FORMATS)


@every_template
def test_every_answer_is_a_target_and_nothing_else(name):
    expected = FORMATS[name]
    messages = [SYSTEM] * expected.system + TALK
    assert targets(template(name), messages) == [expected.turn.format("In Japan 🗾."), expected.last.format("In Norway.")]


@every_template
def test_tokens_decode_to_the_rendering(name):
    chat = template(name)
    messages = [SYSTEM] * FORMATS[name].system + TALK
    rendering = chat.render(messages)
    if name == "mistral_nemo":  # it drops the system prompt of finished conversations, which models must learn to follow
        rendering = chat.render(messages[:-1], generation_prompt=True) + "In Norway.</s>"
    assert decode(chat, make_example(chat, messages).tokens) == rendering
    assert ("Be brief." in rendering) == FORMATS[name].system


@every_template
def test_a_single_answer_is_a_target(name):
    assert targets(template(name), TALK[:2]) == [FORMATS[name].last.format("In Japan 🗾.")]


@every_template
def test_train_on_last_targets_only_the_last_answer(name):
    messages = [SYSTEM] * FORMATS[name].system + TALK
    assert targets(template(name), messages, train_on="last") == [FORMATS[name].last.format("In Norway.")]


@every_template
def test_the_last_answer_need_not_be_the_last_message(name):
    assert targets(template(name), TALK[:3], train_on="last") == [FORMATS[name].turn.format("In Japan 🗾.")]


@every_template
@pytest.mark.parametrize(
    "content",
    ["👩‍👩‍👧‍👦 é é ﷽ \u202eabc", "\n\n the answer  \n", "\t", "(**bold**)", "\ue000\ue001\ue002", "x" * 3000, "{{ 1 }} {% if %}"],
    ids=["unicode", "white space", "blank", "punctuation", "private use", "long", "jinja"],
)
def test_targets_are_contents_as_the_template_renders_them(name, content):
    expected = FORMATS[name]
    shown = content.strip() if expected.trims else content
    last = shown.lstrip("\n") if name.startswith("qwen3") else shown
    earlier = shown.lstrip("\n") if name == "qwen3_thinking" else shown
    messages = [user(content), assistant(content), user(content), assistant(content)]
    assert targets(template(name), messages) == [expected.turn.format(earlier), expected.last.format(last)]


@every_template
def test_contents_may_quote_the_template(name):
    """The mask does not search texts for headers and end tokens, so these may occur in messages."""
    chat, expected = template(name), FORMATS[name]
    quote = chat.render(TALK[:1], generation_prompt=True) + "In" + expected.turn.format("it") + ", I said."
    messages = [user(quote), assistant(quote), user(quote), assistant(quote)]
    assert targets(chat, messages) == [expected.turn.format(quote), expected.last.format(quote)]


@every_template
@pytest.mark.parametrize("answer", ["In Norway.", "\n\n\nIn Norway", "  ", "(** in **)"])
def test_prompts_are_the_same_tokens_in_training_and_in_sampling(name, answer):
    if name in PREFILLING:
        answer = f"<think>\n{answer}\n</think>\n\n{answer}"
    chat = template(name)
    messages = [SYSTEM] * FORMATS[name].system + [*TALK[:3], assistant(answer)]
    prompt = chat.prompt_tokens(messages[:-1])
    assert make_example(chat, messages).tokens[: len(prompt)].tolist() == prompt


@every_template
def test_a_batch_of_conversations_equals_single_ones(name):
    chat = template(name)
    talks = [TALK, TALK[:2], [user("Hi"), assistant("\n\nHo")]]
    together = chat.examples([(str(i), Conversation(talk)) for i, talk in enumerate(talks)], "all")
    for talk, example in zip(talks, together, strict=True):
        alone = make_example(chat, talk)
        assert alone.tokens.tolist() == example.tokens.tolist()
        assert alone.loss_mask.tolist() == example.loss_mask.tolist()


@pytest.mark.parametrize("name", ["qwen25", "llama3", "llama2", "zephyr", "qwen3", "deepseek_r1"])
def test_tokenizers_that_omit_white_space_from_offsets(name):
    chat = ChatTemplate(byte_tokenizer(trim_offsets=True), template(name).text)
    for messages in (TALK, [*TALK[:3], assistant("\n\n the answer")], [*TALK[:3], assistant(THOUGHTFUL)]):
        assert targets(chat, messages) == targets(template(name), messages)


@pytest.mark.parametrize("name", ["llama2", "mistral_v01", "mistral_v03", "zephyr", "phi3"])
def test_tokenizers_that_prepend_a_space(name):
    chat, expected = ChatTemplate(spaced_tokenizer(), template(name).text), FORMATS[name]
    messages = [SYSTEM] * expected.system + TALK
    example = make_example(chat, messages)
    assert example.tokens.tolist() == chat.tokenizer(chat.render(messages), add_special_tokens=False)["input_ids"]
    text = "".join(chat.tokenizer.convert_ids_to_tokens(example.tokens[example.loss_mask].tolist())).replace("▁", " ")
    assert text == expected.turn.format("In Japan 🗾.") + expected.last.format("In Norway.")


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("llama2", "mistral_nemo")])
def test_the_header_of_an_opening_assistant_turn_is_not_a_target(name):
    """It has no prompt, so everything that a template writes before the content counts as header."""
    expected = {"mistral_v03": "Hello!</s>", "harmony": "Hello!"}.get(name, FORMATS[name].turn.format("Hello!"))
    assert targets(template(name), [assistant("Hello!"), *TALK[:2]])[0] == expected


# Thoughts ------------------------------------------------------------------------------------------------------------


@every_template
def test_thoughts_of_the_last_turn_are_targets(name):
    chat = template(name)
    messages = [*TALK[:3], assistant(THOUGHTFUL)]
    assert targets(chat, messages)[-1] == FORMATS[name].thoughtful
    prompt = chat.prompt_tokens(messages[:-1])
    example = make_example(chat, messages)
    assert example.tokens[: len(prompt)].tolist() == prompt
    assert not example.loss_mask[len(prompt) - 1]
    assert example.loss_mask[len(prompt)]


@every_template
@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_in_a_separate_field_are_targets(name, field):
    messages = [*TALK[:3], assistant("In Norway.", **{field: "It is up north."})]
    expected = FORMATS[name].thoughtful
    if name == "harmony":
        expected = (
            "<|channel|>analysis<|message|>It is up north.<|end|><|start|>assistant<|channel|>final<|message|>In Norway.<|return|>"
        )
    assert targets(template(name), messages)[-1] == expected


@pytest.mark.parametrize("name", ["deepseek_r1", "prefilled_think", "qwen3", "qwen3_thinking"])
@pytest.mark.parametrize(
    "content",
    [
        THOUGHTFUL,
        "<think>It is up north.</think>In Norway.",
        "It is up north.\n</think>\n\nIn Norway.",
        "\n<think>\n\nIt is up north.\n\n</think>\nIn Norway.",
    ],
)
def test_thoughts_are_targets_however_their_tags_are_written(name, content):
    assert targets(template(name), [*TALK[:3], assistant(content)])[-1] == FORMATS[name].thoughtful


@pytest.mark.parametrize("name", PREFILLING)
def test_thoughts_repeated_in_the_answer_are_still_targets(name):
    end = FORMATS[name].last.format("")
    content = "<think>\nNorway\n</think>\n\nNorway, I think."
    assert targets(template(name), [user("Oslo?"), assistant(content)]) == [f"Norway\n</think>\n\nNorway, I think.{end}"]


@pytest.mark.parametrize("name", [*PREFILLING, "qwen3_thinking"])
def test_empty_thoughts_are_closed(name):
    """The prompt opens thoughts, so a model that should not think has to learn to close them."""
    end = FORMATS[name].turn.format("")
    content = "<think>\n\n</think>\n\nIn Norway."
    assert targets(template(name), [user("Oslo?"), assistant(content)]) == [f"\n</think>\n\nIn Norway.{end}"]


@every_template
def test_text_before_the_thoughts_does_not_hide_them(name):
    text = "".join(targets(template(name), [user("Oslo?"), assistant("Well. <think>\nHm, Norway?\n</think>\n\nNorway.")]))
    assert "Hm, Norway?" in text
    assert text.count("Norway") == 2
    assert ("Well." in text) != name.startswith("qwen3")  # these templates drop text before thoughts


@every_template
def test_thoughts_of_earlier_turns_follow_the_template(name):
    """Dropped where the template drops them (R1 keeps the line breaks after them), or trained on."""
    dropped = {"qwen3": "In Norway.", "qwen3_thinking": "In Norway.", "deepseek_r1": "\n\nIn Norway."}
    expected = FORMATS[name].turn.format(dropped.get(name, OPENED if name == "prefilled_think" else THOUGHTFUL))
    talk = [user("Oslo?"), assistant(THOUGHTFUL), user("Sure?"), assistant(THOUGHTFUL)]
    assert targets(template(name), [SYSTEM] * FORMATS[name].system + talk) == [expected, FORMATS[name].thoughtful]


# Tools ---------------------------------------------------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"city": {"type": "string"}}}}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
CALLED = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TOOL_TALK = [user("Weather in Oslo?"), assistant("", tool_calls=[CALL]), {"role": "tool", "content": "4 °C"}, assistant("Cold.")]


@pytest.mark.parametrize("system", [[], [SYSTEM]])
def test_tool_calls_are_targets_and_their_results_are_not(system):
    expected = [f"{CALLED}<|im_end|>", "<think>\n\n</think>\n\nCold.<|im_end|>"]
    assert targets(template("qwen3"), system + TOOL_TALK, tools=TOOLS) == expected


def test_tool_calls_of_earlier_turns_are_targets():
    expected = [f"{CALLED}<|im_end|>", "Cold.<|im_end|>", "<think>\n\n</think>\n\nYes.<|im_end|>"]
    assert targets(template("qwen3"), [*TOOL_TALK, user("Sure?"), assistant("Yes.")], tools=TOOLS) == expected


def test_tool_calls_are_targets_with_the_thoughts_and_text_before_them():
    call = assistant("Let me see.", reasoning_content="I should look.", tool_calls=[CALL, CALL])
    expected = f"<think>\nI should look.\n</think>\n\nLet me see.\n{CALLED}\n{CALLED}<|im_end|>"
    assert targets(template("qwen3"), [TOOL_TALK[0], call], tools=TOOLS) == [expected]
    assert targets(template("qwen3"), [TOOL_TALK[0], call, *TOOL_TALK[2:]], tools=TOOLS)[0] == expected
    later = targets(template("qwen3"), [TOOL_TALK[0], call, *TOOL_TALK[2:], user("Sure?"), assistant("Yes.")], tools=TOOLS)
    assert later[0] == f"Let me see.\n{CALLED}\n{CALLED}<|im_end|>"


def test_tool_calls_in_a_template_that_rewrites_history():
    """The marker that replaces a call cannot satisfy a template that requires a call there; the last answer needs no marker."""
    chat = template("mistral_nemo")
    call = '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}]</s>'
    assert targets(chat, TOOL_TALK, "all", TOOLS) == [call, "Cold.</s>"]
    later = [*TOOL_TALK, user("Sure?"), assistant("Yes.")]
    assert targets(chat, later, "last", TOOLS) == ["Yes.</s>"]
    with pytest.raises(DataError, match=r"row 7: .*rewrites message 1.*data\.train_on=last"):
        targets(chat, later, "all", TOOLS)


# Random conversations ------------------------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=("Cs", "Cc", "Cn")) | st.sampled_from("\n\t ,.?"), max_size=30)
conversations = st.builds(
    lambda system, talk: system + [m for question, answer in talk for m in (user(question), assistant(answer))],
    st.lists(texts.map(lambda text: {"role": "system", "content": text}), max_size=1),
    st.lists(st.tuples(texts, texts), min_size=1, max_size=4),
)


@pytest.mark.parametrize("name", ["qwen25", "llama3", "qwen3", "mistral_v03", "plain"])
@settings(max_examples=60, deadline=None)
@given(messages=conversations)
def test_random_conversations(name, messages):
    chat = load_template(byte_tokenizer(), "plain") if name == "plain" else template(name)
    example = make_example(chat, messages)
    assert decode(chat, example.tokens) == chat.render(messages)
    runs = targets(chat, messages)
    answers = [message["content"].strip() for message in messages if message["role"] == "assistant"]
    assert len(runs) == len(answers)
    for run, answer in zip(runs, answers, strict=True):
        end = FORMATS[name].turn.format("").strip() if name != "plain" else "</s>"
        assert run.removeprefix("<think>\n\n</think>\n\n").removesuffix(end).strip() == answer
    prompt = chat.prompt_tokens(messages[:-1])
    assert example.tokens[: len(prompt)].tolist() == prompt


# Templates that cannot be used ---------------------------------------------------------------------------------------


def test_a_template_without_a_generation_prompt_is_refused():
    text = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    with pytest.raises(RecipeError, match=r"no generation prompt.*<\|im_start\|>assistant.*model\.chat_template"):
        ChatTemplate(byte_tokenizer(), text)


@pytest.mark.parametrize(
    "text", ["{% for m in messages %}", "{{ raise_exception('not today') }}", "{{ messages.nothing.at_all }}", "Hello!"]
)
def test_a_template_that_cannot_render_messages_is_refused(text):
    with pytest.raises(RecipeError, match="the chat template"):
        ChatTemplate(byte_tokenizer(), text)


def test_a_tokenizer_without_a_template_says_what_to_do():
    bare = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer().backend_tokenizer)
    with pytest.raises(RecipeError, match=r"no chat template.*model\.chat_template: chatml, llama3, qwen, plain"):
        load_template(bare, None)


@pytest.mark.parametrize(
    ("name", "says"), [("gemma", "no system prompts, please"), ("mistral_v01", "only user and assistant speak here")]
)
def test_a_message_that_the_template_refuses_is_reported_with_its_row(name, says):
    with pytest.raises(DataError, match=rf"rows\.jsonl: row 7: .*{says}"):
        targets(template(name), [SYSTEM, *TALK])


def test_a_message_that_breaks_the_template_is_reported_with_its_row():
    text = template("qwen25").text.replace("turn.content ~", "(turn.content + turn.get('note', '')) ~")
    with pytest.raises(DataError, match=r"rows\.jsonl: row 7: "):
        targets(ChatTemplate(byte_tokenizer(), text), [user("Hi"), assistant("Ho", note=3)])


def test_an_answer_that_the_template_hides_is_reported_with_its_row():
    text = "{% for m in messages if m.content != 'secret' %}{{ '\n' ~ m.content }}{% endfor %}"
    with pytest.raises(DataError, match=r"rows\.jsonl: row 7: .*no target tokens"):
        targets(ChatTemplate(byte_tokenizer(), text), [user("Hi"), assistant("secret")])


def test_a_turn_that_cannot_be_found_is_reported_with_its_row():
    """This template starts with the length of what follows, so no part of a conversation renders as it does in the full one."""
    text = "{{ messages | map(attribute='content') | join | length }}" + template("zephyr").text
    with pytest.raises(DataError, match=r"rows\.jsonl: row 7: .*rewrites message 5.*model\.chat_template"):
        targets(ChatTemplate(byte_tokenizer(), text), [user("Hi"), assistant("x" * 100), *TALK])


def test_generation_tags_change_nothing():
    inside = '{%- generation -%}{{- turn.content ~ "<|im_end|>\n" -}}{%- endgeneration -%}'
    marked = template("qwen25").text.replace('turn.content ~ "<|im_end|>\\n" -}}', '"" -}}' + inside)
    assert "endgeneration" in marked
    assert targets(ChatTemplate(byte_tokenizer(), marked), TALK) == targets(template("qwen25"), TALK)


def test_two_templates_on_one_tokenizer_do_not_interfere():
    chats = [ChatTemplate(byte_tokenizer(), template(name).text) for name in ("granite", "zephyr")]
    assert [targets(chat, TALK[:2])[0] for chat in chats] == ["In Japan 🗾.<|end_of_text|>", "In Japan 🗾.</s>"]


def test_turns_separated_only_by_white_space():
    """Answers are tokenised separately from prompts, but not split after each line break."""
    text = "{% for m in messages %}{{ m.content ~ ('\n' if m.role == 'user' else eos_token) }}{% endfor %}"
    chat, answer = ChatTemplate(byte_tokenizer(), text), "In\n\n\nJapan"
    assert targets(chat, [user("Where?"), assistant(answer)]) == [answer + "</s>"]
    tokens = make_example(chat, [user("Where?"), assistant(answer)]).tokens.tolist()
    assert tokens == chat.tokenizer(f"Where?\n{answer}</s>", add_special_tokens=False)["input_ids"]


# Choosing a template -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rendering", "answers"),
    [
        (
            "chatml",
            "<|im_start|>user\nWhere is 東京?<|im_end|>\n<|im_start|>assistant\nIn Japan 🗾.<|im_end|>\n"
            "<|im_start|>user\nAnd Oslo?<|im_end|>\n<|im_start|>assistant\nIn Norway.<|im_end|>\n",
            ["In Japan 🗾.<|im_end|>", "In Norway.<|im_end|>"],
        ),
        (
            "qwen",
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
            "<|im_start|>user\nWhere is 東京?<|im_end|>\n<|im_start|>assistant\nIn Japan 🗾.<|im_end|>\n"
            "<|im_start|>user\nAnd Oslo?<|im_end|>\n<|im_start|>assistant\nIn Norway.<|im_end|>\n",
            ["In Japan 🗾.<|im_end|>", "In Norway.<|im_end|>"],
        ),
        (
            "llama3",
            "<s><|start_header_id|>user<|end_header_id|>\n\nWhere is 東京?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nIn Japan 🗾.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nAnd Oslo?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nIn Norway.<|eot_id|>",
            ["In Japan 🗾.<|eot_id|>", "In Norway.<|eot_id|>"],
        ),
        (
            "plain",
            "<s>User: Where is 東京?\nAssistant: In Japan 🗾.</s>\nUser: And Oslo?\nAssistant: In Norway.</s>\n",
            [" In Japan 🗾.</s>", " In Norway.</s>"],
        ),
    ],
)
def test_named_templates(name, rendering, answers):
    chat = load_template(byte_tokenizer(), name)
    assert chat.render(TALK) == rendering
    assert targets(chat, TALK) == answers
    assert targets(chat, [SYSTEM, *TALK]) == answers
    assert "helpful" not in chat.render([SYSTEM, *TALK])
    prompt = chat.prompt_tokens(TALK[:1])
    assert make_example(chat, TALK).tokens[: len(prompt)].tolist() == prompt


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("chatml", r"<\|im_end\|>, <\|im_start\|>"),
        ("qwen", r"<\|im_end\|>, <\|im_start\|>"),
        ("llama3", r"<\|end_header_id\|>, <\|eot_id\|>, <\|start_header_id\|>"),
    ],
)
def test_named_templates_need_their_tokens(name, missing):
    with pytest.raises(RecipeError, match=rf"{name} needs the tokens {missing}.*plain"):
        load_template(byte_tokenizer(("<s>", "</s>")), name)


def test_plain_needs_only_an_end_token():
    core = byte_tokenizer(("<s>", "</s>")).backend_tokenizer
    without_bos = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")
    assert targets(load_template(without_bos, "plain"), TALK[:2]) == [" In Japan 🗾.</s>"]
    with pytest.raises(RecipeError, match="EOS"):
        load_template(PreTrainedTokenizerFast(tokenizer_object=core), "plain")


def test_a_template_from_a_file():
    chat = load_template(byte_tokenizer(), str(FOLDER / "granite.jinja"))
    assert targets(chat, TALK[:2]) == ["In Japan 🗾.<|end_of_text|>"]
    with pytest.raises(RecipeError, match=r"granit\.jinja does not exist"):
        load_template(byte_tokenizer(), str(FOLDER / "granit.jinja"))


def test_a_template_file_that_cannot_be_read(tmp_path):
    (tmp_path / "folder.jinja").mkdir()
    (tmp_path / "latin.jinja").write_bytes("{# größer #}".encode("latin-1"))
    for name in ("folder", "latin"):
        with pytest.raises(RecipeError, match=rf"model\.chat_template: .*{name}\.jinja cannot be read: "):
            load_template(byte_tokenizer(), str(tmp_path / f"{name}.jinja"))


@pytest.mark.parametrize("several", [False, True])
def test_a_template_from_another_models_folder(tmp_path, several):
    core = byte_tokenizer().backend_tokenizer
    other = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    other.save_pretrained(tmp_path / "bare")
    with pytest.raises(RecipeError, match="no chat template"):
        load_template(byte_tokenizer(), str(tmp_path / "bare"))
    zephyr = template("zephyr").text
    other.chat_template = {"default": zephyr, "rag": "{{ documents }}"} if several else zephyr
    other.save_pretrained(tmp_path / "other")
    assert targets(load_template(byte_tokenizer(), str(tmp_path / "other")), TALK[:2]) == ["In Japan 🗾.</s>"]
    assert targets(load_template(other, None), TALK[:2]) == ["In Japan 🗾.</s>"]


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="no tokenizer could be loaded"):
        load_template(byte_tokenizer(), str(tmp_path))


def test_the_chosen_template_is_saved_with_the_tokenizer(tmp_path):
    chat = load_template(byte_tokenizer(), "chatml")
    chat.tokenizer.save_pretrained(tmp_path)
    saved = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert targets(load_template(saved, None), TALK) == targets(chat, TALK)


# Long conversations --------------------------------------------------------------------------------------------------


@every_template
def test_turns_of_a_long_conversation_are_located_as_in_a_short_one(name, monkeypatch):
    """Turns between the same texts are not all rendered; the spans are the same as if they were."""
    chat = template(name)
    said = [
        user("Where is 東京?"),
        assistant(" In Japan.\n"),
        user("And Oslo?"),
        assistant("Up north. "),
        user(" Thanks"),
        assistant(""),
    ]
    messages = [SYSTEM] * FORMATS[name].system + said * 15 + TALK
    ours = make_example(chat, messages)
    monkeypatch.setattr("plaudit.data.templates.MAX_TURNS_LOCATED_ALONE", 10**9)
    expected = make_example(chat, messages)
    assert ours.tokens.tolist() == expected.tokens.tolist()
    assert ours.loss_mask.tolist() == expected.loss_mask.tolist()


def test_the_work_for_a_long_conversation_grows_with_its_length(monkeypatch):
    """A template of its own counts the messages that it renders."""
    rendered = []
    render = ChatTemplate.render
    monkeypatch.setattr(
        ChatTemplate, "render", lambda self, messages, *a, **k: rendered.append(len(messages)) or render(self, messages, *a, **k)
    )
    chat = ChatTemplate(byte_tokenizer(), template("qwen25").text)
    work = []
    for turns in (200, 400):
        rendered.clear()
        assert len(targets(chat, TALK[:2] * turns)) == turns
        work.append(sum(rendered))
    assert work[1] < 2.2 * work[0]
    assert work[1] < 40 * 800


def test_a_long_conversation_that_a_template_rewrites_is_refused(monkeypatch):
    monkeypatch.setattr("plaudit.data.templates.MAX_RENDERED_MESSAGES", 1000)
    thoughtful = [user("Why?"), assistant("<think>\nHm.\n</think>\n\nBecause.")] * 40
    with pytest.raises(DataError, match=r"the conversation is too long.*Split the row, or set data.train_on=last"):
        make_example(template("qwen3"), thoughtful)
    assert len(targets(template("qwen3"), thoughtful, train_on="last")) == 1
