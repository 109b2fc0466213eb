"""Small tokenizers of other kinds than the demo's, made for tests. Not for training or tables of
real ones."""

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models

from model_runner.tokenizer import Tokenizer
from tests.model_runner.demo import BASE_DIR

HARMONY = (
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
)
HARMONY_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}"
    "{% if message.role == 'assistant' %}<|channel|>final{% endif %}"
    "<|message|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def save(fast: tokenizers.Tokenizer, folder: Path, **config: object) -> Tokenizer:
    """The tokenizer as a folder, read again. config  of tokenizer_config.json"""
    folder.mkdir(parents=True, exist_ok=True)
    fast.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(folder)


def sentencepiece(folder: Path) -> Tokenizer:
    """As Llama 2 and Mixtral have it: words with a leading mark, single bytes for all else."""
    words = ["<s>", "</s>", "<unk>", *(f"<0x{b:02X}>" for b in range(256))]
    words += ["▁", "▁It", "▁is", "To", "kyo", "▁To", ".", "▁▁", "東", "~"]
    scored = [(word, -float(word.startswith("<"))) for word in words]
    fast = tokenizers.Tokenizer(
        models.Unigram(scored, unk_id=words.index("<unk>"), byte_fallback=True)
    )
    fast.decoder = decoders.Sequence(
        [
            decoders.Replace("~", ""),  # a token without text
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    fast.add_special_tokens(["<s>", "</s>"])
    return save(fast, folder, eos_token="</s>")


def harmony(folder: Path) -> Tokenizer:
    """The demo's with the special tokens of GPT-OSS, and a template that uses them as its does."""
    fast = tokenizers.Tokenizer.from_file(str(BASE_DIR / "tokenizer.json"))
    fast.add_special_tokens([AddedToken(name, special=True) for name in HARMONY])
    made = save(fast, folder, eos_token="<|return|>", chat_template=HARMONY_TEMPLATE)
    assert made.has_chat_template
    return made
