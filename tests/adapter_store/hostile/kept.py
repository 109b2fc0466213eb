"""Inputs that broke the reader of adapters once: for its tests, and where the fuzzer begins.

Not here: what the bytes mean and what may come of them (inputs.load_bytes).
"""

import base64
import zlib
from dataclasses import dataclass


@dataclass(frozen=True)
class KeptInput:
    """One input. packed: as `pack` wrote it;  reason, word: its refusal's, and what that names."""

    packed: str
    reason: str
    word: str

    def unpack(self) -> bytes:
        """What load_bytes takes."""
        return zlib.decompress(base64.b64decode(self.packed))


def pack(data: bytes) -> str:
    """The form in which inputs are kept."""
    return base64.b64encode(zlib.compress(data, 9)).decode()


KEPT_INPUTS = (
    # Case 371 of folders.make_case, which a refusal repeated whole: an id of 4,001 digits.
    KeptInput(
        "eNrtmG1z3DQQx9MvwetUFFogNb679JE+kEALhUBDWx4vNxqdvb6Y+iRVktOE632Gfka+CfuXfT1fp8O0wwBvvC+y"
        "f6/kn1bS+mayf25tbS2EpSLIcGZJ3NwWBw8f7YmdbeH4YcC+Mk5JVdlj1QaCcjMKcm7yuiLPwbF4Jq0zv4sJj05L"
        "hZjQRhMwtSfpPCAcLVTliYPtuzIY6dUJltV1VeFtxdN5lCqp1ZykcdKqcAwghgCMyZ6Q86XRiKfJcJAMxSrT3Blr"
        "6sAjD3RR6jKcLV++h012XhkmKeYHV+tMhSbYJmBVnpd6tg7wM+Wc6FPSca8LUebsUx7KjA6ksZS49YJ0bopAp+HF"
        "HbA9QyqSz43LO/uufHCl7QTc6wFt3FxV5R/Ufc1bykpVcYRTpuXOdpvE4PUkyrn0fD3/ZQ7DN+TAZ/HvZzDpznOd"
        "G3TUXFcbXohVZe+fBTqgE6pEc69ctFSUp9JblVFnIU5mLk1ReAq+XW1VyDSj0/URCGt8QOln5L3ZXOwJzW2lAh02"
        "o6ipVwfS1NFjelaTjiu3ZynihweCbIpsGXdpVene4RVczRsm7m9OHDTs9lDXBb4AQOSU8Uf4bsfXntPbn178zjeX"
        "OLwH+Pobbu+01k+bDNch1Fypaz5P6espKqzNZz2Fy5ATidXHc4qNsQIJMbZz7VPen+SHaqqybryccZnxrxLxz57v"
        "xE9MpqYx/c2vv/lx2PgY+bjT3nrrrbfeeuutt95666233nrr7X+3nY3eVdPXOs9+xP5IsNhl8T77K+wvsL/K/gP2"
        "19h/yP46+4vsb7C/FP/jZ/ERBNp0H0OA+QkEoDsQgF6GADWBAPZTCHBTCIAHECAPkRrIIwiQdyFAvgIB8lUIkK9B"
        "gHwdAuQbECDfhAD5MwiQb2GzIN+GABnHMAL5LgTIn0OAvAcB8j4EyF9AgPwlBMj3IEC+j9MD+SsIkL+GAPkBBMjf"
        "QID8LQTIBxAgfwcB8vcQID+EAPkQ9wHyDxAgP4IA+TEEyE8gQP4RAuSfIED+GQLkXyBA/hUC5N9wwyCPIUA+OoIC"
        "egIxih2sVU9oPBZHdToYxr5yiUZ4N5A1gdi+9mIyWS63OrZ7rvELIeWcgspVUFLGxlKB/mbsq9oglhv98aT7t1Jn"
        "5HySJvPKJnRqyQWfzFQgWdvYmk9ib3wveU7l7DhEdr5qut0fxe65P1bxecy75v3upmgPxlzWzTyMpZN/nsj+WyXC"
        "t4fr/ptEln8B9AOOWw==",
        "tokenizer",
        "has the id 1000",
    ),
)
