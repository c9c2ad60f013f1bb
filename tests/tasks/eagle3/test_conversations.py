"""Every record becomes turns, or a reason why it cannot."""

from typing import Any

import pytest

from tasks.eagle3.conversations import (
    ConversationRejected,
    conversation_id,
    has_assistant_turn,
    parse_conversation,
    prompt_digest,
    prompts_of,
)

HI = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": HI},
        {"messages": [{"role": "User", "content": "hi"}, {"role": "model", "content": "hello"}]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
        {"conversations": HI, "messages": None},
        {"prompt": "hi", "response": "hello"},
        {"prompt": "hi", "completion": "hello"},
        {"question": "hi", "answer": "hello"},
        {"instruction": "hi", "input": "", "output": "hello"},
        {"prompt": HI[:1], "completion": HI[1:]},
        # a table gives every turn every column
        {"messages": [{**turn, "from": None, "value": None, "tool_calls": None} for turn in HI]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "h"}, {"text": "i"}]},
                {"role": "assistant", "content": ["hel", "lo"]},
            ]
        },
    ],
)
def test_the_common_formats_give_the_same_turns(record: dict[str, Any]) -> None:
    assert parse_conversation(record) == HI


def test_system_prompt_instruction_input_and_tool_results_are_kept() -> None:
    record = {"system": "be brief", "instruction": "Add.", "input": "1 2", "output": "3"}
    assert parse_conversation(record) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "Add.\n\n1 2"},
        {"role": "assistant", "content": "3"},
    ]
    turns = [("system", ""), ("human", "sum?"), ("observation", ""), ("gpt", "3")]
    parsed = parse_conversation({"conversations": [{"from": r, "value": v} for r, v in turns]})
    assert [turn["role"] for turn in parsed] == ["system", "user", "tool", "assistant"]
    assert parsed[0]["content"] == ""


def test_a_question_without_an_answer_is_a_conversation_too() -> None:
    parsed = parse_conversation({"prompt": "hi"})
    assert parsed == HI[:1]
    assert not has_assistant_turn(parsed)
    assert has_assistant_turn(HI)


def user(**turn: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}, turn]}


@pytest.mark.parametrize(
    ("record", "reason", "detail"),
    [
        ("text", "not_a_record", "expected an object, got str"),
        ({"text": "hi", "id": 3}, "no_messages", "among the keys id, text"),
        ({"response": "hello"}, "no_messages", "found none of messages"),
        ({"messages": []}, "empty", "the list of turns is empty"),
        ({"messages": "hi"}, "bad_turn", "messages is str, not a list"),
        ({"messages": ["hi"]}, "bad_turn", "turn 0 is str"),
        (user(role="narrator", content="x"), "unknown_role", "turn 1 has role 'narrator'"),
        (user(content="x"), "unknown_role", "turn 1 has role None"),
        (user(role="assistant", content=None), "null_content", "turn 1 has no content"),
        (user(role="assistant", content=" \n"), "empty_content", "turn 1 (assistant) has no text"),
        (user(role="assistant", content=7), "non_text_content", "turn 1 holds int"),
        (user(role="user", content=[{"type": "image"}]), "non_text_content", "holds image"),
        (
            user(role="assistant", content="x", tool_calls=[{}]),
            "tool_calls",
            "turn 1 has tool_calls",
        ),
        (user(role="gpt", content="x", reasoning_content="hm"), "reasoning_content", "the content"),
        ({"messages": HI[1:]}, "no_prompt", "nothing is asked"),
        ({"prompt": " ", "response": "x"}, "empty_content", "turn 0 (user)"),
    ],
)
def test_what_cannot_be_used_is_rejected_with_a_reason(
    record: Any, reason: str, detail: str
) -> None:
    with pytest.raises(ConversationRejected) as caught:
        parse_conversation(record)
    assert caught.value.reason == reason
    assert detail in caught.value.detail


def test_the_prompt_is_all_before_the_last_answer() -> None:
    again = [*HI, {"role": "user", "content": "more"}]
    answered = [*again, {"role": "assistant", "content": "no"}]
    trailing = [*answered, {"role": "user", "content": "why"}]
    assert prompts_of(answered) == again
    assert prompts_of(trailing) == again
    assert prompts_of(HI[:1]) == HI[:1]


def test_ids_depend_on_roles_and_text_alone() -> None:
    turned = [{"content": turn["content"], "role": turn["role"]} for turn in HI]
    assert conversation_id(turned) == conversation_id(HI)
    assert len(conversation_id(HI)) == 24
    others = [HI[:1], [HI[0], {"role": "assistant", "content": "hello "}], HI[::-1]]
    assert len({conversation_id(messages) for messages in [HI, *others]}) == 4


def test_conversations_that_open_alike_share_a_prompt_digest() -> None:
    def opening(question: str, answer: str, system: str = "") -> str:
        return prompt_digest(
            [
                {"role": "system", "content": system},
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
                {"role": "user", "content": answer},
            ]
        )

    assert opening("What is  rain?", "water") == opening("what is rain?\n", "it", "be brief")
    assert opening("What is rain?", "water") != opening("What is snow?", "water")
