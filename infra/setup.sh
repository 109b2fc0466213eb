#!/bin/sh
# Make a virtual environment and install the project into it, with the CPU build of torch where there is no GPU.
# Usage: infra/setup.sh [FOLDER]   (default .venv; PYTHON=python3.12 chooses another interpreter)
set -eu
cd "$(dirname "$0")/.."
venv=${1:-.venv}
python=${PYTHON:-python3}
cpu_index=https://download.pytorch.org/whl/cpu
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { echo "setup: $*"; }

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  say "Python 3.11 or newer is needed; PYTHON=/path/to/python3.x names another one"
  exit 1
}
if ! "$python" -c 'import ensurepip' 2>/dev/null; then
  # Debian keeps this part of Python in a package of its own.
  say "this Python cannot make virtual environments; installing python3-venv"
  if [ "$(id -u)" = 0 ]; then
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3-venv
  else
    say "please run: sudo apt-get install python3-venv"
    exit 1
  fi
fi
"$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --quiet "$@"; }

extra=cpu
torch=
more_index=
if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then
  extra=gpu
elif [ "$(uname -s)-$(uname -m)" = Linux-x86_64 ]; then
  # PyPI's torch for x86_64 brings several GB of CUDA libraries. The CPU build is ten times smaller; it
  # comes from a folder or index that pip is set up with, or from PyTorch's own index.
  torch=$(grep '^torch==' constraints.txt)+cpu
  answers="import urllib.request as r; r.urlopen('$cpu_index/', timeout=5)"
  if pip install --dry-run --no-deps "$torch" 2>/dev/null; then
    say "$torch from pip's configured sources"
  elif "$venv/bin/python" -c "$answers" 2>/dev/null; then
    say "$torch from $cpu_index"
    more_index="--extra-index-url $cpu_index"
  else
    say "no CPU build of torch in reach: taking the default one (about 3 GB with its CUDA libraries)"
    torch=
  fi
fi
say "installing (a minute or two) ..."
# Compiling every module costs as long as unpacking; the import below compiles those that are used.
pip install --no-compile -c constraints.txt $more_index $torch -e ".[$extra,dev]"
"$venv/bin/python" -c 'import deployments.application, deployments.demo, model_runner.engine' || true
say "ready in $venv ($extra)"
