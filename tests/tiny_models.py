"""Tiny verifiers on disk, real in every part: config, safetensors, tokenizer, chat template.

Weights are drawn so that a fault shows: every layer moves the residual stream as much as the
embedding did, norm weights come from U(0.5, 2) (with weights of 1 a norm applied twice is
invisible), logits are spread enough for a clear argmax.
"""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 320
EOS_ID = 2  # <|im_end|>
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MERGES = (
    "Ġ t", "h e", "Ġ a", "i n", "r e", "o n", "Ġt he", "e r", "Ġ s", "a t", "Ġ w", "o r", "e n",
    "i s", "Ġ o", "a n", "i t", "in g", "e d", "Ġ b", "e s", "o u", "a r", "Ġ c", "Ġ m", "Ġ p",
    "u s", "a s", "as s", "is t", "us er", "ass ist", "an t", "assist ant",
)  # fmt: skip


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of 3 specials, 256 bytes and a few merges; it encodes any text."""
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    tokens = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [left + right for left, right in merges]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=SPECIALS[1],
        eos_token=SPECIALS[2],
        pad_token=SPECIALS[2],
        chat_template=CHAT_TEMPLATE,
    )


def make_llama(directory: Path, *, tied: bool = False, **changes: Any) -> Path:
    """Write a tiny Llama (8 layers, hidden 64) to `directory`; `changes` go to its config."""
    config = LlamaConfig(**(_sizes(tied=tied) | changes))
    return _save(LlamaForCausalLM(config), directory, seed=0)


def make_qwen3(directory: Path, *, tied: bool = False, **changes: Any) -> Path:
    """Write a tiny Qwen3 (q and k norms, 8 layers, hidden 64) to `directory`."""
    config = Qwen3Config(**(_sizes(tied=tied) | changes))
    return _save(Qwen3ForCausalLM(config), directory, seed=1)


def make_kimi(directory: Path) -> Path:
    """Write a tiny checkpoint laid out as Kimi-K2.5's: nested config, `language_model.*` keys."""
    sizes = _sizes(tied=False) | {"num_key_value_heads": 4}
    del sizes["head_dim"]
    config = DeepseekV3Config(
        **sizes, moe_intermediate_size=32, n_routed_experts=4, n_shared_experts=1, n_group=1,
        topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1, q_lora_rank=24,
        kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16,
    )  # fmt: skip
    _save(DeepseekV3ForCausalLM(config), directory, seed=2)
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    vision = {"vision_tower.encoder.final_layernorm.weight": torch.ones(8)}
    nested = {f"language_model.{key}": tensor for key, tensor in tensors.items()}
    save_file(nested | vision, directory / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((directory / "config.json").read_text())
    # as in the published config; transformers' own class of that name takes it for deepseek_v3
    text |= {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
    whole = {
        "model_type": "kimi_k25",
        "architectures": ["KimiK25ForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1},
        "tie_word_embeddings": False,
    }
    (directory / "config.json").write_text(json.dumps(whole))
    return directory


def load_model(directory: Path) -> PreTrainedModel:
    """Load a tiny model in fp32, ready to run."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def _sizes(*, tied: bool) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "tie_word_embeddings": tied,
        "bos_token_id": 1, "eos_token_id": EOS_ID, "pad_token_id": EOS_ID,
    }  # fmt: skip


def _save(model: PreTrainedModel, directory: Path, *, seed: int) -> Path:
    _draw_weights(model, seed)
    model.generation_config.eos_token_id = EOS_ID
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


@torch.no_grad()
def _draw_weights(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        if parameter.dim() == 1:
            parameter.uniform_(0.5, 2.0, generator=generator)
        else:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
        if name.endswith("embed_tokens.weight") and not model.config.tie_word_embeddings:
            parameter.mul_(parameter.shape[-1] ** 0.5)
