"""From a conversation to token ids and a loss mask, or a reason why not.

Nothing vanishes: what the tokenizer's template cannot render, or what holds nothing to learn, raises
`ChatRejected` with a short stable reason that the caller counts. No torch here: the tokenizer is
passed in. What a conversation is stands in `conversations.py`, offered here as well.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError

from tasks.eagle3.conversations import (
    ConversationRejected,
    Message,
    conversation_id,
    digest,
    has_assistant_turn,
    parse_conversation,
    prompt_digest,
    prompts_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "ChatRejected",
    "ChatTokens",
    "ConversationRejected",
    "Message",
    "conversation_id",
    "has_assistant_turn",
    "parse_conversation",
    "prompt_digest",
    "prompt_tokens",
    "prompts_of",
    "sample_id",
    "show_supervision",
    "tokenize_chat",
]

PINNED_DATE = datetime(2025, 1, 1)
"""Today, for templates that write the date: else tomorrow's run finds none of today's samples."""

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")

TEMPLATE_FAULTS = (TemplateError, TypeError, ValueError, KeyError, AttributeError)
"""What a template raises on turns it was not written for."""


class ChatRejected(ConversationRejected):  # a verdict on data, named as one
    """A conversation cannot be tokenized with this template, or nothing in it is to be learned."""


@dataclass(frozen=True, slots=True)
class ChatTokens:
    """A tokenized conversation of n tokens.

    Attributes:
        input_ids: n ids, ending with the last supervised token: what follows it teaches nothing.
        loss_mask: n flags; true on the assistant's tokens and the end-of-turn token after them.
        truncated: Whether tokens were cut off at `max_tokens`.
        unsupervised_turns: Assistant turns left out of the mask because the template shows them
            differently once others follow (it strips their reasoning, say), so the verifier did not
            write them as they stand.
    """

    input_ids: list[int]
    loss_mask: list[bool]
    truncated: bool
    unsupervised_turns: int = 0


def sample_id(input_ids: Sequence[int]) -> str:
    """Digest of the token ids as little-endian int32."""
    return digest(np.asarray(input_ids, dtype="<i4").tobytes())


def prompt_tokens(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    *,
    template_options: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of the turns and the template's invitation to answer.

    Raises:
        ChatRejected: template_error.
    """
    text = _render(tokenizer, messages, template_options, add_generation_prompt=True)
    return _encode(tokenizer, text)


def tokenize_chat(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    *,
    max_tokens: int,
    template_options: Mapping[str, Any] | None = None,
) -> ChatTokens:
    """Tokenize a conversation with the tokenizer's template; supervise what the assistant wrote.

    The assistant's parts are those the template itself marks ({% generation %}); in a template
    without marks they are found by rendering the conversation up to each turn.

    Args:
        tokenizer: Tokenizer of the verifier.
        messages: Turns, as `parse_conversation` gives them.
        max_tokens: Longer conversations are cut here.
        template_options: Variables of the template, such as {"enable_thinking": False}.

    Raises:
        ChatRejected: no_assistant_turn, template_error, tokens_cross_turns or nothing_supervised.
        ValueError: the tokenizer has no chat template.
    """
    if not has_assistant_turn(messages):
        raise ChatRejected("no_assistant_turn", f"{len(messages)} turns, none by assistant")
    text = _render(tokenizer, messages, template_options)
    if GENERATION_TAG.search(_template(tokenizer)):
        ids, mask = _marked_by_template(tokenizer, messages, template_options)
        unsupervised = 0
    else:
        spans, unsupervised = _assistant_spans(tokenizer, messages, text, template_options)
        ids, mask = _encode_spans(tokenizer, text, spans)
    mask = _end_at_end_of_turn(tokenizer, ids, mask)
    if not any(mask):
        raise ChatRejected(
            "nothing_supervised",
            f"no token of {len(ids)} is the assistant's own in this template "
            f"({unsupervised} assistant turns were left out)",
        )
    length = len(mask) - mask[::-1].index(True)
    ids, mask = ids[:length], mask[:length]
    if not any(mask[:max_tokens]):
        raise ChatRejected(
            "nothing_supervised",
            f"the first supervised token is number {mask.index(True) + 1} and max_tokens is "
            f"{max_tokens}; raise max_tokens to use this conversation",
        )
    return ChatTokens(ids[:max_tokens], mask[:max_tokens], length > max_tokens, unsupervised)


def show_supervision(
    tokenizer: "PreTrainedTokenizerBase",
    input_ids: Sequence[int],
    loss_mask: Iterable[bool],
    *,
    opening: str = "⟦",
    closing: str = "⟧",
) -> str:
    """The decoded tokens with their supervised spans between two marks, for people to read."""
    shown = []
    for supervised, ids in _runs(input_ids, list(loss_mask)):
        text = str(tokenizer.decode(ids))
        shown.append(f"{opening}{text}{closing}" if supervised else text)
    return "".join(shown)


def _template(tokenizer: "PreTrainedTokenizerBase") -> str:
    if not tokenizer.chat_template:
        raise ValueError(
            "the tokenizer has no chat template; put the chat_template.jinja of the served model "
            "into its directory"
        )
    return str(tokenizer.get_chat_template())


def _options(template_options: Mapping[str, Any] | None) -> dict[str, Any]:
    return {"strftime_now": PINNED_DATE.strftime, **(template_options or {})}


def _render(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    template_options: Mapping[str, Any] | None,
    *,
    add_generation_prompt: bool = False,
) -> str:
    _template(tokenizer)
    try:
        text = tokenizer.apply_chat_template(
            list(messages),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **_options(template_options),
        )
    except TEMPLATE_FAULTS as error:
        roles = " ".join(turn["role"] for turn in messages)
        raise ChatRejected("template_error", f"{error} (roles: {roles})") from error
    return str(text)


def _assistant_spans(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    text: str,
    template_options: Mapping[str, Any] | None,
) -> tuple[list[tuple[int, int]], int]:
    """Characters of `text` that are the assistant's, and the number of turns that are not found.

    A turn counts when the text starts with the rendering up to it, with the invitation to answer as
    well as with the answer: only then is what lies between the two what the verifier would write.
    """
    spans = []
    turns = [place for place, turn in enumerate(messages) if turn["role"] == "assistant"]
    for place in turns:
        if place == 0:  # nothing was asked: a verifier is never served this
            continue
        asked = _render(tokenizer, messages[:place], template_options, add_generation_prompt=True)
        answered = _render(tokenizer, messages[: place + 1], template_options)
        if text.startswith(answered) and answered.startswith(asked) and answered != asked:
            spans.append((len(asked), len(answered)))
    return spans, len(turns) - len(spans)


def _encode(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    # The template writes the special tokens itself.
    return [int(i) for i in tokenizer(text, add_special_tokens=False).input_ids]


def _encode_spans(
    tokenizer: "PreTrainedTokenizerBase", text: str, spans: Sequence[tuple[int, int]]
) -> tuple[list[int], list[bool]]:
    """Token ids of the text, and a mask of those that begin within a span."""
    if not tokenizer.is_fast:
        return _encode_pieces(tokenizer, text, spans)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = [
        any(start <= first < stop for start, stop in spans)
        for first, _last in encoded["offset_mapping"]
    ]
    return [int(i) for i in encoded["input_ids"]], mask


def _encode_pieces(
    tokenizer: "PreTrainedTokenizerBase", text: str, spans: Sequence[tuple[int, int]]
) -> tuple[list[int], list[bool]]:
    """The same for a tokenizer without offsets (Kimi's, for one): piece by piece, then compared."""
    ids: list[int] = []
    mask: list[bool] = []
    cursor = 0
    for start, stop in [*spans, (len(text), len(text))]:
        for piece, supervised in ((text[cursor:start], False), (text[start:stop], True)):
            encoded = _encode(tokenizer, piece) if piece else []
            ids.extend(encoded)
            mask.extend([supervised] * len(encoded))
        cursor = stop
    if ids != _encode(tokenizer, text):
        raise ChatRejected(
            "tokens_cross_turns",
            "a token spans the border of a turn and this tokenizer has no offsets",
        )
    return ids, mask


def _marked_by_template(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    template_options: Mapping[str, Any] | None,
) -> tuple[list[int], list[bool]]:
    encoded: Any = tokenizer.apply_chat_template(
        list(messages),
        return_dict=True,
        return_assistant_tokens_mask=True,
        **_options(template_options),
    )
    return [int(i) for i in encoded["input_ids"]], [bool(m) for m in encoded["assistant_masks"]]


def _end_at_end_of_turn(
    tokenizer: "PreTrainedTokenizerBase", ids: Sequence[int], mask: Sequence[bool]
) -> list[bool]:
    """Let each supervised run end with its end-of-turn token.

    Runs found by rendering go on to what the template writes after it (a line break), which the
    verifier never does; runs marked by a template may stop just before it.
    """
    special = set(tokenizer.all_special_ids) | set(getattr(tokenizer, "added_tokens_decoder", {}))
    out = list(mask)
    stop = 0
    for supervised, run in _runs(ids, out.copy()):
        start, stop = stop, stop + len(run)
        if not supervised:
            continue
        last = next((p for p in reversed(range(start, stop)) if ids[p] in special), None)
        if last is None:
            if stop < len(ids) and ids[stop] in special:
                out[stop] = True
        elif not str(tokenizer.decode(list(ids[last + 1 : stop]))).strip():
            out[last + 1 : stop] = [False] * (stop - last - 1)
    return out


def _runs(ids: Sequence[int], mask: Sequence[bool]) -> list[tuple[bool, list[int]]]:
    """Split ids into runs of equal mask."""
    runs: list[tuple[bool, list[int]]] = []
    for token_id, supervised in zip(ids, mask, strict=True):
        if not runs or runs[-1][0] != supervised:
            runs.append((supervised, []))
        runs[-1][1].append(token_id)
    return runs
