"""What can be wrong with an adapter. No HTTP word here: deployments maps these to statuses."""


class AdapterError(Exception):
    """Base of all errors that concern one adapter and harm no other."""


class AdapterNotFound(AdapterError):
    """The uri holds no adapter: no such folder, bucket or object."""


class AdapterUnavailable(AdapterError):
    """The source could not be read just now: refused keys, region, network, a broken body. Says
    which."""


class DiskFull(AdapterUnavailable):
    """There is no room for a copy of what the source holds.

    num_bytes  that were asked for
    """

    def __init__(self, message: str, num_bytes: int) -> None:
        super().__init__(message)
        self.num_bytes = num_bytes


class AdapterChanged(AdapterUnavailable):
    """The uri no longer holds the content that was asked for, and no older version can be read."""


class AdapterInvalid(AdapterError):
    """The bytes are there and are not an adapter for this model.

    reason   a class of error, one of REFUSALS
    message  names the tensor or the field at fault
    """

    def __init__(self, reason: str, message: str) -> None:
        assert reason in REFUSALS, reason
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message


class StoreFull(AdapterError):
    """The adapter can never fit: it takes more than half of the arena, or than the host tier."""


REFUSALS = frozenset({
    "unbound_tensor", "shape", "not_finite", "unpaired_tensor", "rank_mismatch", "dtype",
    "empty", "dora", "modules_to_save", "bias", "changes_base", "peft_type",
    "unsupported_parameter", "rank_limit", "alora", "layer_replication", "trainable_tokens",
    "file", "pickle", "config", "ambiguous_layout", "tokenizer", "chat_template",
})  # fmt: skip
