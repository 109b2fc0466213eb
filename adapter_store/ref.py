"""Who an adapter is. Not where its weights are: that is the store's knowledge. No torch here:
everyone may import it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AdapterRef:
    """One version of one adapter; two contents never share a ref.

    adapter_id  the name that tenants and metrics use
    uri         folder or `s3://bucket/prefix` that holds `adapter_config.json` and
                `adapter_model.safetensors`
    revision    digest or ETag of the content ("" = whatever the uri holds now); a new revision is a
                new ref
    base        the base model it was made for ("" = the only one)
    root        the folder of its owner that the uri lies below: from there on no link is followed
                ("" = the uri is the operator's own, and may lead anywhere)
    """

    adapter_id: str
    uri: str
    revision: str = ""
    base: str = ""
    root: str = ""

    def __str__(self) -> str:
        return f"{self.adapter_id}@{self.revision[:12]}" if self.revision else self.adapter_id


def is_digest(text: str) -> bool:
    """Whether a revision is a content digest (sha256 in hex), not a source's own name."""
    return len(text) == 64 and not set(text) - set("0123456789abcdef")
