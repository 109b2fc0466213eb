"""Which adapter draws how much traffic: a moving average per adapter. The clock is an argument.

Not here: what is made of it (bin_pack.py).
"""

from collections.abc import Mapping

HALF_LIFE_S = 60.0
_IDLE_TOKENS_PER_S = 0.05
"""Below this an adapter counts as unused: one request of 1000 tokens is remembered 8 minutes."""


class Shares:
    """Tokens a second of each adapter, averaged with a half-life of `half_life_s`.

    Only adapters that were used lately take memory and time here.
    """

    def __init__(self, half_life_s: float = HALF_LIFE_S) -> None:
        self._half_life_s = half_life_s
        self._rates: dict[str, tuple[float, float]] = {}  # adapter_id -> rate, as of when

    def add(self, now_s: float, tokens: Mapping[str, int], over_s: float) -> None:
        """Tokens by adapter_id that an ingress counted in its last `over_s` seconds.

        Taken as spread evenly over that time, so a report that was held up for a minute tells the
        same rate as sixty small ones.
        """
        over_s = max(over_s, 1e-3)
        weight = (1 - 0.5 ** (over_s / self._half_life_s)) / over_s
        for adapter_id, count in tokens.items():
            self._rates[adapter_id] = (self._at(adapter_id, now_s) + count * weight, now_s)

    def rates(self, now_s: float) -> dict[str, float]:
        """Tokens a second by adapter_id; who is not there is not used."""
        rates = {adapter_id: self._at(adapter_id, now_s) for adapter_id in self._rates}
        for adapter_id, rate in rates.items():
            if rate < _IDLE_TOKENS_PER_S:
                del self._rates[adapter_id]
        return {name: rate for name, rate in rates.items() if rate >= _IDLE_TOKENS_PER_S}

    def _at(self, adapter_id: str, now_s: float) -> float:
        rate, as_of_s = self._rates.get(adapter_id, (0.0, now_s))
        return rate * 0.5 ** ((now_s - as_of_s) / self._half_life_s)
