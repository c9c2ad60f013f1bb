"""T = 5 tokens of 3 samples (one of them empty), A = 2 layers, H = 4."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from storage import artifacts
from storage.artifacts import ArtifactError, Identity
from storage.layout import ROWS_TABLE
from storage.manifest import Manifest, canonical_digest
from storage.shards import (
    NonFiniteStatesError,
    ShardReader,
    ShardRows,
    check_shapes,
    open_shard,
    read_sample_ids,
    write_shard,
)
from storage.store import Store
from storage.tables import Ragged, read_table

ROWS = ShardRows.from_lists(["s-a", "s-b", "s-c"], [[11, 12, 13], [], [14, 15]])
AUX = torch.arange(40, dtype=torch.float32).reshape(5, 8)  # exact in bf16
LAST = -torch.arange(20, dtype=torch.float32).reshape(5, 4)
IDENTITY = Identity(stage="states", version=1, settings={"layers": [2, 5]}, inputs={})


def make(
    store: Store,
    *,
    aux: torch.Tensor = AUX,
    last: torch.Tensor = LAST,
    rows: ShardRows = ROWS,
    codec: str = "bf16",
) -> Manifest:
    with artifacts.write(store, IDENTITY) as writer:
        write_shard(writer, aux=aux, last=last, rows=rows, layer_ids=[2, 5], codec=codec)
        return writer.publish(rows=len(rows))


def test_any_rows_of_a_shard_are_read_back_as_they_were(store: Store) -> None:
    with open_shard(store, make(store)) as shard:
        assert shard.layer_ids == (2, 5)
        assert (shard.hidden_size, shard.codec) == (4, "bf16")
        assert torch.equal(shard.aux(0, 5), AUX.bfloat16())
        assert torch.equal(shard.last(1, 4), LAST[1:4].bfloat16())
        assert shard.aux(3, 3).shape == (0, 8)
        assert shard.rows.sample_ids == ROWS.sample_ids
        assert shard.rows.offsets.tolist() == [0, 3, 3, 5]
        assert shard.rows.tokens.row(2).tolist() == [14, 15]
        with pytest.raises(ValueError, match=r"rows \[4, 6\) are not in \[0, 5\)"):
            shard.aux(4, 6)


@pytest.mark.parametrize(("start", "stop"), [(0, 5), (1, 4), (3, 3), (4, 5)])
def test_any_rows_of_an_fp8_shard_are_read_back_with_their_own_scales(
    store: Store, start: int, stop: int
) -> None:
    aux = AUX.clone()
    aux[1, :4] *= 1000  # one layer of one token
    with open_shard(store, make(store, aux=aux, codec="fp8")) as shard:
        assert shard.codec == "fp8"
        found, last = shard.aux(start, stop), shard.last(start, stop)
    assert (found.dtype, found.shape) == (torch.bfloat16, (stop - start, 8))
    # 3 bits of mantissa: half a step is a sixteenth
    torch.testing.assert_close(found.float(), aux[start:stop], rtol=1 / 16, atol=0)
    torch.testing.assert_close(last.float(), LAST[start:stop], rtol=1 / 16, atol=0)


def test_an_fp8_shard_without_its_scales_is_refused(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    folder = artifacts.local_directory(store, make(store, codec="fp8"))
    assert folder is not None
    states, rows = folder / "states.safetensors", folder / "rows.parquet"
    tensors = load_file(states)
    del tensors["aux.scale"]
    with safe_open(states, framework="pt") as file:
        metadata = file.metadata()
    save_file(tensors, states, metadata=metadata)
    with pytest.raises(ValueError, match=r"aux.scale has the shape None.*need \[5, 2\]"):
        ShardReader(states, rows)


def test_what_was_read_outlives_the_reader_and_its_file(store: Store) -> None:
    with open_shard(store, make(store)) as shard:
        last = shard.last(0, 5)
    del shard
    store.delete(IDENTITY.path)
    assert torch.equal(last, LAST.bfloat16())


def test_the_table_beside_the_states_says_whose_rows_they_are(store: Store) -> None:
    with artifacts.open_file(store, make(store), "rows.parquet") as path:
        assert read_table(path).to_pylist() == [
            {"sample_id": "s-a", "start": 0, "stop": 3, "input_ids": [11, 12, 13]},
            {"sample_id": "s-b", "start": 3, "stop": 3, "input_ids": []},
            {"sample_id": "s-c", "start": 3, "stop": 5, "input_ids": [14, 15]},
        ]


@pytest.mark.parametrize("codec", ["bf16", "fp8"])
def test_equal_states_make_equal_bytes(tmp_path: Path, codec: str) -> None:
    made = [make(Store(str(tmp_path / str(n))), codec=codec).content for n in range(5)]
    assert len(set(made)) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("part", ["aux", "last"])
@pytest.mark.parametrize("codec", ["bf16", "fp8"])
def test_states_that_are_not_finite_are_refused_by_sample_before_anything_is_stored(
    tmp_path: Path, codec: str, part: str, value: float
) -> None:
    store = Store(str(tmp_path))
    states = {"aux": AUX.clone(), "last": LAST.clone()}
    states[part][3, 1] = value
    with pytest.raises(NonFiniteStatesError, match=rf"1 of 3 .*s-c \(in {part}\)") as caught:
        make(store, aux=states["aux"], last=states["last"], codec=codec)
    assert caught.value.sample_indices == [2]
    assert store.sizes("") == {}


@pytest.mark.parametrize("codec", ["bf16", "fp8"])
def test_a_value_that_overflows_in_storage_is_refused(codec: str) -> None:
    aux = AUX.clone()
    aux[0, 0] = torch.finfo(torch.float32).max  # rounds to infinity in bf16
    with pytest.raises(NonFiniteStatesError, match="s-a"):
        make(Store("memory://overflow"), aux=aux, codec=codec)


def test_states_that_do_not_fit_their_tokens_or_layers_are_refused() -> None:
    store = Store("memory://unfit")
    with pytest.raises(ValueError, match=r"5 tokens need as many rows.*\[4, 8\]"):
        make(store, aux=AUX[:4])
    with pytest.raises(ValueError, match=r"5 tokens need as many rows.*\[4, 4\]"):
        make(store, last=LAST[:4])
    with pytest.raises(ValueError, match="no multiple of the hidden size 4"):
        make(store, aux=AUX[:, :6])
    with pytest.raises(ValueError, match="2 layers of hidden size 4 need an aux of width 8, not 4"):
        make(store, aux=AUX[:, :4])
    with artifacts.write(store, IDENTITY) as writer:
        with pytest.raises(ValueError, match=r"must ascend without repetition, not \[5, 2\]"):
            write_shard(writer, aux=AUX, last=LAST, rows=ROWS, layer_ids=[5, 2])
        with pytest.raises(ValueError, match="codec 'fp3' is unknown; choose one of bf16"):
            write_shard(writer, aux=AUX, last=LAST, rows=ROWS, layer_ids=[2, 5], codec="fp3")
    check_shapes(AUX, LAST, ROWS)


def test_rows_that_do_not_follow_each_other_are_refused() -> None:
    tokens = np.array([1, 2, 3], np.int32)
    for offsets in ([0, 2], [1, 3], [0, 2, 1, 3]):
        ids = tuple("abc"[: len(offsets) - 1])
        with pytest.raises(ValueError, match="must follow each other from 0 to 3"):
            ShardRows(ids, Ragged(tokens, np.array(offsets)))
    with pytest.raises(ValueError, match="1 sample ids for 2 token lists"):
        ShardRows(("a",), Ragged(tokens, np.array([0, 1, 3])))


def test_a_reader_refuses_a_short_file_foreign_states_and_other_rows(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    folder = artifacts.local_directory(store, make(store))
    assert folder is not None
    states, rows = folder / "states.safetensors", folder / "rows.parquet"
    whole = states.read_bytes()
    fewer = ShardRows.from_lists(["s-a"], [[11, 12, 13]])
    other = artifacts.local_directory(store, make(store, aux=AUX[:3], last=LAST[:3], rows=fewer))
    assert other is not None
    with pytest.raises(ValueError, match=r"aux has the shape \[5, 8\].*need \[3, 8\]"):
        ShardReader(states, other / "rows.parquet")
    states.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="no complete safetensors file"):
        ShardReader(states, rows)
    save_file({"aux": AUX, "last": LAST}, states)
    with pytest.raises(ValueError, match="holds no captured states"):
        ShardReader(states, rows)
    states.write_bytes(whole.replace(b"pre_norm", b"postnorm"))
    with pytest.raises(ValueError, match=r"postnorm.*capture it again"):
        ShardReader(states, rows)


def test_sample_ids_are_read_without_the_token_ids_beside_them(store: Store) -> None:
    shard = make_known(store)
    assert read_sample_ids(store, shard).to_pylist() == ["s-a", "s-b", "s-c"]


def test_sample_ids_that_are_not_those_of_the_shard_set_it_aside(store: Store) -> None:
    shard = make_known(store)
    path = f"{shard.path}/{shard.files[ROWS_TABLE].path}"
    content = store.read_bytes(path)
    place = content.index(b"s-b")
    store.write_bytes(path, content[:place] + b"s-x" + content[place + 3 :])

    with pytest.raises(ArtifactError, match="is corrupt; run again to rebuild it"):
        read_sample_ids(store, shard)
    assert artifacts.find(store, known_identity()) is None


def known_identity() -> Identity:
    samples = canonical_digest(list(ROWS.sample_ids))
    return Identity(stage="states", version=1, settings={}, inputs={"samples": samples})


def make_known(store: Store) -> Manifest:
    with artifacts.write(store, known_identity()) as writer:
        write_shard(writer, aux=AUX, last=LAST, rows=ROWS, layer_ids=[2, 5])
        return writer.publish(rows=len(ROWS))
