"""Fine-tuning an exported model with transformers' Trainer, with and without LoRA."""

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from nrgpt.hf import as_linear, as_parameters
from nrgpt.hf.export import wrapped

from ..models import config, randomised

TEXTS = [{"input_ids": [i % 11, 3, 1, 4, 1, 5][: 3 + i % 4]} for i in range(16)]


@pytest.fixture
def folder(tmp_path):
    wrapped(randomised(config(dropout=0.1)).float()).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def collate(texts):
    """Left-padded, as by our tokenizers."""
    longest = max(len(text["input_ids"]) for text in texts)
    short = [longest - len(text["input_ids"]) for text in texts]
    idx = torch.tensor([[0] * n + text["input_ids"] for n, text in zip(short, texts, strict=True)])
    mask = torch.tensor([[0] * n + [1] * (longest - n) for n in short])
    labels = idx.masked_fill(mask == 0, -100)
    return {"input_ids": idx, "attention_mask": mask, "labels": labels}


def fine_tune(model, to, **options):
    arguments = TrainingArguments(
        to,
        max_steps=12,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=4,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **options,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=TEXTS,
        eval_dataset=TEXTS,
        data_collator=collate,
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before - 0.1
    return trainer


@pytest.mark.parametrize("checkpointing", [False, True])
def test_trainer(folder, tmp_path, checkpointing):
    model = AutoModelForCausalLM.from_pretrained(folder)
    trainer = fine_tune(model, tmp_path / "out", gradient_checkpointing=checkpointing)
    trainer.save_model(tmp_path / "tuned")
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    idx = torch.tensor([[1, 2, 3]])
    assert torch.equal(tuned(idx).logits, model.eval()(idx).logits)
    assert (tmp_path / "tuned" / "modeling_nrgpt.py").is_file()


def test_lora(folder, tmp_path):
    names = ["W_Q", "W_K", "W_1", "W_2", "eta"]
    idx = torch.tensor([[1, 2, 3]])
    base = AutoModelForCausalLM.from_pretrained(folder)
    untouched = base(idx).logits
    ready = as_linear(base, names)
    assert torch.allclose(ready(idx).logits, untouched, atol=1e-6)
    model = peft.get_peft_model(ready, peft.LoraConfig(r=2, target_modules=["linear"]))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * len(names)
    assert all("lora_" in name for name in trained)
    fine_tune(model, tmp_path / "out")
    model.eval()
    tuned = model(idx).logits.detach()
    assert not torch.allclose(tuned, untouched, atol=1e-2)
    new = model.generate(input_ids=idx, max_new_tokens=5, do_sample=False)

    model.save_pretrained(tmp_path / "adapter")
    again = as_linear(AutoModelForCausalLM.from_pretrained(folder), names)
    again = peft.PeftModel.from_pretrained(again, tmp_path / "adapter").eval()
    assert torch.allclose(again(idx).logits, tuned, atol=1e-6)

    merged = as_parameters(model.merge_and_unload())
    assert (
        merged.state_dict().keys()
        == AutoModelForCausalLM.from_pretrained(folder).state_dict().keys()
    )
    merged.save_pretrained(tmp_path / "merged")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.allclose(loaded(idx).logits, tuned, atol=1e-5)
    assert torch.equal(loaded.generate(idx, max_new_tokens=5, do_sample=False), new)


OWNERS = ("attention.W_Q", "attention.W_K", "feedforward.W_1", "feedforward.W_2", "rate.eta")


@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora_on_parameters(folder, tmp_path, checkpointing):
    """peft's target_parameters: the model, its names and its files stay as they are."""
    idx = torch.tensor([[1, 2, 3]])
    base = AutoModelForCausalLM.from_pretrained(folder)
    untouched = base(idx).logits
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_parameters=list(OWNERS)))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * len(OWNERS)
    fine_tune(model, tmp_path / "out", gradient_checkpointing=checkpointing)
    model.eval()
    tuned = model(idx).logits.detach()
    assert not torch.allclose(tuned, untouched, atol=1e-2)
    with model.disable_adapter():
        assert torch.equal(model(idx).logits, untouched)
    new = model.generate(input_ids=idx, max_new_tokens=5, do_sample=False)
    model.save_pretrained(tmp_path / "adapter")
    again = AutoModelForCausalLM.from_pretrained(folder)
    again = peft.PeftModel.from_pretrained(again, tmp_path / "adapter").eval()
    assert torch.allclose(again(idx).logits, tuned, atol=1e-6)
    merged = model.merge_and_unload()
    assert merged.state_dict().keys() == again.merge_and_unload().state_dict().keys()
    assert torch.allclose(merged(idx).logits, tuned, atol=1e-5)
    assert torch.equal(merged.generate(idx, max_new_tokens=5, do_sample=False), new)


@pytest.mark.parametrize(
    "fields", [{"block": "gpt"}, {"coupling": "full", "rate": "free_per_step"}]
)
def test_lora_on_parameters_of_other_models(fields):
    """An adapter that does something does the same as one that was merged."""
    model, idx = wrapped(randomised(config(**fields)).float()).eval(), torch.tensor([[1, 2, 3]])
    untouched = model(idx).logits
    names = ["attention.W_Q", "feedforward.W_1"] if fields.get("block") else ["attention.J"]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_parameters=names))
    for name, p in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.3)
    tuned = adapted(idx).logits
    assert not torch.allclose(tuned, untouched, atol=1e-3)
    assert torch.allclose(adapted.merge_and_unload()(idx).logits, tuned, atol=1e-5)


def test_lora_on_full_rank_couplings():
    model = randomised(config(coupling="full", rate="free_per_step")).float()
    wrapper, idx = wrapped(model), torch.tensor([[1, 2, 3]])
    untouched = wrapper(idx).logits
    ready = as_linear(wrapper, ["J", "eta"])
    assert torch.allclose(ready(idx).logits, untouched, atol=1e-6)
    adapted = peft.get_peft_model(ready, peft.LoraConfig(r=2, target_modules=["linear"]))
    adapted(idx, labels=idx).loss.backward()
    restored = as_parameters(adapted.merge_and_unload())
    assert torch.allclose(restored(idx).logits, untouched, atol=1e-6)
    with pytest.raises(ValueError, match=r"no matrix is called 'W_X'"):
        as_linear(restored, ["J", "W_X"])
