"""Chat templates are rendered as transformers renders them."""
# ruff: noqa: E501

import pytest
from transformers import AutoTokenizer

from plaudit.data.rendering import render_chat
from support.paths import REPOSITORY, TESTS

FILES = [*(TESTS / "support/chat_templates").glob("*.jinja"), *(REPOSITORY / "plaudit/data/named_templates").glob("*.jinja")]
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 1 + 2? <b>&amp;</b>"},
    {"role": "assistant", "content": "It is 3.", "reasoning_content": "hm"},
    {"role": "user", "content": "And 4?\n"},
    {"role": "assistant", "content": "<think>\nfour\n</think>\n\n Four. "},
]
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "é <b>", "parameters": {"type": "object", "properties": {}}}}
]
EXPRESSIONS = [
    "{{ messages|map(attribute='role')|join(', ') }}{{ messages|selectattr('role', 'equalto', 'user')|list|length }}",
    "{{ messages[::-1][0].content.strip().split('o')|join('0') }}{{ messages|tojson(indent=2) }}{{ tools|tojson }}",
    "{% for m in messages if m.role == 'user' %}{{ loop.index }}/{{ loop.length }} {{ loop.last }} {{ loop.previtem is defined }}{% endfor %}",
    "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{% continue %}{% endfor %}{{ 'a' ~ 1 ~ none ~ missing }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content|length %}{% endfor %}{{ ns.n }}",
    "{% macro show(m, mark='-') %}{{ mark * 3 }}{{ m.role }}{{ caller() if caller else '' }}{% endmacro %}{{ show(messages[0], mark='=') }}"
    "{% call show(messages[1]) %} called {% endcall %}",
    "{% for k, v in messages[2].items() %}{{ k }}={{ v }};{% endfor %}{{ messages[2].thinking }}{{ '%s %05.2f' % ('a', 2) }}",
    "{{ '{} {x:>4}'.format('a', x=7) }}{{ 'a,b'.replace(',', ';') }}{{ 'ab'|replace('a', 'b')|upper|trim }}{{ 7 // 2 + 7 % 4 - 2 ** 3 }}",
    "{% generation %}{% set inside = 1 %}x{{ inside }}{% endgeneration %}{{ inside is defined }}{{ dict(a=1).a }}{{ range(3)|list }}",
    "{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{{ loop.depth }}{% endfor %}{{ [1, 2]|sum }}",
    "{{ 'text\nmore'|indent(2, true) }}{{ 'x'.ljust(5) }}|{{ 1.5 }}{{ true }}{{ none }}{{ (1, 2) }}{{ {'a': [1]} }}{{ bos_token }}{{ eos_token }}",
    "{% set t %}{{ messages[0].content }}!{% endset %}{{ t|length }}{% filter upper %}{{ t }}{% endfilter %}{{ messages|batch(2)|list|length }}",
    "{% for m in undefined_things %}x{% else %}nothing{% endfor %}{{ messages[99] is defined }}{{ 'b' in 'abc' }}{{ messages|last|attr('x') }}",
    "{{ raise_exception('no') }}",
    "{{ messages[0].content + 1 }}",
    "{% if %}",
]


def rendered(render) -> str:
    try:
        return render()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("template", [*FILES, *EXPRESSIONS], ids=lambda one: one if isinstance(one, str) else one.stem)
def test_the_text_is_that_of_transformers(tiny_model, template):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    text = template if isinstance(template, str) else template.read_text()
    for messages in (MESSAGES, MESSAGES[1:], MESSAGES[:2]):
        for tools in (None, TOOLS):
            for more in (False, True):
                theirs = rendered(
                    lambda m=messages, t=tools, g=more: tokenizer.apply_chat_template(
                        m, tools=t, chat_template=text, add_generation_prompt=g, tokenize=False
                    )
                )
                ours = rendered(lambda m=messages, t=tools, g=more: render_chat(tokenizer, text, m, t, generation_prompt=g))
                assert ours == theirs
