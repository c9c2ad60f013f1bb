"""The first step of a training on a GPU before its weights are there: kernels are compiled while these are read.

D = draft vocabulary, H = hidden size.
"""

import copy
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from tasks.eagle3.batch_fit import made_up_samples
from tasks.eagle3.batches import pack
from tasks.eagle3.draft import Eagle3SpeculatorConfig, build_draft, trainable_shapes
from tasks.eagle3.head_transform import HeadTransform
from tasks.eagle3.training_settings import TrainSettings
from tasks.eagle3.training_step import Precision, plan_batch, training_forward

logger = logging.getLogger(__name__)

TOKENS = 90
"""Of the batch: no multiple of 16, for which Triton compiles a kernel of its own."""


class Rehearsal:
    """Runs `step`, such as `rehearse` with its arguments, in a thread; nothing where `device` is no GPU."""

    def __init__(self, step: Callable[[], None], device: torch.device) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rehearsal")
        self._step = self._thread.submit(_on_gpu, step, device) if device.type == "cuda" else None

    def wait(self) -> None:
        """Wait for its end; what went wrong is logged: the training's own first step says it better."""
        error = None if self._step is None else self._step.exception()
        if error is not None:
            logger.info("kernels are compiled at the first step: %s", error)
        self._thread.shutdown()


def _on_gpu(step: Callable[[], None], device: torch.device) -> None:
    with torch.cuda.device(device):  # a thread's own is the first
        step()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # all is free for the training


def rehearse(
    config: Eagle3SpeculatorConfig,
    settings: TrainSettings,
    *,
    precision: Precision,
    transform: HeadTransform,
    device: torch.device,
) -> None:
    """Compute a step, forward and backward, on made-up rows; no random state is touched."""
    config = copy.deepcopy(config)
    layer = config.transformer_layer_config
    layer.vocab_size = count = config.draft_vocab_size  # no kernel knows the verifier's
    table = torch.zeros(count, layer.hidden_size, dtype=torch.bfloat16)  # [D, H]
    shapes = trainable_shapes(config)
    draft = build_draft(
        config,
        embed=table,
        norm=torch.ones(layer.hidden_size),
        head=table,
        t2d=torch.ones(count, dtype=torch.bool),
        d2t=torch.zeros(count, dtype=torch.long),
        seed=0,
        device=device,
        tables=torch.device("cpu"),
        weights={name: torch.zeros(shape, device=device) for name, shape in shapes.items()},
    )
    samples = made_up_samples(draft, tokens=TOKENS, longest=TOKENS)[:1]
    batch = pack(samples)
    steps = settings.ttt_steps
    plan = plan_batch(draft, batch, ttt_steps=steps, precision=precision)
    result = training_forward(
        draft,
        batch.to(device),
        plan=plan,
        ttt_steps=steps,
        loss=settings.loss,
        precision=precision,
        transform=transform,
    )
    result.loss.backward()  # type: ignore[no-untyped-call]
