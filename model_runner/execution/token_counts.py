"""`TokenCounts`: which tokens a sequence has seen, kept on the device, and its penalties for them.

The step that draws a token counts it, so that the next step needs nothing from the host. Not for
which sequence has which seat (the sampler's).
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from model_runner.scheduling.batch import History

IN_PROMPT = 1 << 30  # beside the count of any output


class TokenCounts:
    """By seat, how often each token is in the output, and whether it is in the prompt.

    table  [seats, V] int32: the count, plus IN_PROMPT
    """

    def __init__(self, num_seats: int, vocab_size: int, device: torch.device) -> None:
        self.table = torch.zeros(num_seats, vocab_size, dtype=torch.int32, device=device)

    def columns(self, histories: Sequence[History]) -> dict[str, np.ndarray]:
        """What `begin` takes, for the host to send: seats [h] int64, places in the table [m] int64
        and what is added there [m] int32."""
        vocab = self.table.shape[1]
        places, amounts = [], []
        for history in histories:
            ids = np.array(history.token_ids, np.int64)
            prompt = np.unique(ids[: history.prompt_len])
            output, counts = np.unique(ids[history.prompt_len :], return_counts=True)
            places += [history.seat * vocab + prompt, history.seat * vocab + output]
            amounts += [np.full(len(prompt), IN_PROMPT, np.int32), counts.astype(np.int32)]
        return {
            "begun_seats": np.array([history.seat for history in histories], np.int64),
            "begun_at": np.concatenate(places),
            "begun_by": np.concatenate(amounts),
        }

    def begin(self, views: dict[str, Tensor]) -> None:
        """Sequences take their seats; what earlier ones left there is gone. `columns` on the
        device."""
        self.table.index_fill_(0, views["begun_seats"], 0)
        self.table.view(-1).index_add_(0, views["begun_at"], views["begun_by"])

    def penalize(
        self,
        logits: Tensor,
        seats: Tensor,
        repetition: Tensor,
        presence: Tensor,
        frequency: Tensor,
    ) -> Tensor:
        """Logits less the penalties of `SamplingParams`. [n, V] float32; seats [n] int64, penalties
        [n] float32 each -> [n, V]"""
        seen = self.table.index_select(0, seats)  # [n, V]
        counts = seen & (IN_PROMPT - 1)  # [n, V]
        factor = repetition[:, None]  # [n, 1]
        weaker = torch.where(logits > 0, logits / factor, logits * factor)  # [n, V]
        logits = torch.where(seen > 0, weaker, logits)  # [n, V]
        return logits - frequency[:, None] * counts - presence[:, None] * (counts > 0)

    def add(self, seats: Tensor, tokens: Tensor) -> None:
        """These tokens were drawn. [n] int64 each; a negative token is none."""
        places = seats * self.table.shape[1] + tokens.clamp(min=0)  # [n]
        self.table.view(-1).index_add_(0, places, (tokens >= 0).int())
