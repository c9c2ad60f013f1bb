"""Conversations: records of the common chat data formats, read into one shape.

A record is rejected, with a reason, rather than bent: a turn that is dropped or filled in is text
the verifier never saw. Formats: `messages` (role, content), `conversations` (ShareGPT: from,
value), and a prompt, with its response or without, under one of several names.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, str]
"""One turn: {"role": ..., "content": ...}."""

TURN_LIST_KEYS = ("messages", "conversations", "conversation")
PROMPT_KEYS = ("prompt", "question", "instruction")
RESPONSE_KEYS = ("response", "completion", "answer", "output")

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
"""Names of roles in the wild -> the names chat templates know."""

BLANK_ALLOWED = ("system", "tool")
"""An empty system prompt is a choice, an empty result of a tool a result."""

UNCARRIED = ("tool_calls", "function_call", "reasoning_content")
"""Keys of a turn that hold what the verifier wrote outside its content."""


class ConversationRejected(ValueError):  # noqa: N818  a verdict on data, not a fault
    """A conversation cannot be used; `reason` is a stable code to count, `detail` is for people."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


def parse_conversation(record: Any) -> list[Message]:
    """Turns of a record, each {"role": system | user | assistant | tool, "content": text}.

    A record may end with a question: `has_assistant_turn` says whether there is an answer.

    Raises:
        ConversationRejected: not_a_record, no_messages, empty, bad_turn, unknown_role,
            null_content, non_text_content, empty_content, no_prompt (nothing is asked before the
            last answer), or one of tool_calls, function_call and reasoning_content.
    """
    if not isinstance(record, Mapping):
        raise ConversationRejected("not_a_record", f"expected an object, got {_kind(record)}")
    turns = _turns_of(record)
    if not turns:
        raise ConversationRejected("empty", "the list of turns is empty")
    messages = [_message(turn, place) for place, turn in enumerate(turns)]
    if all(message["role"] == "system" for message in prompts_of(messages)):
        raise ConversationRejected("no_prompt", "nothing is asked before the last answer")
    return messages


def has_assistant_turn(messages: Sequence[Message]) -> bool:
    """Whether there is an answer to learn from."""
    return any(turn["role"] == "assistant" for turn in messages)


def prompts_of(messages: Sequence[Message]) -> list[Message]:
    """The turns before the last answer, or all when there is none: what to ask a verifier."""
    answers = [place for place, turn in enumerate(messages) if turn["role"] == "assistant"]
    return [dict(turn) for turn in messages[: answers[-1] if answers else None]]


def conversation_id(messages: Sequence[Message]) -> str:
    """Digest of the turns; how the source record spelt them does not matter."""
    return digest(_canonical([[turn["role"], turn["content"]] for turn in messages]))


def prompt_digest(messages: Sequence[Message]) -> str:
    """Digest of what is asked before the first answer, whatever its spacing and case.

    Conversations that open alike share it, so that a split can keep them together; a system prompt
    does not tell them apart.
    """
    asked = []
    for turn in messages:
        if turn["role"] == "assistant":
            break
        if turn["role"] != "system":
            asked.append(" ".join(turn["content"].split()).casefold())
    return digest(_canonical(asked))


def digest(data: bytes) -> str:
    """First 24 hex digits of the sha256."""
    return hashlib.sha256(data).hexdigest()[:24]


def _canonical(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _turns_of(record: Mapping[str, Any]) -> Sequence[Any]:
    """The turns of a record as they stand, whatever its format."""
    for key in TURN_LIST_KEYS:
        if record.get(key) is not None:
            if not isinstance(record[key], list | tuple):
                raise ConversationRejected("bad_turn", f"{key} is {_kind(record[key])}, not a list")
            turns: Sequence[Any] = record[key]
            return turns
    prompt, response = _first(record, *PROMPT_KEYS), _first(record, *RESPONSE_KEYS)
    if prompt is None:
        raise ConversationRejected(
            "no_messages",
            f"found none of {', '.join((*TURN_LIST_KEYS, *PROMPT_KEYS))} among the keys "
            f"{', '.join(sorted(map(str, record)))}",
        )
    if isinstance(prompt, str) and record.get("instruction") == prompt and record.get("input"):
        prompt = f"{prompt}\n\n{record['input']}"
    return [
        *_as_turns(record.get("system") or None, "system"),
        *_as_turns(prompt, "user"),
        *_as_turns(response, "assistant"),
    ]


def _as_turns(value: Any, role: str) -> Sequence[Any]:
    """A prompt or response is nothing, a list of turns, or the content of one turn."""
    if value is None:
        return []
    return value if isinstance(value, list | tuple) else [{"role": role, "content": value}]


def _message(turn: Any, place: int) -> Message:
    if not isinstance(turn, Mapping):
        raise ConversationRejected("bad_turn", f"turn {place} is {_kind(turn)}, not an object")
    name = _first(turn, "role", "from")
    role = ROLES.get(name.strip().lower()) if isinstance(name, str) else None
    if role is None:
        known = ", ".join(ROLES)
        raise ConversationRejected(
            "unknown_role", f"turn {place} has role {name!r}; known: {known}"
        )
    for key in UNCARRIED:
        if turn.get(key):
            raise ConversationRejected(
                key, f"turn {place} has {key}; write it into the content, as the template does"
            )
    content = _text(_first(turn, "content", "value"), place)
    if not content.strip() and role not in BLANK_ALLOWED:
        raise ConversationRejected("empty_content", f"turn {place} ({role}) has no text")
    return {"role": role, "content": content}


def _text(content: Any, place: int) -> str:
    """Content is text, or a list of text parts to be joined."""
    if content is None:
        raise ConversationRejected("null_content", f"turn {place} has no content")
    texts: list[str] = []
    for part in content if isinstance(content, list | tuple) else [content]:
        is_text = not isinstance(part, Mapping) or part.get("type", "text") == "text"
        text = part.get("text") if isinstance(part, Mapping) else part
        if not is_text or not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else _kind(part)
            raise ConversationRejected("non_text_content", f"turn {place} holds {kind}, not text")
        try:
            text.encode()
        except UnicodeEncodeError as error:  # half of a surrogate pair, which no file can hold
            raise ConversationRejected("bad_unicode", f"turn {place}: {error.reason}") from error
        texts.append(text)
    return "".join(texts)


def _first(record: Mapping[str, Any], *keys: str) -> Any:
    """The first of the keys that has a value: a table gives every column to every row."""
    return next((record[key] for key in keys if record.get(key) is not None), None)


def _kind(value: Any) -> str:
    return type(value).__name__
