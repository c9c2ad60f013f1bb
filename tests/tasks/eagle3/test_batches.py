"""Packing and batch plans."""

import random

import pytest
import torch
from speculators.models.eagle3 import shift_batch

from tasks.eagle3.batches import TrainingSample, pack, plan_batches


def sample(first: int, length: int) -> TrainingSample:
    rows = torch.arange(first, first + length)
    return TrainingSample(
        input_ids=rows,
        aux=rows[:, None].float().repeat(1, 4),
        last=rows[:, None].float().repeat(1, 2) + 0.5,
        loss_mask=rows % 2 == 0,
    )


def test_a_state_is_paired_with_the_token_after_it_and_that_tokens_target() -> None:
    batch = pack([sample(10, 3), sample(20, 2)])
    assert batch.input_ids.tolist() == [11, 12, 21]
    assert batch.aux[:, 0].tolist() == [10, 11, 20]
    assert batch.last[:, 0].tolist() == [11.5, 12.5, 21.5]
    assert batch.loss_mask.tolist() == [False, True, False]
    assert batch.document_ids.tolist() == [0, 0, 1]
    assert batch.position_ids.tolist() == [1, 2, 1]


def test_packing_aligns_as_speculators_does() -> None:
    one = sample(5, 7)
    theirs = shift_batch(
        {
            "input_ids": one.input_ids,
            "hidden_states": one.aux,
            "verifier_last_hidden_states": one.last,
            "loss_mask": one.loss_mask,
            "lengths": torch.tensor([7]),
            "position_ids": torch.arange(7),
        }
    )
    ours = pack([one])
    assert torch.equal(ours.input_ids, theirs["input_ids"])
    assert torch.equal(ours.aux, theirs["hidden_states"])
    assert torch.equal(ours.last, theirs["verifier_last_hidden_states"])
    assert torch.equal(ours.loss_mask, theirs["loss_mask"])
    assert torch.equal(ours.position_ids, theirs["position_ids"])


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "no samples"),
        ([sample(0, 1)], "sample 0 has 1 token"),
        (
            [TrainingSample(torch.arange(3), torch.ones(2, 4), torch.ones(3, 2), torch.ones(3))],
            "different lengths",
        ),
    ],
)
def test_samples_that_cannot_be_aligned_are_refused(
    samples: list[TrainingSample], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        pack(samples)


def test_every_sample_is_in_one_batch_and_no_batch_exceeds_the_budget() -> None:
    lengths = [(37 * i) % 91 + 10 for i in range(500)]
    batches = plan_batches(lengths, tokens_per_batch=256, seed=0, epoch=0)
    assert sorted(index for batch in batches for index in batch) == list(range(500))
    assert max(sum(lengths[index] for index in batch) for batch in batches) <= 256


def test_batches_are_nearly_full() -> None:
    lengths = [(37 * i) % 91 + 10 for i in range(500)]
    batches = plan_batches(lengths, tokens_per_batch=256, seed=0, epoch=0)
    assert len(batches) <= sum(lengths) / 256 * 1.05


@pytest.mark.parametrize("tokens_per_batch", [4096, 8192])
def test_batches_of_chats_are_97_percent_full(tokens_per_batch: int) -> None:
    # as chats are: half below 400 tokens, a long tail, what is longer than 2,048 cut there
    generator = random.Random(0)
    lengths = [min(2048, max(8, int(generator.lognormvariate(6.0, 0.9)))) for _ in range(3000)]
    assert 0.03 < lengths.count(2048) / len(lengths) < 0.05
    for epoch in range(2):
        batches = plan_batches(lengths, tokens_per_batch=tokens_per_batch, seed=0, epoch=epoch)
        assert sum(lengths) / (len(batches) * tokens_per_batch) >= 0.97


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else() -> None:
    lengths = [10 + i % 17 for i in range(100)]

    def plan(seed: int, epoch: int) -> list[list[int]]:
        return plan_batches(lengths, tokens_per_batch=64, seed=seed, epoch=epoch)

    assert plan(0, 0) == plan(0, 0)
    assert plan(0, 0) != plan(0, 1)
    assert plan(0, 0) != plan(1, 0)


def test_without_shuffling_seed_and_epoch_do_not_matter() -> None:
    lengths = [10, 20, 30, 5]
    plans = [
        plan_batches(lengths, tokens_per_batch=40, seed=s, epoch=s, shuffle=False) for s in (0, 1)
    ]
    # Longest first, each into the fullest batch with room: 30, then 20, 10 to 30, 5 to 20.
    assert plans[0] == plans[1] == [[2, 0], [1, 3]]


def test_a_sample_longer_than_the_budget_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"sample 1 has 65 tokens.*64"):
        plan_batches([3, 65], tokens_per_batch=64, seed=0, epoch=0)
