"""What a model reads of a conversation with two calls of a tool, token by token.

``python -m tests.unit.data.families.transcript`` writes golden/ anew, one file a family. A token is its id
and its text; a line ends after a token with a line break.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from nemo_like.data.interface import Message
from nemo_like.data.template_turns import TurnError, check_role
from nemo_like.data.tokenizer import Tokenizer
from tests.unit.data.families.families import ADD, FAMILIES, HERE, QUESTION, RESULTS, SYSTEM, Family

GOLDEN = HERE / "golden"
_WIDTH = 100


def transcript(family: Family, directory: Path) -> str:
    """Return the golden text of a family, whose checkpoint is made in ``directory``."""
    family.save(directory)
    return "\n".join(_lines(family, Tokenizer(directory)))


def _lines(family: Family, tokenizer: Tokenizer) -> Iterator[str]:
    system = (Message("system", SYSTEM),) if family.system else ()
    prompt = (*system, Message("user", QUESTION))
    ends = [tokenizer.token(end) for end in tokenizer.end_token_ids]
    yield f"a response ends with: {' '.join(ends)}"
    for role in ("user", "tool", "system"):
        try:
            check_role(tokenizer.render, role)
        except TurnError as error:
            yield f"no observation as {role}: the chat template {error}"
    tokens = tokenizer.encode_prompt(prompt, [ADD])
    yield from _part("prompt", tokens, tokenizer)
    usual = tokenizer.encode_text(_usual_end(family))[0]
    for number, response in enumerate(family.responses):
        said = tokenizer.encode_after(response, tokens[-1])
        yield from _part(f"response {number + 1}", said, tokenizer)
        tokens += [*said, usual]
        if number == len(RESULTS):
            break
        known: dict[tuple[int, ...], list[str]] = {}
        for end in (*tokenizer.end_token_ids, said[-1]):
            observed = tokenizer.encode_observation(prompt, RESULTS[number], family.role, end)
            known.setdefault(tuple(observed), []).append(_shown(end, tokenizer))
        for observed_ids, after in known.items():
            yield from _part(
                f"observation as {family.role} after {' or '.join(after)}", observed_ids, tokenizer
            )
        tokens += tokenizer.encode_observation(prompt, RESULTS[number], family.role, usual)
    yield from _comparison(family, prompt, tokens, tokenizer)


def _usual_end(family: Family) -> str:
    """Return the token with which the family's calls of tools end."""
    return family.called_by or family.eos


def _comparison(
    family: Family, prompt: Sequence[Message], tokens: Sequence[int], tokenizer: Tokenizer
) -> Iterator[str]:
    """Yield how the tokens compare with the chat template's rendering of the whole conversation."""
    first, second, _ = family.responses
    said = (
        *prompt,
        *(Message("assistant", first), Message(family.role, RESULTS[0])),
        *(Message("assistant", second), Message(family.role, RESULTS[1])),
    )
    yield "== the same conversation, rendered as a whole"
    try:
        whole = tokenizer.encode_prompt(said, [ADD])
    except Exception as error:
        yield str(error)
        return
    last = len(tokens) - len(tokenizer.encode_after(family.responses[2], whole[-1])) - 1
    ours = list(tokens[:last])
    if ours == whole:
        yield "the same tokens"
        return
    place = next(
        (place for place, pair in enumerate(zip(ours, whole, strict=False)) if pair[0] != pair[1]),
        min(len(ours), len(whole)),
    )
    yield f"other tokens from the {place + 1}th on"
    yield from _part("of the turns", ours[place:], tokenizer)
    yield from _part("of the whole", whole[place:], tokenizer)


def _part(title: str, tokens: Sequence[int], tokenizer: Tokenizer) -> Iterator[str]:
    yield f"== {title}"
    line = ""
    for token, text in zip(tokens, tokenizer.token_texts(list(tokens)), strict=True):
        one = f"{token}:{_shown(token, tokenizer)}"
        if line and len(line) + len(one) >= _WIDTH:
            yield line
            line = ""
        line += f" {one}" if line else one
        if "\n" in text:
            yield line
            line = ""
    if line:
        yield line


def _shown(token: int, tokenizer: Tokenizer) -> str:
    return json.dumps(tokenizer.token_texts([token])[0], ensure_ascii=False)[1:-1]


def main() -> None:
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as directory:
            text = transcript(family, Path(directory))
        (GOLDEN / f"{family.name}.txt").write_text(text + "\n", encoding="utf-8")
        print(family.name, len(text))


if __name__ == "__main__":
    main()
