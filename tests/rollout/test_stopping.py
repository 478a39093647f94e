"""Where a response ends."""

from transformers import AutoTokenizer

from plaudit.rollout.stopping import Stopping


def test_the_end_is_the_first_end_token_or_the_end_of_the_first_stop_string(tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    end = tokenizer.eos_token_id
    stopping = Stopping(tokenizer, frozenset([end]), ("7 + 8",))
    words = tokenizer.encode("1 + 2 = 3, then 7 + 8 = 15", add_special_tokens=False)
    stop = stopping.end_of(words)
    assert stop is not None
    assert "7 + 8" in stopping.decode(words[: stop + 1])
    assert "7 + 8" not in stopping.decode(words[:stop])
    assert stopping.end_of([*words[:2], end, *words]) == 2
    assert stopping.end_of(words[:stop]) is None
    assert Stopping(None, frozenset([end]), ()).end_of([*words, end]) == len(words)
