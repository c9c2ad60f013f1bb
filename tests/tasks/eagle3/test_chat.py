"""The mask marks what the verifier would write, no more and no less."""

import hashlib
import struct
from typing import Any

import pytest
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from tasks.eagle3.chat import (
    ChatRejected,
    prompt_tokens,
    sample_id,
    show_supervision,
    tokenize_chat,
)
from tests.tiny_models import CHAT_TEMPLATE, make_tokenizer

TALK = [
    {"role": "user", "content": "the first"},
    {"role": "assistant", "content": "one"},
    {"role": "user", "content": "another"},
    {"role": "assistant", "content": "two\nthree"},
]
HEAD = "{{ '<|im_start|>' + message['role'] + '\n' }}"
TAIL = "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
TAGGED = (
    "{% for message in messages %}" + HEAD + "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + END }}{% endgeneration %}{{ REST }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}" + TAIL
)
THINKING = (  # shows the reasoning of the last turn only, as Qwen3 and DeepSeek do
    "{% for message in messages %}" + HEAD + "{% if loop.last or message['role'] == 'user' %}"
    "{{ message['content'] }}{% else %}{{ message['content'].split('</think>')[-1] }}{% endif %}"
    "{{ '<|im_end|>\n' }}" + TAIL
)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


def shown(tokenizer: Any, messages: list[dict[str, str]], *, max_tokens: int = 999) -> str:
    chat = tokenize_chat(tokenizer, messages, max_tokens=max_tokens)
    return show_supervision(tokenizer, chat.input_ids, chat.loss_mask)


EXPECTED = (
    "<|im_start|>user\nthe first<|im_end|>\n<|im_start|>assistant\n⟦one<|im_end|>⟧\n"
    "<|im_start|>user\nanother<|im_end|>\n<|im_start|>assistant\n⟦two\nthree<|im_end|>⟧"
)


def test_answers_and_their_end_of_turn_are_supervised(tokenizer: PreTrainedTokenizerFast) -> None:
    assert shown(tokenizer, TALK) == EXPECTED


@pytest.mark.parametrize("inside", ["<|im_end|>\n", "<|im_end|>", ""])
def test_the_templates_own_marks_give_the_same_mask(
    tokenizer: PreTrainedTokenizerFast, inside: str
) -> None:
    rest = "<|im_end|>\n"[len(inside) :]
    template = TAGGED.replace("END", repr(inside)).replace("REST", repr(rest))
    tokenizer.chat_template = template
    assert shown(tokenizer, TALK) == EXPECTED


def test_token_ids_are_those_of_the_template_up_to_the_last_answer(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    chat = tokenize_chat(tokenizer, TALK, max_tokens=999)
    whole = tokenizer.apply_chat_template(TALK, return_dict=True)["input_ids"]
    assert [*chat.input_ids, *tokenizer.encode("\n")] == whole
    question = [*TALK, {"role": "user", "content": "and then?"}]
    assert tokenize_chat(tokenizer, question, max_tokens=999).input_ids == chat.input_ids


def test_the_prompt_is_what_the_answer_follows(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = tokenize_chat(tokenizer, TALK[:2], max_tokens=999)
    prompt = prompt_tokens(tokenizer, TALK[:1])
    assert chat.input_ids[: len(prompt)] == prompt
    assert chat.loss_mask == [False] * len(prompt) + [True] * (len(chat.input_ids) - len(prompt))


def test_a_default_system_prompt_of_the_template_is_not_supervised(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    default = "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe.<|im_end|>\n' }}"
    tokenizer.chat_template = default + "{% endif %}" + CHAT_TEMPLATE
    assert shown(tokenizer, TALK) == "<|im_start|>system\nBe.<|im_end|>\n" + EXPECTED


def test_turns_that_the_template_rewrites_are_left_out_and_counted(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer.chat_template = THINKING
    answers = ["<think>a</think>one", "<think>b</think>two"]
    talk = [{**turn, "content": answers.pop(0)} if i % 2 else turn for i, turn in enumerate(TALK)]
    chat = tokenize_chat(tokenizer, talk, max_tokens=999)
    assert chat.unsupervised_turns == 1
    assert show_supervision(tokenizer, chat.input_ids, chat.loss_mask).endswith(
        "assistant\none<|im_end|>\n<|im_start|>user\nanother<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>b</think>two<|im_end|>⟧"
    )


def test_an_answer_that_nothing_asked_for_is_left_out(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = tokenize_chat(tokenizer, [TALK[1], *TALK], max_tokens=999)
    assert chat.unsupervised_turns == 1
    assert sum(chat.loss_mask) == sum(tokenize_chat(tokenizer, TALK, max_tokens=999).loss_mask)


def test_a_cut_conversation_says_so(tokenizer: PreTrainedTokenizerFast) -> None:
    whole = tokenize_chat(tokenizer, TALK, max_tokens=999)
    length = len(whole.input_ids)
    assert not whole.truncated
    assert not tokenize_chat(tokenizer, TALK, max_tokens=length).truncated
    cut = tokenize_chat(tokenizer, TALK, max_tokens=length - 1)
    assert cut.truncated
    assert cut.input_ids == whole.input_ids[:-1]
    assert cut.loss_mask == whole.loss_mask[:-1]


def test_a_template_that_writes_the_date_gives_the_same_tokens_tomorrow(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}" + CHAT_TEMPLATE
    assert shown(tokenizer, TALK) == "01 Jan 2025" + EXPECTED


def test_options_reach_the_template(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = "{% if enable_thinking %}hm{% endif %}" + CHAT_TEMPLATE
    options = {"enable_thinking": True}
    plain = prompt_tokens(tokenizer, TALK[:1])
    assert prompt_tokens(tokenizer, TALK[:1], template_options=options) == [
        *tokenizer.encode("hm"),
        *plain,
    ]
    chat = tokenize_chat(tokenizer, TALK, max_tokens=999, template_options=options)
    assert tokenizer.decode(chat.input_ids).startswith("hm<|im_start|>")


@pytest.mark.parametrize(
    ("template", "messages", "max_tokens", "message"),
    [
        (CHAT_TEMPLATE, TALK[:1], 99, "no_assistant_turn: 1 turns, none by assistant"),
        (
            "{{ raise_exception('roles must alternate') }}",
            TALK,
            99,
            "template_error: roles must alternate (roles: user assistant user assistant)",
        ),
        ("{{ messages[9].content }}", TALK, 99, "template_error: "),
        ("hello", TALK, 99, "nothing_supervised: no token of 4 is the assistant's own"),
        (CHAT_TEMPLATE, TALK, 5, "max_tokens is 5; raise max_tokens"),
        (CHAT_TEMPLATE, TALK[1:2], 99, "(1 assistant turns were left out)"),
    ],
)
def test_what_cannot_be_learned_from_is_rejected_with_a_reason(
    tokenizer: PreTrainedTokenizerFast,
    template: str,
    messages: list[dict[str, str]],
    max_tokens: int,
    message: str,
) -> None:
    tokenizer.chat_template = template
    with pytest.raises(ChatRejected) as caught:
        tokenize_chat(tokenizer, messages, max_tokens=max_tokens)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{caught.value.reason}: ")


def test_a_tokenizer_without_a_template_is_an_error_of_the_verifier(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template; put the chat_template") as caught:
        tokenize_chat(tokenizer, TALK, max_tokens=99)
    assert not isinstance(caught.value, ChatRejected)


class Words(PreTrainedTokenizer):
    """A tokenizer in Python, without offsets: words and single spaces are tokens."""

    def __init__(self) -> None:
        self.words = ["<pad>", "<end>"]
        super().__init__(pad_token="<pad>", eos_token="<end>")

    @property
    def vocab_size(self) -> int:
        return len(self.words)

    def get_vocab(self) -> dict[str, int]:
        return {word: token_id for token_id, word in enumerate(self.words)}

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        pieces = text.replace(" ", "\0 \0").split("\0")
        return [piece for piece in pieces if piece]

    def _convert_token_to_id(self, token: str) -> int:
        if token not in self.words:
            self.words.append(token)
        return self.words.index(token)

    def _convert_id_to_token(self, index: int) -> str:
        return self.words[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)


def spoken(separator: str) -> str:
    return (
        "{% for m in messages %}{{ m.role + ':" + separator + "' + m.content + '<end>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'assistant:" + separator + "' }}{% endif %}"
    )


def test_a_tokenizer_without_offsets_gives_the_same_kind_of_mask() -> None:
    tokenizer = Words()
    tokenizer.chat_template = spoken(" ")
    chat = tokenize_chat(tokenizer, TALK[:2], max_tokens=99)
    words = [tokenizer.words[i] for i in chat.input_ids]
    assert words == ["user:", " ", "the", " ", "first", "<end>", "assistant:", " ", "one", "<end>"]
    assert chat.loss_mask == [False] * 8 + [True] * 2


def test_a_token_across_the_border_of_a_turn_is_rejected_without_offsets() -> None:
    tokenizer = Words()
    tokenizer.chat_template = spoken("")  # "assistant:one" is one word
    with pytest.raises(ChatRejected, match="tokens_cross_turns"):
        tokenize_chat(tokenizer, TALK[:2], max_tokens=99)


def test_a_sample_id_is_the_digest_of_its_tokens() -> None:
    expected = hashlib.sha256(struct.pack("<3i", 1, 2, 70000)).hexdigest()[:24]
    assert sample_id([1, 2, 70000]) == expected
    assert sample_id([1, 2]) != sample_id([2, 1])
