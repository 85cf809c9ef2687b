"""PEFT: adapters and prompts on a frozen model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Result, Run, programs, wrapped
from small_data import small_llama, tokens

PACKAGES = ("peft", "transformers", "accelerate")
pytestmark = pytest.mark.clients


def one_by_one(run: Run, configs: list[Any], **inputs: Any) -> Result:
    """Train the same Llama with one adapter after the other."""
    from peft import get_peft_model

    start()
    losses, engines = [], []
    for config in configs:
        torch.manual_seed(1)
        engine, found = trained(run, get_peft_model(small_llama(), config), steps=3, rate=2e-2, **inputs)
        losses += found
        engines.append(engine)
    return Result(losses, alive=engines)


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
    model = get_peft_model(small_llama(), config)
    engine, losses = trained(run, model)
    names = sorted(engine.module.state_dict())
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=run.stage == 3):
        if torch.distributed.get_rank() == 0:
            model.save_pretrained(str(run.folder / "adapter"))
    torch.distributed.barrier()
    saved = {n: w.norm().item() for n, w in load_file(run.folder / "adapter/adapter_model.safetensors").items()}
    return Result(losses, alive=engine, values={"saved": saved, "names": names})


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
        model = get_peft_model(small_llama(), LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **more))
        model.add_adapter("other", LoraConfig(r=2, target_modules=["k_proj"], task_type="CAUSAL_LM"))
        engine, found = trained(run, model, steps=4)
        losses += found
        engines.append(engine)
    return Result(losses, alive=engines)


def prompts(run: Run) -> Result:
    """Prompt tuning, prefix tuning, P-tuning, LLaMA-Adapter; CPT with its own loss over masked tokens"""
    import peft

    more = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
    first = one_by_one(
        run,
        [
            peft.PromptTuningConfig(**more),
            peft.PrefixTuningConfig(**more),
            peft.PromptEncoderConfig(encoder_hidden_size=16, encoder_dropout=0.0, **more),
            peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=4, adapter_layers=1),
        ],
    )
    context = peft.CPTConfig(
        task_type="CAUSAL_LM", cpt_token_ids=[7, 8, 9, 10], cpt_mask=[1, 1, 1, 1], cpt_tokens_type_mask=[1, 2, 3, 4]
    )
    second = one_by_one(run, [context], input_type_mask=torch.full((4, 16), 4))
    return Result([*first.losses, *second.losses], alive=(first.alive, second.alive))


def other_adapters(run: Run) -> Result:
    """(IA)3, LoHa, LoKr, VeRA, VB-LoRA, OFT, OFT with `coft`, BOFT, HRA, FourierFT, MiSS, RandLoRA, layer norms"""
    import peft

    q = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj"]}
    linear = ["q_proj", "v_proj"]
    return one_by_one(
        run,
        [
            peft.IA3Config(
                target_modules=[*linear, "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
            ),
            peft.LoHaConfig(r=4, target_modules=linear),
            peft.LoKrConfig(r=4, **q),
            peft.VeraConfig(r=4, **q),
            peft.VBLoRAConfig(r=2, num_vectors=8, vector_length=8, vblora_dropout=0.0, **q),
            peft.OFTConfig(oft_block_size=8, target_modules=linear),
            peft.OFTConfig(oft_block_size=8, coft=True, block_share=True, target_modules=["q_proj"]),
            peft.BOFTConfig(boft_block_size=4, **q),
            peft.HRAConfig(r=4, **q),
            peft.FourierFTConfig(n_frequency=20, **q),
            peft.MissConfig(r=4, **q),
            peft.RandLoraConfig(r=4, randlora_dropout=0.0, **q),
            peft.LNTuningConfig(task_type="CAUSAL_LM"),
        ],
    )


def budget_of_ranks(run: Run) -> Result:
    """AdaLoRA: its loss of orthogonality in the forward, which reads the sizes of its weights"""
    from peft import AdaLoraConfig, get_peft_model

    start()
    torch.manual_seed(1)
    ranks = {"init_r": 4, "target_r": 2, "tinit": 1, "tfinal": 1, "deltaT": 1, "total_step": 6, "lora_dropout": 0.0}
    model = get_peft_model(small_llama(), AdaLoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", **ranks))
    engine, losses = trained(run, model, rate=2e-2)
    return Result(losses, alive=engine)


def coming_and_going(run: Run) -> Result:
    """Adapters of a model in `ort_zero.wrap` that are added, switched, disabled, merged and deleted in training"""
    from peft import LoraConfig, get_peft_model

    base = small_llama()
    wrapped(run, base)
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


test_programs = programs(lora, lora_variants, prompts, other_adapters)
# torch's form of the loss takes no partitioned weights
test_programs_under_zero2 = programs(budget_of_ranks, stages=[2])
test_programs_without_deepspeed = programs(coming_and_going, stages=[0])
