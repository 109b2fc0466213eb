"""`read_extras` in a process of its own: a tokenizer.json is parsed for most of a second, and an
engine's thread in the same process would wait for Python's lock that long.

Its memory is bounded too. Not here: what is read (extras_files.py).
"""

import json
import os
import resource
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from adapter_store.errors import AdapterInvalid, AdapterUnavailable
from adapter_store.extras import AdapterExtras, extras_from_json
from adapter_store.formats.extras_files import BaseTokens, read_extras

_CODE = "from adapter_store.formats.extras_process import run_child; run_child()"
MAX_MEMORY_BYTES = 256 << 20
MAX_SECONDS = 5
"""Of processor time: the largest good files take 1.3."""

_PATIENCE_S = 60.0
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH")


def read_extras_apart(folder: Path, base_folder: Path | None) -> AdapterExtras:
    """What a fetched adapter brings.

    Errors:  those of `read_extras`; AdapterInvalid("file") if it takes more time or memory than it
             may; AdapterUnavailable if the process ends without a word.
    """
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    try:
        child = subprocess.run(
            [sys.executable, "-c", _CODE, str(folder), str(base_folder or "")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
            timeout=_PATIENCE_S,
        )
    except subprocess.TimeoutExpired:
        words = f"the files beside the weights took more than {_PATIENCE_S:.0f} s to read"
        raise AdapterUnavailable(words) from None
    if child.returncode == -signal.SIGXCPU:
        words = f"the files beside the weights take more than {MAX_SECONDS} s to read"
        raise AdapterInvalid("file", words)
    if child.returncode:
        words = f"the files beside the weights could not be read: exit code {child.returncode}"
        raise AdapterUnavailable(words)
    said = json.loads(child.stdout)
    if "unavailable" in said:
        raise AdapterUnavailable(said["unavailable"])
    if "reason" in said:
        raise AdapterInvalid(said["reason"], said["message"])
    return extras_from_json(said)


def run_child() -> None:
    """Read the folder of the command line, and write what came of it."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_SECONDS, MAX_SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    folder, base_folder = (Path(text) if text else None for text in sys.argv[1:])
    assert folder is not None
    try:
        said = asdict(read_extras(folder, BaseTokens(base_folder)))
    except AdapterInvalid as error:
        said = {"reason": error.reason, "message": error.message}
    except AdapterUnavailable as error:
        said = {"unavailable": str(error)}
    except MemoryError:
        words = f"the files beside the weights take more than {MAX_MEMORY_BYTES} bytes of memory"
        said = {"reason": "file", "message": words}
    print(json.dumps(said))
