"""The transformers engine: captures a verifier's states, in child processes, never in the flow's.

B = batch, S = longest sequence of the batch, T = tokens of the batch without padding, n = tokens of
one sample, A = captured layers, H = verifier hidden size.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tasks.eagle3.hidden_states import StateHooks, find_decoder, rope_switch
from tasks.eagle3.verifier import check_layer_ids
from tasks.engines.copies import Copying, make_room, send

logger = logging.getLogger(__name__)

ProgressCallback = Callable[[int], None]


class CaptureMemoryError(RuntimeError):
    """One sample alone does not fit the device's memory."""


class CapturedStates(NamedTuple):
    """States on the CPU, of one sample or of many side by side; n = tokens of all of them."""

    aux: Tensor
    """[n, A * H], layers in ascending order."""
    last: Tensor
    """[n, H], before the final norm."""

    def split(self, lengths: Sequence[int]) -> list["CapturedStates"]:
        """Return the states of each of the samples that follow each other here, without a copy."""
        aux, last = (part.split_with_sizes(list(lengths)) for part in self)
        parts = zip(aux, last, strict=True)
        return [CapturedStates(aux, last) for aux, last in parts]

    def of(self, chosen: Sequence[int], lengths: Sequence[int]) -> "CapturedStates":
        """Return a copy of the states of some samples, of all of which the lengths are given."""
        samples = self.split(lengths)
        parts = [CapturedStates(self.aux[:0], self.last[:0]), *(samples[i] for i in chosen)]
        return CapturedStates(*(torch.cat(part) for part in zip(*parts, strict=True)))


class CaptureEngine:
    """Captures the states of many samples: base model only, so no logits are ever computed."""

    def __init__(
        self,
        model: nn.Module,
        layer_ids: Sequence[int],
        *,
        store_dtype: torch.dtype = torch.bfloat16,
        compiled: bool = False,
    ) -> None:
        """`compiled` captures through torch.compile, a layer at a time, of a model on one device."""
        self._decoder = find_decoder(model)
        check_layer_ids(layer_ids, len(self._decoder.layers))
        self._hooks = StateHooks(model, layer_ids)
        self._layer_ids = tuple(layer_ids)
        self._store_dtype = store_dtype
        self._device = next(model.parameters()).device
        self._apart_above = rope_switch(self._decoder.base.config)
        self._largest_batch: int | None = None
        self._compiled: dict[nn.Module, Any] = {}
        if compiled:
            # not layer.compile(): that would take our hooks in
            self._compiled = {
                layer: torch.compile(layer.forward, dynamic=True) for layer in self._decoder.layers
            }

    def capture(
        self,
        samples: Sequence[Sequence[int]],
        *,
        tokens_per_batch: int,
        progress: ProgressCallback | None = None,
    ) -> CapturedStates:
        """As `start`, and wait for the states."""
        return self.start(samples, tokens_per_batch=tokens_per_batch, progress=progress)()

    def start(
        self,
        samples: Sequence[Sequence[int]],
        *,
        tokens_per_batch: int,
        progress: ProgressCallback | None = None,
    ) -> Callable[[], CapturedStates]:
        """Queue the passes of all samples; returns what waits for the last of them.

        That gives the states of all samples side by side, in the order given. A GPU computes meanwhile, and need not
        wait for who checks and writes them. Batches hold samples of like length, `tokens_per_batch` padded tokens at
        most (a longer sample runs alone). After a batch that does not fit the memory all batches are half as large, in
        later calls too. `progress` gets the count of tokens done so far. Raises ValueError for an empty sample and for
        none at all, CaptureMemoryError when one sample alone does not fit.
        """
        starts = [0, *accumulate(len(sample) for sample in samples)]
        if not samples:
            raise ValueError("there are no samples to capture; give one at least")
        states: CapturedStates | None = None
        done = 0
        copying: Copying | None = None

        def wait_for_copies() -> None:
            nonlocal done, copying
            if copying is None:
                return
            done, copying = done + copying.wait(), None
            if progress is not None:
                progress(done)

        with torch.inference_mode(), self._hooks, self._layers_compiled():
            for batch in self._run_all(samples, tokens_per_batch):
                states = states or CapturedStates(
                    *(make_room(part, starts[-1]) for part in batch.states)
                )
                places = [starts[i] for i in batch.samples]
                copied = Copying(batch.states, states, places, batch.lengths)
                wait_for_copies()  # of the batch before, while this one is computed
                copying = copied

        def finish() -> CapturedStates:
            wait_for_copies()
            assert states is not None
            return states

        return finish

    @contextmanager
    def _layers_compiled(self) -> Iterator[None]:
        """Only here: the canary runs the model as transformers has it."""
        for layer, forward in self._compiled.items():
            layer.forward = forward
        try:
            yield
        finally:
            for layer in self._compiled:
                del layer.forward  # back to its class's

    def _run_all(
        self, samples: Sequence[Sequence[int]], tokens_per_batch: int
    ) -> Iterator["_Batch"]:
        waiting = self._plan(samples, range(len(samples)), tokens_per_batch)
        while waiting:
            batch = waiting.pop(0)
            try:
                yield self._run(samples, batch)
                continue
            except torch.OutOfMemoryError as error:
                reason = str(error).split(". ")[0]
            # Out of the handler: its traceback holds the failed pass's tensors.
            self._hooks.clear()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            longest = len(samples[batch[0]])
            if len(batch) == 1:
                raise CaptureMemoryError(
                    f"one sample of {longest} tokens does not fit the memory of "
                    f"{self._device} ({reason}); lower tokenize.max_tokens or use more GPUs"
                )
            self._largest_batch = len(batch) * longest // 2
            logger.warning(
                "%d samples of up to %d tokens do not fit the memory of %s (%s): from here on a batch has "
                "%d tokens at most",
                len(batch),
                longest,
                self._device,
                reason,
                self._largest_batch,
            )
            waiting = self._plan(samples, [*batch, *chain(*waiting)], tokens_per_batch)

    def _plan(
        self, samples: Sequence[Sequence[int]], chosen: Sequence[int], tokens_per_batch: int
    ) -> list[list[int]]:
        """Batches of the chosen samples, of what is known to fit the memory."""
        planned = plan_batches(
            [len(samples[i]) for i in chosen],
            min(tokens_per_batch, self._largest_batch or tokens_per_batch),
            apart_above=self._apart_above,
        )
        return [[chosen[i] for i in batch] for batch in planned]

    def _run(self, samples: Sequence[Sequence[int]], chosen: list[int]) -> "_Batch":
        batch = sorted(chosen)  # neighbors are copied together
        lengths = [len(samples[i]) for i in batch]
        longest = max(lengths)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)  # [B, S]
        for row, i in enumerate(batch):
            ids[row, : lengths[row]] = torch.as_tensor(samples[i], dtype=torch.long)
        real = torch.arange(longest)[None] < torch.tensor(lengths)[:, None]  # [B, S]
        # No attention mask: padding stands on the right, so causal attention never shows it to a real
        # token, and without a mask attention takes its fast causal path.
        self._decoder.base(input_ids=send(ids, self._device), use_cache=False)
        aux, last = self._hooks.take()
        for state in (*aux, last):
            if state.shape[:2] != ids.shape:
                raise ValueError(
                    f"{list(ids.shape)} tokens went through the verifier, but a layer's states are "
                    f"{list(state.shape)}: it returned a part of them"
                )
        places = real.flatten().nonzero()[:, 0]  # [T]
        packed_aux = self._pack(aux, places)  # [T, A * H]
        packed_last = self._pack([last], places)  # [T, H]
        return _Batch(batch, lengths, CapturedStates(packed_aux, packed_last))

    def _pack(self, states: list[Tensor], places: Tensor) -> Tensor:
        """Real tokens of [B, S, H] states, side by side, in the stored dtype: [T, len(states) * H]."""
        device, size = states[0].device, states[0].shape[-1]
        packed = torch.empty(
            len(places), len(states) * size, dtype=self._store_dtype, device=device
        )
        for slot, state in enumerate(states):  # each on the GPU of its layer
            here = send(places, state.device)
            flat = state.reshape(-1, size).index_select(0, here)  # [T, H]
            packed[:, slot * size : (slot + 1) * size] = flat
        return packed


class _Batch(NamedTuple):
    """States of some samples where the verifier computes them; on a GPU they may not be there yet."""

    samples: list[int]
    """Which ones, in the order in which they lie here."""
    lengths: list[int]
    states: CapturedStates


def plan_batches(
    lengths: Sequence[int], tokens_per_batch: int, *, apart_above: int | None = None
) -> list[list[int]]:
    """Group sample indices, longest first, so that samples times longest <= tokens_per_batch.

    The longest come first: what does not fit the memory fails at once. There are as few batches as that gives, and
    they are about equal: a small last one would leave a GPU waiting. Samples longer than `apart_above` share no batch
    with others. Raises ValueError for lengths or budgets below 1.
    """
    if tokens_per_batch < 1 or min(lengths, default=1) < 1:
        raise ValueError(
            f"tokens_per_batch {tokens_per_batch} and every sample's length (shortest "
            f"{min(lengths, default=1)}) must be at least 1; drop empty samples"
        )
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], -i))

    def fill(budget: int) -> list[list[int]]:
        batches: list[list[int]] = []
        for i in order:
            longest = lengths[batches[-1][0]] if batches else 0
            fits = batches and (len(batches[-1]) + 1) * longest <= budget
            apart = apart_above is not None and (longest > apart_above) != (
                lengths[i] > apart_above
            )
            if fits and not apart:
                batches[-1].append(i)
            else:
                batches.append([i])
        return batches

    fewest = len(fill(tokens_per_batch))
    budgets = range(1, tokens_per_batch + 1)
    return fill(budgets[bisect_left(budgets, x=-fewest, key=lambda budget: -len(fill(budget)))])
