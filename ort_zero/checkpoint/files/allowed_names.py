"""Check which names in a checkpoint may become the path of a file.

A checkpoint may come from an attacker, who can write any manifest with a matching digest. The name of a configuration
file in a manifest becomes the path of a file in the destination. So only the names below are accepted, under which
transformers, diffusers and PEFT read configurations and vocabularies. Names of weights (``model.safetensors``,
``pytorch_model.bin``, which loaders unpickle) and of Python code are refused.
"""

from __future__ import annotations

import posixpath
import re

from ort_zero.errors import CheckpointError

CONFIG_FILES = tuple(
    (
        "config.json generation_config.json preprocessor_config.json image_processor_config.json "
        "video_preprocessor_config.json processor_config.json feature_extractor_config.json adapter_config.json "
        "model_index.json scheduler_config.json modules.json sentence_bert_config.json "
        "config_sentence_transformers.json audio_tokenizer_config.json tokenizer.json tokenizer_config.json "
        "tokenizer.model tokenizer.model.v3 tiktoken.model tekken.json special_tokens_map.json added_tokens.json "
        "vocab.json vocab.txt vocab-src.json vocab-tgt.json target_vocab.json entity_vocab.json word_shape.json "
        "word_pronunciation.json byte_maps.json normalizer.json emoji.json bpe.codes merges.txt "
        "prophetnet.tokenizer sentencepiece.bpe.model sentencepiece.model spiece.model spm.model spm_char.model "
        "chat_template.jinja chat_template.json"
    ).split()
)
"""Names of the files that may lie beside the weights, in the order of reports."""
_VOCABULARY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}\.(spm|tiktoken)")

_MAX_TAG = 4096  # characters
_MAX_SHOWN = 200


def is_config_name(name: str) -> bool:
    """Return True if a checkpoint may contain a file of this name: :data:`CONFIG_FILES`, ``*.spm``, ``*.tiktoken``."""
    return name in CONFIG_FILES or _VOCABULARY.fullmatch(name) is not None


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
    if not tag or tag.startswith("/") or ".." in tag.split("/"):
        raise CheckpointError(f"the tag {tag[:_MAX_SHOWN]!r} leads out of the folder of checkpoints")
    if not tag.isprintable() or len(tag) > _MAX_TAG:
        raise CheckpointError(f"the tag {tag[:_MAX_SHOWN]!r} cannot be the name of a folder")
