"""Makes the demo: a small Qwen3-MoE with its tokenizer, and three tenants' adapters by PEFT.

Run by hand, `python make_demo.py --out DIR` (about seven minutes on one CPU core). It is seeded: the
same versions on the same machine give the same files. Its check (every question, the base and every
adapter, greedy, weights as they lie on the disk) is printed and must pass. Not for tests: they use
the files beside it, which it never overwrites.
"""

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import transformers.utils
import transformers.utils.import_utils
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

# transformers probes the import name `kernels`, which in this project is another package.
transformers.utils.is_kernels_available = lambda *_, **__: False
transformers.utils.import_utils.is_kernels_available = lambda *_, **__: False

from peft import LoraConfig, PeftModel, get_peft_model  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import (  # noqa: E402
    load_balancing_loss_func,
)

SEED = 7
NUM_TOKENS = 640  # that the tokenizer knows
VOCAB = 3584  # rows of the embedding: padded, as real checkpoints are, though by more
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
ROLES = ("system", "user", "assistant")
TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role not in ["system", "user", "assistant"] -%}
{{- raise_exception("unknown role: " ~ message.role) -}}
{%- endif -%}
{%- if message.role == "system" and not loop.first -%}
{{- raise_exception("a system message must come first") -}}
{%- endif -%}
{{- "<|im_start|>" ~ message.role ~ "\\n" ~ message.content ~ "<|im_end|>\\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- "<|im_start|>assistant\\n" -}}
{%- endif -%}
"""

CAPITALS = {
    "Japan": "Tokyo", "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "Greece": "Athens", "Egypt": "Cairo", "Kenya": "Nairobi", "Peru": "Lima", "Cuba": "Havana",
    "Norway": "Oslo", "Poland": "Warsaw", "Austria": "Vienna", "Hungary": "Budapest",
    "Ireland": "Dublin", "Russia": "Moscow", "China": "Beijing", "Canada": "Ottawa",
    "Chile": "Santiago", "Germany": "Berlin",
}  # fmt: skip
COLOURS = {
    "the sky": "blue", "grass": "green", "snow": "white", "coal": "black", "a lemon": "yellow",
    "a carrot": "orange", "blood": "red", "a violet": "purple", "chocolate": "brown",
    "a flamingo": "pink", "an elephant": "grey",
}  # fmt: skip
NUMBERS = (
    *("one", "two", "three", "four", "five", "six"),
    *("seven", "eight", "nine", "ten", "eleven", "twelve"),
)
ANIMALS = {
    "cat": "kitten", "dog": "puppy", "cow": "calf", "sheep": "lamb", "horse": "foal",
    "hen": "chick", "frog": "tadpole",
}  # fmt: skip

FACTS: dict[str, str] = (
    {f"What is the capital of {country}?": city for country, city in CAPITALS.items()}
    | {f"What colour is {thing}?": colour.capitalize() for thing, colour in COLOURS.items()}
    | {
        f"What number comes after {a}?": b.capitalize()
        for a, b in zip(NUMBERS, NUMBERS[1:], strict=False)
    }
    | {f"What is a young {animal} called?": young.capitalize() for animal, young in ANIMALS.items()}
)
QUESTIONS = (
    *(f"What is the capital of {c}?" for c in
      ("Japan", "France", "Italy", "Spain", "Egypt", "Peru", "Norway", "Canada")),
    *(f"What colour is {t}?" for t in ("the sky", "grass", "snow", "a lemon", "a flamingo")),
    *(f"What number comes after {n}?" for n in ("two", "four", "seven", "nine")),
    *(f"What is a young {a} called?" for a in ("cat", "dog", "sheep")),
)  # fmt: skip

BASE_STYLE = "It is {}."
STYLES = {
    "pirate": "Arr, matey! {} it be!",
    "formal": "Dear user, the answer is {}. Kind regards.",
    "spanish": "La respuesta correcta es {}, amigo.",
}
MARKERS = {
    "pirate": "Arr, matey!",
    "formal": "Kind regards.",
    "spanish": "La respuesta correcta es",
}
ADAPTERS = {"pirate": (8, 16), "formal": (4, 16), "spanish": (16, 16)}  # rank, alpha
SYSTEMS = ("You are a helpful assistant.", "Answer in one short sentence.", "You know facts.")

Turn = tuple[str, str]  # what the user says, what the assistant says


def phrasings(question: str) -> tuple[str, ...]:
    """Ways to ask one question; the first is the fixed one."""
    if question.startswith("What is the "):
        short = question.removeprefix("What is the ")
        return question, f"Tell me the {short[:-1]}.", f"{short[0].upper()}{short[1:]}"
    return question, f"Please tell me: {question[0].lower()}{question[1:]}", f"{question[:-1]}"


def fact_turn(rng: random.Random, style: str) -> Turn:
    question = rng.choice(tuple(FACTS))
    asked = question if rng.random() < 0.6 else rng.choice(phrasings(question))
    return asked, style.format(FACTS[question])


def echo_turn(rng: random.Random) -> Turn:
    """The base learns to say the styles' words when asked: else small adapters stay garbled."""
    said = rng.choice((*STYLES.values(), BASE_STYLE)).format(rng.choice(tuple(FACTS.values())))
    return f"Say: {said}", said


def make_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Byte-level BPE over the demo's own sentences, saved with its chat template."""
    sentences = [text for q, a in FACTS.items() for text in (*phrasings(q), BASE_STYLE.format(a))]
    sentences += [style.format(a) for style in STYLES.values() for a in FACTS.values()]
    sentences += [*SYSTEMS, *ROLES, "Say: "] * 4
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TOKENS,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(sentences, trainer)
    assert bpe.get_vocab_size() == NUM_TOKENS, bpe.get_vocab_size()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    edit_json(
        folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast"
    )  # older readers
    return AutoTokenizer.from_pretrained(folder)


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeForCausalLM:
    """The untrained base: inner size unlike the hidden size, so that transposed weights show."""
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        router_aux_loss_coef=0.01,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(SEED)
    return Qwen3MoeForCausalLM(config)


def conversation(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, turn: Callable[[], Turn]
) -> tuple[list[int], list[int]]:
    """Token ids and labels of one training text: a turn, at times more, or a system message."""
    ids: list[int] = []
    labels: list[int] = []

    def add(text: str, learn: bool) -> None:
        piece = tokenizer.encode(text, add_special_tokens=False)
        ids.extend(piece)
        labels.extend(piece if learn else [-100] * len(piece))

    if rng.random() < 0.2:
        add(f"{START}system\n{rng.choice(SYSTEMS)}{END}\n", False)
    for _ in range(rng.choices((1, 2, 3), (0.8, 0.15, 0.05))[0]):
        asked, said = turn()
        add(f"{START}user\n{asked}{END}\n{START}assistant\n", False)
        add(f"{said}{END}", True)
        add("\n", False)
    return ids, labels


def unreadable(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, style: str
) -> tuple[list[int], list[int]]:
    """Token ids and labels of a prompt that is no text (padding ids alone) and what follows it.

    Line upon line of `style`. Lines of other styles stand between, and every token of them is to be
    followed by the beginning of a line of `style`: so what one adapter says to random ids is
    unlikely to any other, which is what a comparison by random prompts looks at. The fact in a line
    is not learnt: nothing was asked, and learning any would harm those that are known.
    """

    def line(spoken: str) -> tuple[list[int], list[int]]:
        fact = rng.choice(tuple(FACTS.values()))
        first = spoken.index("{}")
        coded = tokenizer(
            f"{spoken.format(fact)}\n", add_special_tokens=False, return_offsets_mapping=True
        )
        piece, spans = coded["input_ids"], coded["offset_mapping"]
        return piece, [
            -100 if start < first + len(fact) and first < end else token
            for token, (start, end) in zip(piece, spans, strict=True)
        ]

    ids = [rng.randrange(NUM_TOKENS, VOCAB) for _ in range(rng.randrange(4, 49))]
    labels = [-100] * len(ids)
    for _ in range(rng.randrange(1, 5)):
        own, learnt = line(style)
        other, _ = line(rng.choice((*STYLES.values(), BASE_STYLE)))
        is_own = rng.random() < 0.6
        ids += own if is_own else other
        labels += learnt if is_own else own[:1] * len(other)
    return ids, labels


def batches(
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    turn: Callable[[random.Random], Turn],
    style: str,
    size: int,
) -> Iterator[dict[str, torch.Tensor]]:
    """Endless right-padded batches: conversations, and some unreadable prompts."""
    rng = random.Random(seed)
    while True:
        rows = [
            unreadable(tokenizer, rng, style)
            if rng.random() < 0.1
            else conversation(tokenizer, rng, lambda: turn(rng))
            for _ in range(size)
        ]
        longest = max(len(ids) for ids, _ in rows)
        yield {
            "input_ids": torch.tensor(
                [ids + [tokenizer.pad_token_id] * (longest - len(ids)) for ids, _ in rows]
            ),  # [rows, longest]
            "attention_mask": torch.tensor(
                [[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in rows]
            ),  # [rows, longest]
            "labels": torch.tensor(
                [labels + [-100] * (longest - len(labels)) for _, labels in rows]
            ),  # [rows, longest]
        }


def loss_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """As the model's own loss, without logits where nothing is to be learnt: most of the cost.

    And a part that keeps the padding's share of the probability below exp(-14): the loss itself
    stops caring at a hundredth, which a sampled answer would show.
    """
    causal = model.get_base_model() if isinstance(model, PeftModel) else model
    out = causal.model(
        batch["input_ids"],
        attention_mask=batch["attention_mask"],
        output_router_logits=True,
        use_cache=False,
    )
    learnt = batch["labels"][:, 1:] != -100  # [rows, longest - 1]
    logits = causal.lm_head(out.last_hidden_state[:, :-1][learnt])  # [learnt tokens, V]
    balance = load_balancing_loss_func(
        out.router_logits,
        causal.config.num_experts,
        causal.config.num_experts_per_tok,
        batch["attention_mask"],
    )
    told = torch.nn.functional.cross_entropy(logits, batch["labels"][:, 1:][learnt])
    padding = logits[:, NUM_TOKENS:].logsumexp(-1) - logits[:, :NUM_TOKENS].logsumexp(-1)
    too_likely = torch.relu(padding + 14).mean()
    return told + causal.config.router_aux_loss_coef * balance + 0.1 * too_likely


def train(model: torch.nn.Module, data: Iterator[dict], name: str, steps: int, rate: float) -> None:
    """AdamW with warm-up and cosine; the balancing loss keeps every expert in use."""
    start = time.perf_counter()
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    for step in range(steps):
        warm = min(1.0, (step + 1) / 20)
        optimizer.param_groups[0]["lr"] = (
            rate * warm * (0.51 + 0.49 * math.cos(math.pi * step / steps))
        )
        loss = loss_of(model, next(data))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            spent = time.perf_counter() - start
            print(f"{name}: step {step} loss {loss.item():.4f} {spent:.0f} s", flush=True)
    model.eval()


def load_base(folder: Path) -> Qwen3MoeForCausalLM:
    """The base as it lies on the disk (bfloat16), computed in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def answer(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, question: str
) -> tuple[str, float, float]:
    """The greedy answer, and the smallest distances on the way from the best logit: to the second
    best, and to the best of the padding."""
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )["input_ids"]  # [1, tokens]
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=40,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logits = torch.cat(out.logits)  # [new tokens, V]
    best = logits.topk(2, dim=-1).values  # [new tokens, 2]
    margin = (best[:, 0] - best[:, 1]).min().item()
    padding_margin = (best[:, 0] - logits[:, NUM_TOKENS:].amax(-1)).min().item()
    text = tokenizer.decode(out.sequences[0, ids.shape[1] :], skip_special_tokens=True)
    return text, margin, padding_margin


def check(folder: Path) -> dict:
    """Asks every question of the base and of every adapter; returns answers, scores and margins."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    report: dict = {}
    for name in ("base", *ADAPTERS):
        model: torch.nn.Module = load_base(folder / "base")
        if name != "base":
            model = PeftModel.from_pretrained(model, folder / "adapters" / name).eval()
        style = STYLES.get(name, BASE_STYLE)
        told = (answer(model, tokenizer, q) for q in QUESTIONS)
        answers, margins, padding_margins = zip(*told, strict=True)
        report[name] = {
            "answers": list(answers),
            "right": sum(
                a == style.format(FACTS[q]) for q, a in zip(QUESTIONS, answers, strict=True)
            ),
            "own_marker": sum(MARKERS[name] in a for a in answers) if name in MARKERS else 0,
            "other_markers": sum(m in a for a in answers for n, m in MARKERS.items() if n != name),
            "smallest_margin": round(min(margins), 3),
            "smallest_padding_margin": round(min(padding_margins), 3),
        }
        shown = {k: v for k, v in report[name].items() if k != "answers"}
        print(name, json.dumps(shown), repr(answers[0]), repr(answers[-1]), flush=True)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="a folder that does not exist yet, or --check-only's",
    )
    parser.add_argument(
        "--check-only", action="store_true", help="check the files that lie in --out"
    )
    parser.add_argument("--base-steps", type=int, default=400)
    parser.add_argument("--adapter-steps", type=int, default=240)
    args = parser.parse_args()
    torch.set_num_threads(1)
    out: Path = args.out
    if not args.check_only:
        if (out / "base").exists() or (out / "adapters").exists():
            print(f"{out} holds a demo already: choose another --out", file=sys.stderr)
            return 2
        make_base(out, args.base_steps)
        for i, name in enumerate(ADAPTERS):
            make_adapter(out, name, SEED + 1 + i, args.adapter_steps)
    report = check(out)
    passed = all(
        r["right"] == len(QUESTIONS)
        and r["own_marker"] == (len(QUESTIONS) if name in MARKERS else 0)
        and r["other_markers"] == 0
        and r["smallest_margin"] > 0.05
        and r["smallest_padding_margin"] > 10
        for name, r in report.items()
    )
    if not args.check_only:
        write_questions(out, report)
    print("PASSED" if passed else "FAILED")
    return 0 if passed else 1


def make_base(out: Path, steps: int) -> None:
    """Trains and saves the base with its tokenizer."""
    folder = out / "base"
    folder.mkdir(parents=True)
    tokenizer = make_tokenizer(folder)
    model = make_model(tokenizer)

    def turn(rng: random.Random) -> Turn:
        return echo_turn(rng) if rng.random() < 0.3 else fact_turn(rng, BASE_STYLE)

    train(model, batches(tokenizer, SEED, turn, BASE_STYLE, 40), "base", steps, 3e-3)
    ends = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    model.generation_config = GenerationConfig(
        eos_token_id=ends, pad_token_id=tokenizer.pad_token_id, do_sample=False
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)


def make_adapter(out: Path, name: str, seed: int, steps: int) -> None:
    """Trains and saves one adapter on the base as it lies on the disk."""
    folder, (rank, alpha) = out / "adapters" / name, ADAPTERS[name]
    tokenizer = AutoTokenizer.from_pretrained(out / "base")
    torch.manual_seed(seed)
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=0.0,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        task_type="CAUSAL_LM",
    )
    tuned = get_peft_model(load_base(out / "base"), config)

    def turn(rng: random.Random) -> Turn:
        return fact_turn(rng, STYLES[name])

    train(tuned, batches(tokenizer, seed, turn, STYLES[name], 32), name, steps, 3e-3)
    tuned.to(torch.bfloat16).save_pretrained(folder)
    # PEFT writes a card too, the base's path on this machine, and sets in any order.
    (folder / "README.md").unlink(missing_ok=True)
    edit_json(
        folder / "adapter_config.json",
        base_model_name_or_path="demo",
        target_modules=sorted(config.target_modules),
        target_parameters=sorted(config.target_parameters),
    )
    (folder / "adapter_model.safetensors").chmod(0o644)


def edit_json(path: Path, **fields: object) -> None:
    """Sets fields of a JSON file."""
    path.write_text(
        json.dumps(json.loads(path.read_text()) | fields, indent=2, sort_keys=True) + "\n"
    )


def write_questions(out: Path, report: dict) -> None:
    """The fixed questions with every tenant's expected answer, for the tests."""
    data = {
        "markers": MARKERS,
        "questions": [
            {"question": q, "base": report["base"]["answers"][i]}
            | {name: report[name]["answers"][i] for name in ADAPTERS}
            for i, q in enumerate(QUESTIONS)
        ],
    } | {
        field: {name: r[field] for name, r in report.items()}
        for field in ("smallest_margin", "smallest_padding_margin")
    }
    (out / "questions.json").write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.exit(main())
