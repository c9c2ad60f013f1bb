"""What a change of the data or the settings has computed anew in the capture, counted in rows."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from storage.store import Store
from tests.tiny_captures import capture_only, shards_in, tokens_and_masks
from tests.tiny_runs import Values, tiny_values, write_chats

MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{{ message['content'][:9] }}"
    "{% generation %}{{ message['content'][9:] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The verifier's own template, but the first nine letters of an answer are not learned."""


class Captures:
    """Captures on one store; each says how many rows it computed."""

    def __init__(self, values: Values, api: str) -> None:
        self.values, self._api = values, api
        self.store = Store(values["store"])

    def rows_computed(self, **groups: Any) -> int:
        before = shards_in(self.store)
        values = self.values | {n: self.values.get(n, {}) | v for n, v in groups.items()}
        self.samples, self.states = capture_only(values, self._api)
        after = shards_in(self.store)
        assert {path: after[path] for path in before} == before
        return sum(shard.rows for path, shard in after.items() if path not in before)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, prefect_api: str) -> Values:
    values = tiny_values(tmp_path_factory.mktemp("first"))
    values["capture"] = {"rows_per_shard": 8}
    assert Captures(values, prefect_api).rows_computed() == 24
    return values


@pytest.fixture
def captures(first: Values, tmp_path: Path, prefect_api: str) -> Captures:
    """A copy of the store that the first capture has filled, and of the verifier."""
    shutil.copytree(first["store"], tmp_path / "store")
    shutil.copytree(first["verifier"]["model"], tmp_path / "verifier")
    places = {"store": str(tmp_path / "store"), "verifier": {"model": str(tmp_path / "verifier")}}
    return Captures(first | places, prefect_api)


def test_the_same_again_computes_no_row(captures: Captures) -> None:
    assert captures.rows_computed() == 0
    assert captures.states.reused


def test_of_new_conversations_the_new_alone_are_computed(
    captures: Captures, tmp_path: Path
) -> None:
    more = write_chats(tmp_path / "more.jsonl", [3, 3, *range(100, 105)])  # 3 was there before
    sources = [*captures.values["data"]["sources"], str(more)]

    assert captures.rows_computed(data={"sources": sources}) == 5
    assert captures.states.rows == 24 + 5
    assert captures.rows_computed(data={"sources": [str(more)]}) == 0


def test_a_template_that_masks_otherwise_computes_no_row(captures: Captures) -> None:
    captures.rows_computed()
    before = tokens_and_masks(captures.store, captures.samples)
    Path(captures.values["verifier"]["model"], "chat_template.jinja").write_text(MARKED)

    assert captures.rows_computed() == 0

    after = tokens_and_masks(captures.store, captures.samples)
    assert after.keys() == before.keys()  # the same token ids
    assert all(sum(after[i][1]) < sum(before[i][1]) for i in before)
    assert len(captures.store.directories("samples")) == 2
    assert len(captures.store.directories("states")) == 1


def test_a_lost_shard_is_computed_again_with_the_same_rows(captures: Captures) -> None:
    path, shard = sorted(shards_in(captures.store).items())[1]
    captures.store.delete(path)

    assert captures.rows_computed() == 8
    assert shards_in(captures.store)[path].content == shard.content


def test_other_weights_compute_every_row(captures: Captures) -> None:
    file = Path(captures.values["verifier"]["model"], "model.safetensors")
    content = bytearray(file.read_bytes())
    content[-2] ^= 1  # a bit of the last weight's mantissa
    file.write_bytes(content)

    assert captures.rows_computed() == 24
    assert len(captures.store.directories("states")) == 2
