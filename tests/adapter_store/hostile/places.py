"""Mutations of the folder: what stands where a file should, beside it, or comes meanwhile."""

import json
import os
import socket
from functools import partial
from pathlib import Path

from tests.adapter_store.hostile import archives
from tests.adapter_store.hostile.draft import (
    CONFIG,
    GIB,
    LAYER,
    MIB,
    WEIGHTS,
    Draft,
    Maker,
    Mutation,
    Random,
    adder,
)

MUTATIONS: dict[str, Mutation] = {}
_mutation = adder(MUTATIONS)


def special_maker(rng: Random, name: str) -> Maker:
    """Of what is no file, or no file of this folder, at a place of this name."""
    where = [f"../outside/{name}", "nowhere", name, "/dev/zero", "/dev/stdin", "/etc/passwd", ".."]
    link = partial(_link, to=rng.choice([*where, f"../outside/../outside/{name}"]))
    device = partial(_device, minor=rng.choice([3, 5]))
    others: list[Maker] = [os.mkfifo, make_socket, os.mkdir, _full_folder, device]
    return link if rng.random() < 0.5 else rng.choice(others)


def _link(at: Path, to: str) -> None:
    at.symlink_to(to)


@_mutation()
def no_files(draft: Draft, rng: Random) -> None:
    """Links (to a good file outside, to nothing, to itself, to devices), pipes, sockets, devices,
    folders: none of them is followed or waited for."""
    name = rng.choice([CONFIG, WEIGHTS])
    draft.makers[name] = special_maker(rng, name)


def make_socket(at: Path) -> None:
    """A socket's path is short, so it is made from inside the folder."""
    with socket.socket(socket.AF_UNIX) as made:
        here = os.open(at.parent, os.O_RDONLY)
        try:
            made.bind(f"/proc/self/fd/{here}/{at.name}")
        finally:
            os.close(here)


def _device(at: Path, minor: int) -> None:
    """/dev/null or /dev/zero; who may not make them makes a pipe."""
    try:
        os.mknod(at, 0o20666, os.makedev(1, minor))
    except PermissionError:
        os.mkfifo(at)


def _full_folder(at: Path) -> None:
    at.mkdir()
    (at / at.name).write_bytes(b"{}")


@_mutation(must_refuse=False)
def odd_neighbours(draft: Draft, rng: Random) -> None:
    """Beside a good adapter: whatever it is, it is left alone."""
    makers: dict[str, Maker] = {
        "adapter_model.bin": archives.write_pickle,
        "adapter_model.pt": os.mkfifo,
        "adapter_model.pth": partial(_link, to="/dev/zero"),
        "adapter_model.safetensors.index.json": lambda at: at.write_text(
            '{"weight_map": {"a": "../outside/adapter_model.safetensors"}}'
        ),
        "model.ckpt": archives.write_zip_bomb,
        "a\nb\x1b[31m.bin": make_socket,
        os.fsdecode(b"\xff\xfe.safetensors"): os.mkdir,
        "x" * 250 + ".pt": lambda at: at.write_bytes(b""),
        "configuration.py": lambda at: at.write_text("raise SystemExit"),
    }
    draft.makers |= {name: makers[name] for name in rng.sample(sorted(makers), rng.randint(1, 5))}


@_mutation(must_refuse=False, share=0.1)
def many_neighbours(draft: Draft, rng: Random) -> None:
    for i in range(rng.choice([100, 2000])):
        draft.makers[f"{i}.bin"] = Path.touch


@_mutation()
def missing_files(draft: Draft, rng: Random) -> None:
    for name in rng.choice([[CONFIG], [WEIGHTS], [CONFIG, WEIGHTS]]):
        draft.makers[name] = None


@_mutation()
def pickles(draft: Draft, rng: Random) -> None:
    """Code, an archive that unfolds, a pickle with a good name: nothing of them is run or read."""
    write = rng.choice([
        archives.write_pickle, archives.write_zip_bomb,
        archives.write_torch_archive, archives.write_gzip_bomb,
    ])  # fmt: skip
    if rng.random() < 0.5:
        draft.makers[WEIGHTS] = write
    else:
        draft.makers[WEIGHTS] = None
        names = ["adapter_model.bin", "adapter_model.pt", "adapter_model.pth"]
        draft.makers[rng.choice(names)] = write


@_mutation()
def sparse_files(draft: Draft, rng: Random) -> None:
    """Files that take no disk: of any size, with a header that is right for it or none."""
    size = rng.choice([300 * MIB, 2 * GIB, 8 * GIB, 1 << 40])
    kind = rng.randrange(4)
    if kind == 0:
        draft.makers[CONFIG] = partial(_sparse, size=size, head=draft.config_bytes())
        return
    entry = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    if kind == 1:
        head, size = draft.weights_bytes(), size + 8
    elif kind == 2:
        raw = json.dumps({draft.entries[1][0]: entry}).encode()
        head, size = len(raw).to_bytes(8, "little") + raw, 8 + len(raw) + size
    else:
        head = rng.choice([47 * MIB, size - 8]).to_bytes(8, "little") + b"{"
    draft.makers[WEIGHTS] = partial(_sparse, size=size, head=head)


def _sparse(at: Path, size: int, head: bytes) -> None:
    at.write_bytes(head)
    os.truncate(at, size)


@_mutation(must_refuse=False)
def changed_while_read(draft: Draft, rng: Random) -> None:
    """Cut, made longer, replaced by a link, a pipe or another file, or gone."""

    def change(folder: Path) -> None:
        weights = folder / WEIGHTS
        if kind == "cut":
            os.truncate(weights, weights.stat().st_size // 2)
        elif kind == "longer":
            with weights.open("ab") as file:
                file.truncate(weights.stat().st_size + GIB)
        elif kind == "other bytes":
            with weights.open("r+b") as file:
                file.write(b"\xff" * 16)
        else:
            weights.unlink()
            if kind == "link":
                _link(weights, f"../outside/{WEIGHTS}")
            elif kind == "pipe":
                os.mkfifo(weights)
            elif kind == "config":
                (folder / CONFIG).unlink()

    kind = rng.choice(["cut", "longer", "other bytes", "link", "pipe", "gone", "config"])
    draft.meanwhile = change


@_mutation(must_refuse=False, share=0.1)
def rank_of_one_expert(draft: Draft, rng: Random) -> None:
    """One expert's pair of the largest rank: the others' share is zeros that the file lacks."""
    rank, size = 256, 256 * 40 * 2
    name = f"{LAYER}mlp.experts.1.up_proj.lora_"
    draft.config["r"] = rank
    draft.entries = [
        (f"{name}A.weight", {"dtype": "F16", "shape": [rank, 40], "data_offsets": [0, size]}),
        (
            f"{name}B.weight",
            {"dtype": "F16", "shape": [24, rank], "data_offsets": [size, size + 512 * 24]},
        ),
    ]
    draft.data = bytes(size + 512 * 24)
