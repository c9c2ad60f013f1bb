"""Code beside the weights runs only where transformers has none, and only when it is trusted."""

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from storage.store import Store
from tasks.child import JobRefusedError
from tasks.eagle3.remote_code import is_native
from tasks.eagle3.verifier import VerifierError
from tasks.engines.loading import load_verifier_model
from tasks.engines.remote_code import admit, check_quantization
from tasks.jobs.models import load_tokenizer
from tasks.load_verifier import load_verifier, open_verifier
from tasks.stage import call
from tests.families.checkpoints import rewrite_config
from tests.families.experts import build_kimi_k2, build_remote_code
from tests.families.int4 import QUANTIZATION
from tests.tiny_models import make_llama


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a model type that transformers does not know, with its code."""
    directory = tmp_path_factory.mktemp("remote")
    build_remote_code(directory)
    return directory


def test_unknown_model_types_are_refused_until_their_code_is_trusted(remote: Path) -> None:
    with pytest.raises(VerifierError, match=r"no model type 'own_moe'.*configuration_own") as error:
        admit(remote, trusted=False)
    assert "set verifier.trust_remote_code to true" in str(error.value)
    with pytest.raises(VerifierError, match="no model type 'own_moe'"):
        load_verifier_model(remote)

    assert type(load_verifier_model(remote, trust_remote_code=True)).__name__ == "OwnMoeForCausalLM"


def test_an_admitted_config_is_known_also_to_those_who_do_not_trust(remote: Path) -> None:
    admit(remote, trusted=True)

    assert type(AutoConfig.from_pretrained(remote)).__name__ == "OwnMoeConfig"
    assert not is_native("own_moe")


def test_a_model_type_that_nobody_knows_is_refused_even_when_trusted(tmp_path: Path) -> None:
    make_llama(tmp_path)
    rewrite_config(tmp_path, lambda config: config | {"model_type": "llama9"})

    with pytest.raises(
        VerifierError, match=r"no model type 'llama9' and config.json names no code"
    ):
        admit(tmp_path, trusted=True)


def test_code_of_a_known_model_type_does_not_run_even_when_trusted(tmp_path: Path) -> None:
    make_llama(tmp_path)
    for name in ("configuration_own.py", "modeling_own.py"):
        (tmp_path / name).write_text("raise RuntimeError('the code of the checkpoint ran')\n")
    brought = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    }
    rewrite_config(tmp_path, lambda config: config | {"auto_map": brought})

    model = load_verifier_model(tmp_path, trust_remote_code=True)

    assert type(model).__name__ == "LlamaForCausalLM"


def test_kimi_k2_is_loaded_as_the_deepseek_v3_that_it_is(tmp_path: Path) -> None:
    original = build_kimi_k2(tmp_path)
    ids = torch.arange(3, 40)[None]

    model = load_verifier_model(tmp_path)

    assert type(model).__name__ == "DeepseekV3ForCausalLM"
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, original(ids).logits)


def test_a_tokenizer_that_needs_code_is_refused_until_it_is_trusted(tmp_path: Path) -> None:
    make_llama(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {
        "tokenizer_class": "OwnTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]},
    }
    path.write_text(json.dumps(config))
    (tmp_path / "tokenization_own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n"
        "class OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    # a model type for which transformers has a config but no tokenizer of its own
    rewrite_config(tmp_path, lambda values: values | {"model_type": "mllama_text_model"})

    with pytest.raises(VerifierError, match=r"no tokenizer 'OwnTokenizer'.*tokenization_own"):
        load_tokenizer(str(tmp_path), trust_remote_code=False)

    tokenizer = load_tokenizer(str(tmp_path), trust_remote_code=True)
    assert type(tokenizer).__name__ == "OwnTokenizer"
    assert tokenizer.decode(tokenizer("the boat")["input_ids"]) == "the boat"


def test_what_was_read_while_trusted_is_refused_once_it_is_not(
    remote: Path, tmp_path: Path
) -> None:
    store = Store(str(tmp_path / "store"))
    loaded = call(load_verifier, store, str(remote), trust_remote_code=True)
    verifier = open_verifier(store, str(remote), loaded.parts[0], trust_remote_code=True)

    place = verifier.place
    assert (place["directory"], place["trust_remote_code"]) == (str(remote), True)
    assert {"config.json", "configuration_own.py", "model.safetensors"} <= place["files"].keys()
    with pytest.raises(JobRefusedError, match=r"set verifier\.trust_remote_code to true"):
        call(load_verifier, store, str(remote))


def test_packed_weights_are_refused_where_nothing_unpacks_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "compressed_tensors", None)

    with pytest.raises(VerifierError, match="install compressed-tensors"):
        check_quantization(tmp_path, QUANTIZATION)
    check_quantization(tmp_path, {"quant_method": "mxfp4"})
    check_quantization(tmp_path, None)
