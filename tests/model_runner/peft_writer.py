"""Writes tiny models, adapters over them and the logits that PEFT computes, with whatever PEFT and
transformers there are. Runs by itself in another environment, so it imports nothing of ours.

    python peft_writer.py JOBS OUT

JOBS  JSON: prompt (token ids), models {name: [configuration class, its fields]}, and cases: a list
      of {model, case, kind (class of PEFT's configuration), fields, save (of save_pretrained)}
OUT   gets model/base, and model/case for each case with the files that PEFT wrote; written.json
      says the versions and, of each case, either the error or the names and shapes of its tensors;
      logits.safetensors holds model/base and model/case, [T, V] each.

Not here: which cases there are, and what must come of them (test_peft_versions.py).
"""

import json
import sys
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

DRAWN = ("lora_", "ia3_", "hada_", "prompt_embeddings", "trainable_tokens")


def make_model(kind: str, fields: dict[str, Any], folder: Path) -> torch.nn.Module:
    """A random model, saved as this transformers saves it; made anew by its seed each time."""
    config = getattr(transformers, f"{kind}Config")(**fields)
    torch.manual_seed(7)
    name = f"{kind.removesuffix('Text')}ForCausalLM"
    model = getattr(transformers, name)(config).eval().float()
    with torch.no_grad():
        for path, weight in (*model.named_parameters(), *model.named_buffers()):
            if path.endswith("correction_bias"):
                weight.normal_(0, 0.1)
            elif weight.is_floating_point() and "inv_freq" not in path:
                weight.normal_(1 if "norm" in path else 0, 0.2)
    if not folder.exists():
        model.save_pretrained(folder)
    return model


def write_adapter(
    model: torch.nn.Module, kind: str, fields: dict[str, Any], folder: Path, **save: Any
) -> torch.nn.Module:
    """PEFT's adapter over the model, its factors random (B is zero when PEFT makes it)."""
    config = getattr(peft, f"{kind}Config")(task_type="CAUSAL_LM", **fields)
    wrapped = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, weight in wrapped.named_parameters():
            if any(part in name for part in DRAWN):
                weight.normal_(0, 0.15)
    wrapped.save_pretrained(folder, **save)
    return wrapped


def main(jobs_file: Path, out: Path) -> None:
    """Everything that the jobs ask for. A case that fails is told and left out."""
    jobs = json.loads(jobs_file.read_text())
    prompt = torch.tensor([jobs["prompt"]])
    logits, cases = {}, {}

    @torch.no_grad()
    def run(model: torch.nn.Module) -> torch.Tensor:
        return model(prompt).logits[0, -prompt.shape[1] :].clone()  # behind a prompt of PEFT's own

    for name, (kind, fields) in jobs["models"].items():
        logits[f"{name}/base"] = run(make_model(kind, fields, out / name / "base"))
    for job in jobs["cases"]:
        name, case = job["model"], f"{job['model']}/{job['case']}"
        model = make_model(*jobs["models"][name], out / name / "base")
        try:
            wrapped = write_adapter(model, job["kind"], job["fields"], out / case, **job["save"])
            logits[case] = run(wrapped)
            tensors = load_file(out / case / "adapter_model.safetensors")
            cases[case] = {"tensors": {key: list(t.shape) for key, t in tensors.items()}}
        except Exception as error:  # told to the test, which knows whether that is right
            cases[case] = {"error": f"{type(error).__name__}: {error}"}
    save_file(logits, out / "logits.safetensors")
    versions = {"peft": peft.__version__, "transformers": transformers.__version__}
    (out / "written.json").write_text(json.dumps(versions | {"cases": cases}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
