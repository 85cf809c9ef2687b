"""PEFT: adapters and prompts on a frozen model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import NO_ZERO, SECTION, ZERO_2, ZERO_2_AND_3, Result, Run
from small_data import VOCABULARY, tokens

PACKAGES = ("peft", "transformers", "accelerate")
pytestmark = pytest.mark.clients


def llama() -> torch.nn.Module:
    """Return a small Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def adapted(run: Run, config: Any, steps: int = 4, rate: float = 5e-3, **more: Any) -> tuple[Any, list[float]]:
    """Train a Llama with an adapter, and with the same numbers everywhere; return the engine and its losses."""
    from peft import get_peft_model

    torch.manual_seed(1)
    return trained(run, get_peft_model(llama(), config), steps, rate, **more)


def one_by_one(run: Run, configs: list[Any], **more: Any) -> Result:
    """Train with one adapter after the other."""
    start()
    trainings = [adapted(run, config, **more) for config in configs]
    return Result([loss for _, losses in trainings for loss in losses], alive=[engine for engine, _ in trainings])


def trained(
    run: Run, model: torch.nn.Module, steps: int = 6, rate: float = 5e-3, **inputs: Any
) -> tuple[Any, list[float]]:
    """Train in a plain loop over ``deepspeed.initialize``; return the engine and its losses."""
    import deepspeed

    chosen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(chosen, lr=rate)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=run.deepspeed_config(4))
    rows = tokens(8 * steps)
    rank = torch.distributed.get_rank()
    losses = []
    for step in range(steps):
        mine = rows[8 * step + 4 * rank :][:4]
        batch = {name: torch.stack([row[name] for row in mine]) for name in mine[0]}
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][0, :3] = 0
        loss = engine(**batch, **{name: value.clone() for name, value in inputs.items()}).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return engine, losses


def start() -> None:
    """Start the process group as DeepSpeed's users do."""
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)


def lora(run: Run) -> Result:
    """LoRA on the attention of a Llama, `save_pretrained` of the adapter, `merge_and_unload`"""
    import deepspeed
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file

    start()
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")
    model = get_peft_model(llama(), config)
    engine, losses = trained(run, model)
    names = sorted(engine.module.state_dict())
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=run.stage == 3):
        if torch.distributed.get_rank() == 0:
            model.save_pretrained(str(run.folder / "adapter"))
    torch.distributed.barrier()
    saved = {n: w.norm().item() for n, w in load_file(run.folder / "adapter/adapter_model.safetensors").items()}
    return Result(losses, alive=engine, values={"saved": saved, "names": names})


@ZERO_2_AND_3
def test_lora(client, stage):
    client.compare(lora, stage)


def lora_variants(run: Run) -> Result:
    """DoRA, rsLoRA on all linear layers, a trained embedding (`modules_to_save`), several adapters"""
    from peft import LoraConfig, get_peft_model

    start()
    losses, engines = [], []
    for more in (
        {"use_dora": True, "target_modules": ["q_proj", "v_proj"]},
        {"use_rslora": True, "target_modules": "all-linear", "modules_to_save": ["lm_head"]},
    ):
        torch.manual_seed(1)
        model = get_peft_model(llama(), LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **more))
        model.add_adapter("other", LoraConfig(r=2, target_modules=["k_proj"], task_type="CAUSAL_LM"))
        engine, found = trained(run, model, steps=4)
        losses += found
        engines.append(engine)
    return Result(losses, alive=engines)


@ZERO_2_AND_3
def test_lora_variants(client, stage):
    client.compare(lora_variants, stage)


def prompt_tuning(run: Run) -> Result:
    """Prompt tuning: virtual tokens before the text, everything else frozen"""
    from peft import PromptTuningConfig

    return one_by_one(run, [PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)], steps=6, rate=5e-2)


@ZERO_2_AND_3
def test_prompt_tuning(client, stage):
    client.compare(prompt_tuning, stage)


def prefix_and_p_tuning(run: Run) -> Result:
    """Prefix tuning and P-tuning"""
    from peft import PrefixTuningConfig, PromptEncoderConfig

    more = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
    encoder = PromptEncoderConfig(encoder_hidden_size=16, encoder_dropout=0.0, **more)
    return one_by_one(run, [PrefixTuningConfig(**more), encoder], rate=2e-2)


@ZERO_2_AND_3
def test_prefix_and_p_tuning(client, stage):
    client.compare(prefix_and_p_tuning, stage)


LINEAR = ["q_proj", "v_proj"]


def other_adapters(run: Run) -> Result:
    """(IA)3, LoHa, VeRA, OFT, OFT with `coft`, and layer-norm tuning"""
    from peft import IA3Config, LNTuningConfig, LoHaConfig, OFTConfig, VeraConfig

    configs = [
        IA3Config(target_modules=[*LINEAR, "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"),
        LoHaConfig(r=4, target_modules=LINEAR),
        VeraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"),
        OFTConfig(oft_block_size=8, target_modules=LINEAR),
        OFTConfig(oft_block_size=8, coft=True, block_share=True, target_modules=["q_proj"]),
        LNTuningConfig(task_type="CAUSAL_LM"),
    ]
    return one_by_one(run, configs, steps=3, rate=2e-2)


@ZERO_2_AND_3
def test_other_adapters(client, stage):
    client.compare(other_adapters, stage)


def weights_of_their_own_form(run: Run) -> Result:
    """VB-LoRA, BOFT, LoKr, LoRA with `target_parameters`, `layer_replication`, `trainable_token_indices`"""
    from peft import BOFTConfig, LoKrConfig, LoraConfig, VBLoRAConfig

    q = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj"]}
    configs = [
        VBLoRAConfig(r=2, num_vectors=8, vector_length=8, vblora_dropout=0.0, **q),
        BOFTConfig(boft_block_size=4, **q),
        LoKrConfig(r=4, **q),
        LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=[], target_parameters=["q_proj.weight"]),
        LoraConfig(r=4, layer_replication=[[0, 2], [1, 2]], **q),
        LoraConfig(r=4, trainable_token_indices=[5, 6, 7], **q),
    ]
    return one_by_one(run, configs, steps=3, rate=2e-2)


@ZERO_2_AND_3
def test_weights_of_their_own_form(client, stage):
    client.compare(weights_of_their_own_form, stage)


def context_tuning(run: Run) -> Result:
    """CPT: context-aware prompt tuning with its own loss over masked tokens"""
    from peft import CPTConfig

    config = CPTConfig(
        task_type="CAUSAL_LM", cpt_token_ids=[7, 8, 9, 10], cpt_mask=[1, 1, 1, 1], cpt_tokens_type_mask=[1, 2, 3, 4]
    )
    return one_by_one(run, [config], rate=2e-2, input_type_mask=torch.full((4, 16), 4))


@ZERO_2_AND_3
def test_context_tuning(client, stage):
    client.compare(context_tuning, stage)


def more_adapters(run: Run) -> Result:
    """HRA, FourierFT, MiSS, RandLoRA, C3A, RoAd, PiSSA, LLaMA-Adapter, Poly, DeLoRA, GraLoRA, OSF, trainable tokens"""
    import peft

    q = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj"]}
    configs = [
        peft.HRAConfig(r=4, **q),
        peft.FourierFTConfig(n_frequency=20, **q),
        peft.MissConfig(r=4, **q),
        peft.RandLoraConfig(r=4, randlora_dropout=0.0, **q),
        peft.C3AConfig(block_size=8, **q),
        peft.RoadConfig(group_size=8, **q),
        peft.LoraConfig(r=4, init_lora_weights="pissa", **q),
        peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=4, adapter_layers=1),
        peft.DeloraConfig(r=4, **q),
        peft.GraloraConfig(r=4, gralora_k=2, **q),
        peft.OSFConfig(**q),
        peft.TrainableTokensConfig(token_indices=[5, 6, 7], target_modules=["embed_tokens"], task_type="CAUSAL_LM"),
    ]
    first = one_by_one(run, configs, steps=2, rate=2e-2)
    poly = peft.PolyConfig(r=4, n_tasks=2, n_skills=2, **q)
    second = one_by_one(run, [poly], steps=2, rate=2e-2, task_ids=torch.tensor([0, 1, 0, 1]))
    return Result([*first.losses, *second.losses], alive=(first.alive, second.alive))


@ZERO_2_AND_3
def test_more_adapters(client, stage):
    client.compare(more_adapters, stage)


def budget_of_ranks(run: Run) -> Result:
    """AdaLoRA: its loss of orthogonality in the forward, which reads the sizes of its weights"""
    from peft import AdaLoraConfig, get_peft_model

    start()
    torch.manual_seed(1)
    ranks = {"init_r": 4, "target_r": 2, "tinit": 1, "tfinal": 1, "deltaT": 1, "total_step": 6, "lora_dropout": 0.0}
    model = get_peft_model(llama(), AdaLoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", **ranks))
    engine, losses = trained(run, model, rate=2e-2)
    return Result(losses, alive=engine)


@ZERO_2  # torch's form of the loss takes no partitioned weights
def test_budget_of_ranks(client, stage):
    client.compare(budget_of_ranks, stage)


def coming_and_going(run: Run) -> Result:
    """Adapters of a model in `ort_zero.wrap` that are added, switched, disabled, merged and deleted in training"""
    from peft import LoraConfig, get_peft_model

    import ort_zero

    base = llama()
    if run.backend == "ort":
        ort_zero.wrap(base, **{key: value for key, value in SECTION.items() if key != "enabled"})
    configs = [
        LoraConfig(r=r, lora_dropout=0.0, target_modules=names) for r, names in ((4, ["q_proj"]), (2, ["down_proj"]))
    ]
    torch.manual_seed(1)
    model = get_peft_model(base, configs[0])
    rows, losses, evaluated = iter(tokens(64)), [], []

    def loss_of(model: torch.nn.Module) -> torch.Tensor:
        ids = torch.stack([next(rows)["input_ids"] for _ in range(4)])
        return model(input_ids=ids, labels=ids).loss

    def train(steps: int = 2) -> None:
        optimizer = torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), lr=2e-2)
        for _ in range(steps):
            loss = loss_of(model)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())

    def evaluate(model: torch.nn.Module) -> None:
        with torch.no_grad():
            evaluated.append(loss_of(model).item())

    train()
    model.add_adapter("second", configs[1])
    model.set_adapter("second")
    train()
    with model.disable_adapter():
        evaluate(model)
    model.delete_adapter("default")
    train()
    model.merge_adapter()
    evaluate(model)
    model.unmerge_adapter()
    train()
    whole = model.merge_and_unload()
    evaluate(whole)
    return Result(losses, alive=(model, whole), values={"evaluated": evaluated})


@NO_ZERO
def test_coming_and_going(client, stage):
    client.compare(coming_and_going, stage)
