"""Chats -> token ids, by the template of the base model or of the adapter; what is known of the
extras of adapters.

What is known may be old: the engine compares it with what the adapter brings when its turn comes,
and says so. Not here: templates themselves (tokenizer.py, template_sandbox.py).
"""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from adapter_store.extras import NO_EXTRAS, AdapterExtras
from adapter_store.ref import AdapterRef
from model_runner.template_sandbox import TemplateFailure, TemplateSandbox
from model_runner.tokenizer import TemplateRefused, Tokenizer, plain_messages

INLINE_CHARS = 8192
"""Longer texts are tokenized in a thread: the loop has other streams to serve."""

_MAX_KNOWN = 10_000
_MAX_KNOWN_CHARS = 64 << 20


class ChatPrompts:
    """Of one base model. One event loop owns it.

    sandbox  where adapters' templates are rendered; several of these may share one
    """

    def __init__(self, tokenizer: Tokenizer, sandbox: TemplateSandbox | None = None) -> None:
        self._tokenizer = tokenizer
        self._sandbox = sandbox or TemplateSandbox()
        self._known: OrderedDict[AdapterRef, AdapterExtras] = OrderedDict()
        self._known_chars = 0

    def known(self, adapter: AdapterRef | None) -> AdapterExtras | None:
        """What the adapter brought when it was last used here; None: it was not."""
        if adapter is None:
            return NO_EXTRAS
        return self._known.get(adapter)

    def remember(self, adapter: AdapterRef, extras: AdapterExtras) -> None:
        """A prompt was made with these; the longest untouched are forgotten in time."""
        self.forget(adapter)
        self._known[adapter] = extras
        self._known_chars += len(extras.chat_template)
        while len(self._known) > _MAX_KNOWN or self._known_chars > _MAX_KNOWN_CHARS:
            self.forget(next(iter(self._known)))

    def forget(self, adapter: AdapterRef) -> None:
        """It may bring others by now."""
        gone = self._known.pop(adapter, None)
        self._known_chars -= len(gone.chat_template) if gone else 0

    async def encode(
        self,
        messages: Sequence[Mapping[str, object]],
        adapter: AdapterRef | None = None,
        extras: AdapterExtras = NO_EXTRAS,
        owner: str = "",
        **template_kwargs: object,
    ) -> list[int]:
        """Token ids of a conversation, ready for the answer; see `Tokenizer.encode_chat`.

        owner  whose adapter it is: their templates run one at a time
        Errors:  TemplateRefused, with the adapter's name where it is the adapter's; ValueError if
                 a message is malformed.
        """
        tokenizer = self._tokenizer
        if not extras.chat_template:
            size = sum(64 + len(str(message.get("content", ""))) for message in messages)
            if size <= INLINE_CHARS:
                return tokenizer.encode_chat(messages, **template_kwargs)
            return await asyncio.to_thread(tokenizer.encode_chat, messages, **template_kwargs)
        known = {"messages": plain_messages(messages), "add_generation_prompt": True}
        known |= {"tools": None, "documents": None} | template_kwargs
        known |= tokenizer.special_tokens | dict(extras.special_tokens)
        try:
            text = await self._sandbox.render(owner, extras.chat_template, known)
        except TemplateFailure as failure:
            name = adapter.adapter_id if adapter else ""
            words = f"the chat template of adapter {name} failed: {failure}"
            raise TemplateRefused(words) from None
        if len(text) <= INLINE_CHARS:
            return tokenizer.encode(text, add_special_tokens=False)
        return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=False)
