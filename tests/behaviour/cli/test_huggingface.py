"""``aiockpt convert --hf``: what other tools load, out of any number of ranks."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import shutil
import subprocess
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict_saver import save as save_by_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import aiockpt
from aiockpt.testing import assert_same
from tests.support.commandline import (
    ENVIRONMENT,
    Commands,
    aiockpt_command,
    killed_at_fsync,
)
from tests.support.mesh_ranks import assembled, distributed
from tests.support.saving import flip, names, save
from tests.support.shortages import SystemCallFault, small_disk

MODEL: dict[str, torch.Tensor] = {
    "embed.weight": torch.arange(404.0).view(101, 4).sin(),
    "layers.0.proj": torch.arange(60.0).view(6, 10).cos().bfloat16(),
    "layers.0.mask": torch.tensor([True, False, True]),
    "layers.0.few": torch.arange(3),
    "layers.1.proj": torch.arange(60.0).view(10, 6).t(),
    "none": torch.ones(0, 3),
    "scalar": torch.tensor(2.5),
}
TIED = "head.weight"
LAYOUTS = ["fsdp", "tp", "hsdp", "tp_fsdp", "mixed"]


def cut(kind: str, tensor: torch.Tensor, name: str) -> Any:
    """Return a rank's part of a tensor, as a job of four ranks has it."""
    both = kind in ("hsdp", "tp_fsdp")
    mesh = init_device_mesh("cpu", (2, 2) if both else (4,))
    if kind == "mixed" and name.startswith("layers.0"):
        return tensor  # every rank has all of it
    first = Shard(0) if tensor.dim() else Replicate()
    last = Shard(tensor.dim() - 1) if tensor.dim() else Replicate()
    placements = {
        "fsdp": [first],
        "mixed": [first],
        "tp": [last],
        "hsdp": [Replicate(), first],
        "tp_fsdp": [first, last],
    }
    return distributed(tensor, mesh, *placements[kind])


def sharded(
    path: Path,
    kind: str = "fsdp",
    model: dict[str, torch.Tensor] = MODEL,
    **others: Callable[[int], object],
) -> Path:
    """Save what four ranks have, each its own part."""

    def state_of(rank: int) -> dict[str, Any]:
        held = {name: cut(kind, each, name) for name, each in model.items()}
        if "embed.weight" in held:
            held[TIED] = held["embed.weight"]
        return {"model": held, **{name: of(rank) for name, of in others.items()}}

    return assembled(path, 4, state_of)


def written(directory: Path) -> dict[str, torch.Tensor]:
    """Return what safetensors reads, after a look at the files themselves."""
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        found = load_file(directory / "model.safetensors")
    else:
        said = json.loads(index.read_text())
        found = {}
        for file in sorted({*said["weight_map"].values()}):
            part = load_file(directory / file)
            assert {said["weight_map"][name] for name in part} == {file}
            found |= part
        assert found.keys() == said["weight_map"].keys()
        nbytes = sum(each.nbytes for each in found.values())
        assert said["metadata"]["total_size"] == nbytes
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
        assert b"aiockpt" not in file.read_bytes()
    return found


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Compare names, dtypes, logical shapes and elements."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
        assert found[name].is_contiguous(), name


class TestSources:
    """Several kinds of sources make such a directory."""

    @pytest.mark.parametrize(
        ("kind", "size"), [("fsdp", "5GB"), *((kind, "200") for kind in LAYOUTS)]
    )
    def test_four_ranks(
        self, cli: Commands, tmp_path: Path, kind: str, size: str
    ) -> None:
        """The ranks may cut tensors in any way; the tied one is written once."""
        source, target = sharded(tmp_path / "s-1", kind), tmp_path / "out"
        options = ["--hf", "--select", "model", "--rename", "model="]
        _, said = cli("convert", source, target, *options, "--max-shard-size", size)
        found = written(target)
        equal(found, MODEL)
        assert "the model ties head.weight (as embed.weight)" in said
        files = names(target)
        if size == "5GB":
            assert files == ["model.safetensors"]
        else:
            count = len(files) - 1
            assert count > 1
            shards = [
                f"model-{number:05d}-of-{count:05d}.safetensors"
                for number in range(1, count + 1)
            ]
            assert files == [*shards, "model.safetensors.index.json"]
            large = [each for each in shards if (target / each).stat().st_size > 1616]
            assert large == shards[:1]  # a tensor is larger, and alone
        assert_same(aiockpt.load(target, into=dict.fromkeys(found)), found)

    def test_other_sources(self, cli: Commands, tmp_path: Path) -> None:
        """One rank, files of any tool, a directory of such, and one of DCP."""
        plain = {name: each.contiguous() for name, each in MODEL.items()}
        torch.save(MODEL, tmp_path / "a.pt")
        torch.save(MODEL, tmp_path / "last.ckpt")  # as Lightning does
        save_file(plain, tmp_path / "b.safetensors")
        save(tmp_path / "c-1", OrderedDict(MODEL))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            save_by_dcp(dict(MODEL), checkpoint_id=tmp_path / "dcp", no_dist=True)
        sources = ["a.pt", "b.safetensors", "c-1", "dcp", "last.ckpt"]
        for source in sources:
            target = tmp_path / f"of-{source[0]}"
            size = ["--max-shard-size", "200"]
            cli("convert", tmp_path / source, target, "--hf", *size)
            equal(written(target), MODEL)
        cli("convert", tmp_path / "of-c", tmp_path / "whole", "--hf")
        assert names(tmp_path / "whole") == ["model.safetensors"]
        equal(written(tmp_path / "whole"), MODEL)

    def test_the_part_of_one_rank(self, cli: Commands, tmp_path: Path) -> None:
        """A directory of one rank has that rank's local tensors."""
        source = sharded(tmp_path / "s-1", seed=torch.tensor)
        target = tmp_path / "out"
        cli("convert", source, target, "--hf", "--rank", 1)
        found = written(target)
        assert torch.equal(found["model.embed.weight"], MODEL["embed.weight"][26:52])
        assert found["seed"] == 1

    def test_values_that_differ(self, cli: Commands, tmp_path: Path) -> None:
        """The command chooses none silently, and each option in its message works."""
        source = sharded(tmp_path / "s-1", seed=torch.tensor)
        target = tmp_path / "out"
        error = cli.error("convert", source, target, "--hf")
        assert "its ranks saved different values at seed" in error
        for number, option in enumerate(
            ["--rank-values 0", "--rank-values 2", "--select model", "--rank 0"]
        ):
            assert option.rpartition(" ")[0] in error
            place = tmp_path / f"out-{number}"
            cli("convert", source, place, "--hf", *option.split())
            found = written(place)
            if option.startswith("--rank-values"):
                assert found["seed"] == number * 2
            assert ("seed" in found) is not option.startswith("--select")
        assert not target.exists()
        error = cli.error("convert", source, target, "--hf", "--rank-values", 4)
        assert "none of them was rank 4" in error

    def test_odd_elements(self, cli: Commands, tmp_path: Path) -> None:
        """Conjugated and negated elements are computed, also those of a view."""
        base = torch.randn(4, 6, dtype=torch.complex64)
        state = {
            "conj": base.conj(),
            "negated": torch._neg_view(torch.randn(3)),
            "turned": base.t(),
            "expanded": torch.ones(1).expand(5),
            "rows": base[1:3],
            "parameter": torch.nn.Parameter(torch.randn(3)),
            "float8": torch.randn(5).to(torch.float8_e4m3fn),
        }
        for source in (save(tmp_path / "s-1", state), tmp_path / "s.pt"):
            if source.suffix:
                torch.save(state, source)
            target = tmp_path / f"out-{source.stem}"
            cli("convert", source, target, "--hf")
            found = written(target)
            assert found.keys() == state.keys()
            for name, tensor in state.items():
                dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
                bits = dense.view(torch.uint8)
                assert torch.equal(found[name].view(torch.uint8), bits), name


def tensors(value: Any) -> Any:
    """Make tensors of the floats of a state."""
    if isinstance(value, dict):
        return {key: tensors(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return (*map(tensors, value),)
    return torch.tensor(value) if isinstance(value, float) else value


class TestTransformers:
    """The library that such directories are for, where it is installed."""

    def test_from_pretrained(self, cli: Commands, tmp_path: Path) -> None:
        """A tiny Llama of four ranks, in several files, with its tie and its config."""
        transformers = pytest.importorskip("transformers")
        config = transformers.LlamaConfig(
            vocab_size=99, hidden_size=16, intermediate_size=40, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
        expected = {name: each.detach() for name, each in model.state_dict().items()}

        def state_of(rank: int) -> dict[str, Any]:
            held = {name: cut("fsdp", each, name) for name, each in expected.items()}
            held["lm_head.weight"] = held["model.embed_tokens.weight"]
            return {"model": held, "step": 7, "rank": rank}

        source, target = assembled(tmp_path / "s-1", 4, state_of), tmp_path / "out"
        config.save_pretrained(source)
        options = ["--select", "model", "--rename", "model=", "--max-shard-size", "9KB"]
        cli("convert", source, target, "--hf", *options)
        assert (target / "config.json").exists()
        loaded = transformers.AutoModelForCausalLM.from_pretrained(target)
        found = loaded.state_dict()
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name
        half = tmp_path / "half"
        cli("convert", source, half, "--hf", *options, "--dtype", "bfloat16")
        loaded = transformers.AutoModelForCausalLM.from_pretrained(half, dtype="auto")
        for name, tensor in loaded.state_dict().items():
            assert torch.equal(tensor, expected[name].bfloat16()), name


class TestContents:
    """Names, dtypes, and what has no place there."""

    def test_dtype(self, cli: Commands, tmp_path: Path) -> None:
        """Floating tensors are cast; small floats, integers and complex ones stay."""
        state = {
            "f64": torch.randn(3, dtype=torch.float64),
            "f32": torch.randn(5, 7),
            "f16": torch.randn(3).half(),
            "f8": torch.randn(3).to(torch.float8_e5m2),
            "int": torch.arange(3),
            "bool": torch.tensor([True]),
            "complex": torch.randn(2, dtype=torch.complex64),
            "infinite": torch.tensor([torch.inf, torch.nan]),
        }
        source = save(tmp_path / "s-1", state)
        for name in ("bfloat16", "float16", "float32", "float64"):
            target = tmp_path / name
            cli("convert", source, target, "--hf", "--dtype", name)
            for key, tensor in written(target).items():
                cast = key[:2] in ("f6", "f3", "f1", "in") and key != "int"
                expected = state[key].to(getattr(torch, name)) if cast else state[key]
                assert tensor.dtype == expected.dtype, key
                same = tensor.view(torch.uint8), expected.view(torch.uint8)
                assert torch.equal(*same), key

    def test_numbers_that_are_too_large(self, cli: Commands, tmp_path: Path) -> None:
        """The command refuses numbers that would become infinite."""
        source = save(tmp_path / "s-1", {"a": torch.ones(2), "b": torch.tensor(1e6)})
        target = tmp_path / "out"
        error = cli.error("convert", source, target, "--hf", "--dtype", "float16")
        assert "b has numbers that are too large for float16" in error
        assert names(tmp_path) == ["s-1"]

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ("", "model.a.w model.a.b model.ab optim.w"),
            ("--select model", "model.a.w model.a.b model.ab"),
            ("--select model.a --select optim", "model.a.w model.a.b optim.w"),
            ("--select model --rename model=", "a.w a.b ab"),
            ("--select model --rename model.=x.", "x.a.w x.a.b x.ab"),
            ("--rename model.a=y", "y.w y.b model.ab optim.w"),
            ("--rename model=m --rename model.a=y", "y.w y.b m.ab optim.w"),
            ("--rename =all", "all.model.a.w all.model.a.b all.model.ab all.optim.w"),
            ("--rename model.a.w=z", "z model.a.b model.ab optim.w"),
        ],
    )
    def test_names(
        self, cli: Commands, tmp_path: Path, options: str, expected: str
    ) -> None:
        """A selection keeps its prefix; the longest prefix is renamed, once."""
        model = {"a": {"w": torch.ones(1), "b": torch.ones(2)}, "ab": torch.ones(3)}
        source = save(tmp_path / "s-1", {"model": model, "optim": {"w": torch.ones(4)}})
        cli("convert", source, tmp_path / "out", "--hf", *options.split())
        assert {*written(tmp_path / "out")} == {*expected.split()}

    def test_names_of_lists(self, cli: Commands, tmp_path: Path) -> None:
        """Positions and numbers are words of a name, too."""
        state = {"a": [torch.ones(1), (torch.ones(2),)], 7: {0: torch.ones(3)}}
        source = save(tmp_path / "s-1", state)
        cli("convert", source, tmp_path / "out", "--hf")
        assert {*written(tmp_path / "out")} == {"a.0", "a.1.0", "7.0"}

    @pytest.mark.parametrize(
        ("state", "options", "reason"),
        [
            ({"a": {"b": 1}}, "--rename a.b=x.y", "--select"),
            (
                {"a": {"w": 1.0, "x": 2.0}},
                "--rename a.w=a.x",
                "get the name 'a.x'",
            ),
            ({"a": {"w": 1.0}, "a.w": 2.0}, "", "both get the name 'a.w'"),
            ({"a": 1.0}, "--rename b=c", "begins with 'b' (--rename)"),
            ({"a": 1.0}, "--rename a=", "gets the name ''"),
            ({"": 1.0}, "", "gets the name ''"),
            ({"__metadata__": 1.0}, "", "gets the name '__metadata__'"),
            ({"a": 1.0}, "--select b", "is missing keys: b"),
            ({"a": {(1, 2): 1.0}}, "", "has the type tuple"),
            ({"a": {None: 1.0}}, "", "has the type NoneType"),
            ({"a": (1.0, 2.0)}, "--select a[0]", "is missing keys: a[0]"),
            ({}, "", "there are no tensors"),
            ({"a": {"x": None}}, "--select a", "a.x: no tensor"),
            ({"a": complex(1)}, "", "a: no tensor"),
            ({"a": torch.ones(2).to(torch.complex128)}, "", "the dtype complex128"),
        ],
        ids=str,
    )
    def test_what_has_no_name(
        self, cli: Commands, tmp_path: Path, state: Any, options: str, reason: str
    ) -> None:
        """It is refused, and nothing is written."""
        source = save(tmp_path / "s-1", tensors(state))
        error = cli.error("convert", source, tmp_path / "out", "--hf", *options.split())
        assert reason in error
        assert names(tmp_path) == ["s-1"]

    @pytest.mark.parametrize(
        ("state", "advice"),
        [
            ({"optim": {"s": 1.0}, "model": {"w": 1.0}, "step": 7}, "--select model"),
            ({"step": 7, "all": {"net": {"w": 1.0}, "lr": 1}}, "--select all.net"),
            ({"my model": {"w": 1.0}, "b": [1, "x"]}, "--select 'my model'"),
        ],
    )
    def test_values_are_not_dropped(
        self, cli: Commands, tmp_path: Path, state: Any, advice: str
    ) -> None:
        """Each is named, and the advice works."""
        source, target = save(tmp_path / "s-1", tensors(state)), tmp_path / "out"
        error = cli.error("convert", source, target, "--hf")
        assert re.search(r"(step|lr|b\[0\]).*: no tensor", error)
        assert error.endswith(advice)
        cli("convert", source, target, "--hf", *shlex.split(advice))
        assert len(written(target)) == 1

    @pytest.mark.parametrize("kind", ["checkpoint", "torch"])
    def test_ties(self, cli: Commands, tmp_path: Path, kind: str) -> None:
        """The first name in order; equal values alone are no tie, nor is a part."""
        base = torch.arange(12.0).view(3, 4)
        state = {
            "a": base, "same": base, "view": base.view(3, 4), "part": base[:2],
            "turned": base.t(), "equal": base.clone(), "none": torch.ones(0),
            "nothing": torch.ones(0),
        }  # fmt: skip
        source = tmp_path / "s.pt"
        if kind == "torch":
            torch.save(state, source)
        else:
            source = save(tmp_path / "s-1", state)
        _, said = cli("convert", source, tmp_path / "out", "--hf")
        assert "the model ties same (as a), view (as a)\n" in said
        del state["same"], state["view"]
        equal(written(tmp_path / "out"), state)
        alone = tmp_path / "alone"
        cli("convert", source, alone, "--hf", "--select", "same")
        equal(written(alone), {"same": base})


class TestFiles:
    """The directory has the files of its form."""

    def test_what_comes_along(self, cli: Commands, tmp_path: Path) -> None:
        """The configuration and the tokenizer; nothing else."""
        source = save(tmp_path / "s-1", {"w": torch.ones(3)})
        along = {
            "config.json": '{"dtype": "float32", "torch_dtype": "float32", "a": 1}',
            **dict.fromkeys(
                ["generation_config.json", "tokenizer.json", "tokenizer_config.json",
                 "special_tokens_map.json", "vocab.txt", "merges.txt",
                 "sentencepiece.model", "chat_template.jinja"], "text",
            ),
        }  # fmt: skip
        for name, text in {**along, "notes.txt": "", "optimizer.bin": ""}.items():
            (source / name).write_text(text)
        (source / "tokenizer_cache").mkdir()
        _, said = cli("convert", source, tmp_path / "out", "--hf")
        assert "9 files beside the checkpoint came along" in said
        assert names(tmp_path / "out") == sorted([*along, "model.safetensors"])
        for name, text in along.items():
            assert (tmp_path / "out" / name).read_text() == text
        half = tmp_path / "half"
        cli("convert", source, half, "--hf", "--dtype", "float16")
        config = json.loads((half / "config.json").read_text())
        assert config == {"dtype": "float16", "torch_dtype": "float16", "a": 1}

    def test_overwrite(self, cli: Commands, tmp_path: Path) -> None:
        """`--overwrite` replaces the weights, and keeps what only the directory has."""
        one = save(tmp_path / "s-1", {"a": torch.ones(3), "b": torch.ones(9)})
        two = save(tmp_path / "s-2", {"a": torch.zeros(3)})
        target = tmp_path / "out"
        cli("convert", one, target, "--hf", "--max-shard-size", "20")
        (target / "tokenizer.json").write_text("mine")
        assert "it is there already" in cli.error("convert", two, target, "--hf")
        cli("convert", two, target, "--hf", "--overwrite")
        assert names(target) == ["model.safetensors", "tokenizer.json"]
        assert (target / "tokenizer.json").read_text() == "mine"
        equal(written(target), {"a": torch.zeros(3)})
        (target / "README.md").write_text("precious")
        error = cli.error("convert", one, target, "--hf", "--overwrite")
        assert "README.md" in error
        assert (target / "README.md").read_text() == "precious"
        error = cli.error("convert", one, two, "--hf", "--overwrite")
        assert "it is no Hugging Face directory" in error
        assert_same(aiockpt.load(two), {"a": torch.zeros(3)})
        for name in (tmp_path / "link", tmp_path / "file"):
            name.symlink_to("nowhere") if name.name == "link" else name.touch()
            assert "it is there already" in cli.error("convert", one, name, "--hf")
            cli.error("convert", one, name, "--hf", "--overwrite")
            assert os.path.lexists(name)

    @pytest.mark.parametrize(
        "option", ["--overwrite", pytest.param("", marks=pytest.mark.nightly)]
    )
    def test_a_file_system_that_cannot_exchange_names(
        self, cli: Commands, tmp_path: Path, option: str
    ) -> None:
        """On NFS, which cannot rename without replacing, it takes several steps."""
        target = tmp_path / "out"
        if option:
            one = save(tmp_path / "s-1", {"a": torch.ones(3), "b": torch.ones(9)})
            cli("convert", one, target, "--hf", "--max-shard-size", "20")
            (target / "tokenizer.json").write_text("mine")
        source = save(tmp_path / "s-2", {"a": torch.zeros(3)})
        before = {*names(tmp_path), "out"}
        fault = SystemCallFault("renameat2", "EINVAL")
        options = ["--hf", *filter(None, [option])]
        command = aiockpt_command("convert", source, target, *options)
        done = fault.run(command, env=ENVIRONMENT)
        assert fault.struck
        assert done.returncode == 0, done.stderr
        equal(written(target), {"a": torch.zeros(3)})
        assert (target / "tokenizer.json").exists() is bool(option)
        assert {*names(tmp_path)} == before  # nothing is left beside it

    def test_another_process(self, cli: Commands, tmp_path: Path) -> None:
        """It is writing there, so this one is told."""
        source = save(tmp_path / "s-1", {"a": torch.ones(3)})
        with (tmp_path / ".out.lock").open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            error = cli.error("convert", source, tmp_path / "out", "--hf")
        assert "another process is writing it" in error
        assert names(tmp_path) == [".out.lock", "s-1"]

    def test_options_that_need_each_other(self, cli: Commands, tmp_path: Path) -> None:
        """The message says which option needs which."""
        source = save(tmp_path / "s-1", {"a": torch.ones(3)})
        for option in ("--dtype=float16", "--rename=a=b", "--max-shard-size=5GB"):
            error = cli.error("convert", source, tmp_path / "o", option, code=2)
            assert f"{option.partition('=')[0]} needs --hf" in error
        for name in ("o.pt", "o.safetensors"):
            error = cli.error("convert", source, tmp_path / name, "--hf", code=2)
            assert "--hf writes a directory" in error
        for option in ("--dtype=int8", "--rename=a", "--max-shard-size=big"):
            cli.error("convert", source, tmp_path / "o", "--hf", option, code=2)
        error = cli.error("convert", source, tmp_path / "o", "--hf", "--step=1", code=2)
        assert "--step is for checkpoint directories" in error

    def test_its_own_death(self, cli: Commands, tmp_path: Path) -> None:
        """A killed command leaves the name free, and the next one cleans up."""
        source, target = sharded(tmp_path / "s-1"), tmp_path / "out"
        options = ["--hf", "--max-shard-size", "200"]
        killed_at_fsync(2, "convert", source, target, *options)
        temporary, lock, _ = names(tmp_path)
        assert re.fullmatch(r"\.out\.[0-9a-f]{8}\.tmp", temporary)
        assert lock == ".out.lock"
        made = names(tmp_path / temporary)
        assert "model-00001-of-00004.safetensors" in made
        assert "model-00004-of-00004.safetensors" not in made
        cli("convert", source, target, *options)
        assert names(tmp_path) == ["out", "s-1"]
        equal(written(target), {f"model.{name}": each for name, each in MODEL.items()})

    def test_a_full_disk(self, cli: Commands, tmp_path: Path) -> None:
        """The error says so, whichever file it hits; the space is free again."""
        state = {f"{n}": torch.zeros(100_000) for n in range(8)}
        source = save(tmp_path / "s-1", state)
        with small_disk(tmp_path / "disk", 2 << 20) as disk:
            for size in ("5GB", "500KB"):
                target = disk / "out"
                options = ["--hf", "--max-shard-size", size]
                error = cli.error("convert", source, target, *options)
                assert "No space left on device" in error
                assert f"{target}/model" in error
                assert names(disk) == []

    def test_damage(
        self, cli: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The command writes no directory of a damaged source."""
        source, target = sharded(tmp_path / "s-1"), tmp_path / "out"
        options = ["--hf", "--select", "model.embed"]
        sync = os.fsync

        def damaging(fd: int) -> None:
            sync(fd)
            (written,) = tmp_path.glob(".out.*.tmp/model.safetensors")
            if os.path.samestat(os.fstat(fd), written.stat()):
                flip(written, -5)

        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", damaging)
            error = cli.error("convert", source, target, *options)
        assert "the disk does not hold what was written" in error
        assert names(tmp_path) == ["s-1"]
        flip(source / "checkpoint_2.safetensors", -5)
        error = cli.error("convert", source, target, *options)
        assert "checkpoint_2.safetensors" in error
        shutil.copy(source / "checkpoint_1.safetensors", tmp_path / "one.safetensors")
        error = cli.error("convert", tmp_path / "one.safetensors", target, "--hf")
        assert "load the directory of all ranks" in error
        assert names(tmp_path) == ["one.safetensors", "s-1"]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [pytest.param("fsdp", "", marks=pytest.mark.nightly), ("tp", "bfloat16")],
)
def test_memory(tmp_path: Path, kind: str, dtype: str) -> None:
    """One output file, and little more, also where every element is copied and cast."""
    mib, count = 1 << 20, 6
    model = {f"w{n}": torch.full((1024, 8192), float(n)) for n in range(count)}
    source = sharded(tmp_path / "s-1", kind, model)
    small = sharded(tmp_path / "s-2", kind)
    del model

    def peak(*arguments: object) -> int:
        """Return the largest memory of a command, in bytes."""
        process = subprocess.Popen(aiockpt_command(*arguments), env=ENVIRONMENT)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        return used.ru_maxrss * 1024

    least = peak("convert", small, tmp_path / "small", "--hf")
    size = (48 if dtype else 96) * mib
    options = ["--hf", "--max-shard-size", f"{size}"]
    options += ["--dtype", dtype] if dtype else []
    # On a busy host the system may give huge pages that nobody fills, so it is tried
    # again.
    tries = (tmp_path / f"out-{number}" for number in range(3))
    peaks = (peak("convert", source, each, *options) for each in tries)
    assert any(most - least <= size + 64 * mib for most in peaks)
    assert len(names(tmp_path / "out-0")) == 1 + 2
