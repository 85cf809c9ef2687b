"""Decides which names from a checkpoint may become the path of a file.

A checkpoint may come from a stranger, and its manifest is text that anybody can write with a matching digest. A name of
a configuration file in it becomes the path of a file in the destination, so only the names in the table below are
accepted: what transformers, diffusers and PEFT read as configuration or vocabulary. Weights (``model.safetensors``,
``pytorch_model.bin``, which loaders unpickle) and Python code are not among them.
"""

from __future__ import annotations

import posixpath
import re

from ort_zero.errors import CheckpointError

CONFIG_FILES = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "image_processor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "feature_extractor_config.json",
    "adapter_config.json",
    "model_index.json",
    "scheduler_config.json",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "audio_tokenizer_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tokenizer.model.v3",
    "tiktoken.model",
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "vocab-src.json",
    "vocab-tgt.json",
    "target_vocab.json",
    "entity_vocab.json",
    "word_shape.json",
    "word_pronunciation.json",
    "byte_maps.json",
    "normalizer.json",
    "emoji.json",
    "bpe.codes",
    "merges.txt",
    "prophetnet.tokenizer",
    "sentencepiece.bpe.model",
    "sentencepiece.model",
    "spiece.model",
    "spm.model",
    "spm_char.model",
    "chat_template.jinja",
    "chat_template.json",
)
"""The names of the files that may lie beside the weights, in the order in which reports name them."""
_OF_MODULES = re.compile(r"[a-z][a-z0-9_]{0,63}_config\.json")
"""Further configurations in the folder of one module of a model: ``lstm_config.json``."""
_VOCABULARIES = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}\.(spm|tiktoken)")

_LONGEST_TAG = 4096
_MOST_SHOWN = 200
"""Maximum number of characters of a strange name in a message."""


def is_config_name(name: str) -> bool:
    """Return True if a checkpoint may bring a file of this name: :data:`CONFIG_FILES`, ``*.spm``, ``*.tiktoken``."""
    return name in CONFIG_FILES or _VOCABULARIES.fullmatch(name) is not None


def is_module_config_name(name: str) -> bool:
    """Return True if the folder of one module of a model may bring a file of this name."""
    return is_config_name(name) or _OF_MODULES.fullmatch(name) is not None


def is_module_folder(name: object) -> bool:
    """Return True for the name of the folder of one module of a model: plain, not hidden, short."""
    return isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}", name) is not None


def is_output_name(name: object) -> bool:
    """Return True for the name of a file of an aggregated model: plain, or plain in the folder of a module."""
    folder, slash, last = name.rpartition("/") if isinstance(name, str) else ("", "", "")
    return is_plain_name(last) and (not slash or is_module_folder(folder))


def is_plain_name(name: object) -> bool:
    """Return True if `name` is the name of a file within one folder: no separator, not ``..``, printable."""
    return (
        isinstance(name, str)
        and name == posixpath.basename(name)
        and name not in ("", ".", "..")
        and "\\" not in name
        and name.isprintable()
    )


def check_tag(tag: str) -> None:
    """Refuse a tag that does not name a folder inside the folder of checkpoints.

    Raises:
        CheckpointError: it is empty, absolute, leads outside, or holds what cannot be shown.
    """
    if not tag or tag.startswith("/") or ".." in tag.split("/"):
        raise CheckpointError(f"the tag {tag[:_MOST_SHOWN]!r} leads out of the folder of checkpoints")
    if not tag.isprintable() or len(tag) > _LONGEST_TAG:
        raise CheckpointError(f"the tag {tag[:_MOST_SHOWN]!r} cannot be the name of a folder")
