"""Where a checkpoint to start from is found."""

import pytest

from storage import artifacts
from storage.artifacts import Identity
from storage.store import Store
from tasks.eagle3.draft import save_speculator
from tasks.warm_start import find_checkpoint
from tests.storage.conftest import s3_endpoint, s3_environment, s3_store  # noqa: F401
from tests.tasks.eagle3.draft_cases import make_draft

FILES = {"config.json", "model.safetensors"}


@pytest.fixture
def checkpoint(tmp_path):
    save_speculator(make_draft(), tmp_path / "draft")
    return tmp_path / "draft"


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_a_directory_is_used_where_it_is(checkpoint, prefix):
    assert find_checkpoint(f"{prefix}{checkpoint}") == checkpoint


def test_an_artifact_of_a_store_stands_for_the_files_of_its_attempt(checkpoint, tmp_path):
    store = Store(str(tmp_path / "store"))
    wanted = Identity(stage="speculator", version=1, settings={}, inputs={})
    with artifacts.write(store, wanted) as writer:
        for file in checkpoint.iterdir():
            writer.add_bytes(file.name, file.read_bytes())
        manifest = writer.publish(rows=1)

    found = find_checkpoint(f"{tmp_path / 'store'}/{wanted.path}/")

    assert str(found) == artifacts.location(store, manifest)
    assert (found / "config.json").is_file()


def test_a_checkpoint_in_a_bucket_is_copied_once(
    checkpoint,
    tmp_path,
    monkeypatch,
    s3_store,  # noqa: F811
):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    for file in checkpoint.iterdir():
        s3_store.write_bytes(f"draft/{file.name}", file.read_bytes())

    found = find_checkpoint(f"{s3_store.url}/draft")

    assert {file.name: file.read_bytes() for file in found.iterdir()} == {
        file.name: file.read_bytes() for file in checkpoint.iterdir() if file.name in FILES
    }
    assert find_checkpoint(f"{s3_store.url}/draft") == found


def test_what_is_no_checkpoint_is_refused_with_the_way_out(tmp_path, s3_environment):  # noqa: F811
    with pytest.raises(ValueError, match=r"train\.init some/draft is no directory.*hf://"):
        find_checkpoint("some/draft")
    with pytest.raises(
        ValueError, match=r"there is no config\.json; name the directory of a specu"
    ):
        find_checkpoint(str(tmp_path))
    with pytest.raises(ValueError, match=r"train\.init s3://outrider-tests/none.*correct the URL"):
        find_checkpoint("s3://outrider-tests/none")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="has no weights"):
        find_checkpoint(str(tmp_path))
