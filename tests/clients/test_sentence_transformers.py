"""sentence-transformers' trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Result, Run, begin_trainer, programs

PACKAGES = ("sentence-transformers", "datasets", "transformers", "accelerate")
pytestmark = pytest.mark.clients

NOUNS = ("cat", "dog", "house", "tree", "river", "stone", "road", "cloud")
VERBS = ("sees", "likes", "finds", "takes")


def model_of(folder: Any) -> Any:
    """Return a SentenceTransformer over a small BERT whose tokenizer knows the words above. All ranks must call."""
    import deepspeed
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    deepspeed.init_distributed("gloo", verbose=False)
    words = {word: i for i, word in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "the", *NOUNS, *VERBS))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    torch.manual_seed(0)
    bert = BertModel(
        BertConfig(
            vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
            max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip
    place = str(folder / "bert")
    bert.save_pretrained(place)  # once there are ranks, the first one alone writes
    if torch.distributed.get_rank() == 0:
        fast.save_pretrained(place)
    torch.distributed.barrier()
    transformer = Transformer(place, max_seq_length=16)
    return SentenceTransformer(modules=[transformer, Pooling(32)], device="cpu")


def sentence(i: int) -> str:
    """Return the sentence of a number."""
    subject, verb, thing = NOUNS[i % 8], VERBS[(i // 3) % 4], NOUNS[(3 * i + 1) % 8]
    return f"the {subject} {verb} a {thing}" if i % 3 else f"the {subject} {verb}"


def trained(run: Run, dataset: Any, loss: Any, model: Any) -> Any:
    """Train with SentenceTransformerTrainer; return it."""
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

    begin_trainer()
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(run.folder / "output"), deepspeed=run.config_path, max_steps=5, logging_steps=1,
        per_device_train_batch_size=4, learning_rate=1e-3, report_to=[], save_strategy="no", disable_tqdm=True,
        accelerator_config={"use_configured_state": True},
    )  # fmt: skip
    trainer = SentenceTransformerTrainer(model=model, args=arguments, train_dataset=dataset, loss=loss)
    trainer.train()
    return trainer


def logged(trainer: Any) -> list[float]:
    """Return the losses that the trainer has logged."""
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def pairs_with_negatives(run: Run) -> Result:
    """SentenceTransformerTrainer with `MultipleNegativesRankingLoss`, `encode` afterwards"""
    from datasets import Dataset
    from sentence_transformers.losses import MultipleNegativesRankingLoss

    model = model_of(run.folder)
    rows = {"anchor": [sentence(i) for i in range(48)], "positive": [sentence(i + 24) for i in range(48)]}
    trainer = trained(run, Dataset.from_dict(rows), MultipleNegativesRankingLoss(model), model)
    return Result(logged(trainer), alive=trainer)


def similarity_and_matryoshka(run: Run) -> Result:
    """SentenceTransformerTrainer with `CosineSimilarityLoss`, and with `MatryoshkaLoss` around ranking"""
    from datasets import Dataset
    from sentence_transformers.losses import CosineSimilarityLoss, MatryoshkaLoss, MultipleNegativesRankingLoss

    model = model_of(run.folder)
    scores = {"a": [sentence(i) for i in range(48)], "b": [sentence(i * 5) for i in range(48)],
              "score": [(i % 5) / 4 for i in range(48)]}  # fmt: skip
    first = trained(run, Dataset.from_dict(scores), CosineSimilarityLoss(model), model)
    other = model_of(run.folder)
    rows = {"anchor": [sentence(i) for i in range(48)], "positive": [sentence(i + 24) for i in range(48)]}
    ranking = MatryoshkaLoss(other, MultipleNegativesRankingLoss(other), [32, 16])
    second = trained(run, Dataset.from_dict(rows), ranking, other)
    return Result(logged(first) + logged(second), alive=(first, second))


test_programs = programs(pairs_with_negatives, similarity_and_matryoshka)
