import torch

from tasks.engines.generation import cut_after_eos, greedy_generate
from tests.tiny_models import EOS_ID


def greedy_by_hand(model, prompt: list[int], new_tokens: int) -> list[int]:
    ids = list(prompt)
    for _ in range(new_tokens):
        with torch.inference_mode():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == EOS_ID:
            break
    return ids[len(prompt) :]


def test_greedy_continuations_are_the_argmax_of_each_step_whatever_the_models_settings(
    model, samples
):
    model.generation_config.repetition_penalty = 1.7
    prompts = [sample[:9] for sample in samples]
    done: list[int] = []

    written = greedy_generate(
        model,
        prompts,
        max_new_tokens=12,
        eos_token_ids=[EOS_ID],
        pad_token_id=EOS_ID,
        batch_size=4,
        progress=done.append,
    )

    assert written == [greedy_by_hand(model, prompt, 12) for prompt in prompts]
    assert model.generation_config.repetition_penalty == 1.7
    assert done == sorted(done)
    assert (done[0], done[-1]) == (4, 12 * len(prompts))


def test_a_continuation_ends_with_the_end_token():
    assert cut_after_eos([4, 2, 2, 7], [2, 9]) == [4, 2]
    assert cut_after_eos([4, 5], [2]) == [4, 5]
