"""An EAGLE-3 draft, run as a server runs it: incrementally, many rows at once.

B = rows, Q = new tokens a row, A = captured layers, H = hidden size, D = draft vocabulary

The draft reads pairs (token x[i + 1], verifier states g[i]); this pair is entry i of a row, at slot
i and at rotary position i + 1, as in training. After its last real entry the draft continues on its
own: the token it proposed, paired with its own output in place of the verifier's states. Those
guessed entries are overwritten once the verifier has read the tokens. Source: EAGLE-3 (arXiv
2503.01840), section 3.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tasks.eagle3.slot_cache import SlotCache, attend_to_slots, slot_mask

if TYPE_CHECKING:
    from tasks.eagle3.draft import Eagle3DraftModel


class DraftRunner:
    """The modules of a draft with a key/value cache of B ragged rows.

    Args:
        draft: speculators' model; its own modules do the work, in their dtype.
        rows: Rows decoded together.
        slots: Entries a row can hold, guessed ones included.

    Raises:
        ValueError: a layer of the draft attends within a window shorter than `slots`.
    """

    def __init__(self, draft: "Eagle3DraftModel", *, rows: int, slots: int) -> None:
        window = draft.sliding_window if draft.uses_sliding_window_attn else None
        if window is not None and slots > window:
            raise ValueError(
                f"{slots} slots exceed the draft's attention window of {window} tokens; "
                "decode shorter prompts or fewer new tokens"
            )
        self._draft = draft
        self._config = draft.config.transformer_layer_config
        self._dtype: torch.dtype = draft.fc.weight.dtype
        self._cache = SlotCache(rows, slots)
        self._entries = torch.zeros(rows, dtype=torch.long, device=draft.fc.weight.device)

    def extend(self, token_ids: Tensor, aux: Tensor, *, counts: Tensor) -> Tensor:
        """Append real entries to each row and return the draft's state after the last of them.

        Args:
            token_ids: [B, Q] tokens x[i + 1]; a row's entries beyond its count are padding.
            aux: [B, Q, A * H] verifier states g[i] of the tokens before them.
            counts: [B] entries to append, 1 to Q.

        Returns:
            [B, H] states: input of `logits` and of `guess`.
        """
        states = self._fuse(aux.to(self._dtype))  # [B, Q, H]
        places = self._entries[:, None] + torch.arange(token_ids.shape[1], device=aux.device)
        out = self._layers(token_ids, states, places)
        self._entries = self._entries + counts
        return out[torch.arange(len(counts), device=aux.device), counts - 1]

    def propose(self, states: Tensor, *, count: int) -> Tensor:
        """The draft's best guess of the next tokens, as target ids [B, count]."""
        proposed = [self.target_ids(self.logits(states).argmax(dim=-1))]
        for ahead in range(count - 1):
            states = self.guess(proposed[-1], states, ahead=ahead)
            proposed.append(self.target_ids(self.logits(states).argmax(dim=-1)))
        return torch.stack(proposed, dim=1)

    def guess(self, token_ids: Tensor, states: Tensor, *, ahead: int) -> Tensor:
        """Run a guessed entry, `ahead` places after the first free one: [B], [B, H] -> [B, H]."""
        places = (self._entries + ahead)[:, None]
        return self._layers(token_ids[:, None], states[:, None], places)[:, 0]

    def logits(self, states: Tensor) -> Tensor:
        """Logits [..., D] over the draft vocabulary from states [..., H]."""
        normed = states if self._draft.config.norm_output else self._draft.norm(states)
        out: Tensor = self._draft.lm_head(normed)
        return out

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Ids in the verifier's vocabulary: target_id = draft_id + d2t[draft_id]."""
        d2t = self._draft.d2t
        return draft_ids if d2t is None else draft_ids + d2t[draft_ids]

    def keep(self, order: Sequence[int]) -> None:
        """Go on with the rows of `order` (see `slot_cache.survivors`)."""
        self._cache.keep(order)
        self._entries = self._entries[list(order)]

    def _fuse(self, aux: Tensor) -> Tensor:
        """[B, Q, A * H] verifier states -> [B, Q, H] input of the draft's layer."""
        draft = self._draft
        if draft.input_norm is not None:
            aux = draft.input_norm(aux)
        if draft.fc_norm is not None:
            chunks = aux.chunk(len(draft.fc_norm), dim=-1)
            normed = [norm(chunk) for norm, chunk in zip(draft.fc_norm, chunks, strict=True)]
            aux = torch.cat(normed, dim=-1)
        fused: Tensor = draft.fc(aux)
        return fused

    def _layers(self, token_ids: Tensor, states: Tensor, places: Tensor) -> Tensor:
        """[B, Q] tokens, [B, Q, H] states, slots `places` [B, Q] -> [B, Q, H] states to feed."""
        draft = self._draft
        hidden = torch.cat([draft.embed_tokens(token_ids), states], dim=-1)  # [B, Q, 2 * H]
        self._cache.write_at(places)
        mask = slot_mask(places, used=self._cache.used, dtype=self._dtype)
        rotary = draft.rotary_emb(hidden, places + 1)
        with attend_to_slots(self._config, self._cache):
            for layer in draft.layers:
                hidden = layer(
                    hidden,
                    attention_mask=mask,
                    past_key_values=self._cache,
                    position_embeddings=rotary,
                )
        out: Tensor = draft.norm(hidden) if draft.config.norm_output else hidden
        return out
