"""Job of load_verifier: convert a GGUF file to a safetensors model directory in the machine's cache."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from storage import artifacts
from storage.artifacts import Identity
from storage.store import Store
from tasks.child import ProgressCallback
from tasks.engines.gguf import convert_gguf


def run(request: dict[str, Any], _progress: ProgressCallback) -> dict[str, Any]:
    """Publish the converted model of `request["gguf"]`."""
    gguf = Path(request["gguf"])
    store, wanted = Store(request["store"]), Identity(**request["identity"])
    with artifacts.write(store, wanted) as writer, tempfile.TemporaryDirectory() as scratch:
        convert_gguf(gguf, Path(scratch))
        files = sorted(Path(scratch).iterdir())
        for file in files:
            with writer.file(file.name) as path:
                shutil.copyfile(file, path)
        writer.publish(rows=len(files), facts={"source": gguf.name})
    return {}
