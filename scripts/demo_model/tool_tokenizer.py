"""A tokenizer with 128 ids for tools: printable ASCII one by one, and the pieces of a call as one token each.

Its chat template writes calls of tools as Hermes and Qwen do, and knows every role of OpenAI's messages.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from .tiny_tokenizer import EOS, PAD, UNKNOWN

VOCABULARY_SIZE = 128
PIECES = (
    "<tool_call>",
    "</tool_call>",
    '{"name": "add", "arguments": {"a": ',
    ', "b": ',
    '{"name": "answer", "arguments": {"value": ',
    "}}",
)
_CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))

TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
> {{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{"name": {{ call.function.name | tojson }}, \
"arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor -%}
<eos>
{%- else -%}
{{ {'user': '? ', 'tool': '= '}.get(message.role, '# ') }}{{ message.content }}
{%- endif -%}
{{ '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}> {% endif -%}
"""


@cache
def vocabulary() -> dict[str, int]:
    """Return the id of every token. Every id has a token, so that anything sampled can be decoded."""
    tokens = [PAD, EOS, UNKNOWN, *PIECES, *_CHARACTERS]
    tokens += [f"<unused{i}>" for i in range(VOCABULARY_SIZE - len(tokens))]
    return {token: index for index, token in enumerate(tokens)}


def tool_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer, with its chat template."""
    tokenizer = Tokenizer(models.WordLevel(vocabulary(), unk_token=UNKNOWN))
    pieces = "|".join("".join(f"\\{c}" if not c.isalnum() else c for c in piece) for piece in PIECES)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{pieces}|[\\s\\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE,
    )


def save_tokenizer(directory: Path) -> None:
    """Write the tokenizer files that ``AutoTokenizer.from_pretrained(directory)`` reads."""
    tool_tokenizer().save_pretrained(directory)
