"""Our model gives the same numbers and tokens through transformers' interface."""

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationConfig

from nrgpt import LanguageModel, ModelConfig
from nrgpt.hf import NRGPTCache, NRGPTConfig, NRGPTForCausalLM, NRGPTModel
from nrgpt.hf.export import wrapped

from ..models import BLOCKS, RATES, config, randomised

VARIANTS = [
    {"block": "nrgpt"},
    {"mask": "inclusive", "coupling": "full", "tied": False, "head_bias": True},
    {"mask": "released", "feedforward": "memory", "norm": "rmsnorm"},
    {"block": "gpt", "bias": True, "attention_bias": True},
    {"block": "rgpt"},
    {"block": "rgpt_parallel", "separate_norms": True},
]
GREEDY = {"do_sample": False}


def small(**fields):
    """Our model in float32, and the same model wrapped."""
    model = randomised(config(**fields)).float()
    return model, wrapped(model)


def padded(prompts):
    """Left-padded with a number outside the vocabulary, and the mask."""
    longest = max(map(len, prompts))
    idx = torch.tensor([[99] * (longest - len(p)) + p for p in prompts])
    return idx, (idx != 99).long()


def test_configs_there_and_back(tmp_path):
    for fields in (*VARIANTS, *({"rate": rate} for rate in RATES), {"beta": 0.3, "dropout": 0.1}):
        cfg = config(**fields)
        NRGPTConfig.from_model_config(cfg).save_pretrained(tmp_path)
        assert AutoConfig.from_pretrained(tmp_path).model_config() == cfg


def test_the_usual_names():
    cfg = NRGPTConfig(hidden_size=12, num_attention_heads=3, max_position_embeddings=7)
    assert (cfg.width, cfg.heads, cfg.context) == (12, 3, 7)
    assert (cfg.hidden_size, cfg.num_hidden_layers, cfg.tie_word_embeddings) == (12, 12, True)
    assert cfg.model_config() == ModelConfig(width=12, heads=3, context=7)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"widht": 8}, "no field 'widht'; did you mean 'width'?"),
        ({"width": 8, "hidden_size": 9}, "hidden_size = 9 and width = 8"),
        ({"rate": "fre"}, "did you mean 'free'?"),
        ({"width": 9, "heads": 2}, "a divisor of width"),
    ],
)
def test_mistakes_in_a_config(fields, said):
    with pytest.raises(ValueError, match=said.replace("?", r"\?")):
        NRGPTConfig(**fields)


def test_a_config_changed_by_hand_is_checked_too():
    cfg = NRGPTConfig(width=8, heads=2)
    cfg.num_attention_heads = 3
    with pytest.raises(ValueError, match="a divisor of width"):
        NRGPTForCausalLM(cfg)


@pytest.mark.parametrize("fields", VARIANTS, ids=str)
def test_saved_and_loaded_bit_for_bit(fields, tmp_path):
    model, wrapper = small(**fields)
    wrapper.save_pretrained(tmp_path)
    idx = torch.randint(11, (3, 13))
    expected, _ = model(idx)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is NRGPTForCausalLM
    assert not loaded.training
    assert torch.equal(loaded(idx).logits, expected)
    names = loaded.state_dict().keys()
    assert [name.removeprefix("language_model.") for name in names] == [*model.state_dict()]
    *_, x = model.states(idx)
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is NRGPTModel
    assert torch.equal(base(idx).last_hidden_state, model.final_norm(x))


@pytest.mark.parametrize("rate", RATES)
def test_a_new_model_starts_as_ours(rate):
    """transformers must not initialise anything again."""
    cfg = config(rate=rate)
    torch.manual_seed(3)
    ours = LanguageModel(cfg).state_dict()
    torch.manual_seed(3)
    theirs = NRGPTForCausalLM(NRGPTConfig.from_model_config(cfg)).language_model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("fields", VARIANTS, ids=str)
def test_greedy_generation_equals_ours(fields):
    """Past the context too, with padding and without."""
    model, wrapper = small(**fields)
    prompts = torch.randint(11, (3, 6))
    new = wrapper.generate(prompts, max_new_tokens=20, **GREEDY)
    assert new[:, 6:].tolist() == model.generate(prompts.tolist(), max_new_tokens=20)
    uneven = [[1, 2, 3, 4, 5], [6], [7, 8, 9]]
    idx, mask = padded(uneven)
    new = wrapper.generate(idx, attention_mask=mask, max_new_tokens=20, num_steps=2, **GREEDY)
    assert new[:, 5:].tolist() == model.generate(uneven, max_new_tokens=20, steps=2)
    new = wrapper.generate(
        idx, attention_mask=mask, max_new_tokens=5, num_steps=2, use_cache=False, **GREEDY
    )
    assert new[:, 5:].tolist() == model.generate(uneven, max_new_tokens=5, steps=2)


@pytest.mark.parametrize("fields", VARIANTS[:4], ids=str)
def test_beams_in_a_padded_batch_equal_each_prompt_alone(fields):
    _, wrapper = small(**fields)
    prompts = [[1, 2, 3, 4, 5], [6], [7, 8, 9]]
    idx, mask = padded(prompts)
    options = {"max_new_tokens": 7, "num_beams": 3, **GREEDY}
    together = wrapper.generate(idx, attention_mask=mask, **options)
    for row, prompt in zip(together, prompts, strict=True):
        alone = wrapper.generate(torch.tensor([prompt]), use_cache=False, **options)
        assert row[5:].tolist() == alone[0, len(prompt) :].tolist()


def test_sampling_stopping_and_guessing_ahead():
    model, wrapper = small()
    idx = torch.tensor([[1, 2, 3]])
    one, two = (
        (torch.manual_seed(5), wrapper.generate(idx, do_sample=True, max_new_tokens=6, **more))[1]
        for more in ({}, {"use_cache": False})
    )
    assert one.tolist() == two.tolist()
    several = wrapper.generate(idx, do_sample=True, num_return_sequences=4, max_new_tokens=6)
    assert several.shape == (4, 9)
    greedy = model.generate(idx.tolist(), max_new_tokens=9)[0]
    stopped = wrapper.generate(idx, max_new_tokens=9, eos_token_id=greedy[3], pad_token_id=0)
    assert stopped[0, 3:].tolist() == greedy[: greedy.index(greedy[3]) + 1]
    ahead = wrapper.generate(idx, max_new_tokens=9, prompt_lookup_num_tokens=2, **GREEDY)
    assert ahead[0, 3:].tolist() == greedy


def test_a_cache_in_parts():
    model, wrapper = small()
    prompts = [[1, 2, 3, 4, 5, 6], [3, 4, 5, 6]]
    idx, mask = padded(prompts)
    past = NRGPTCache(13)
    with torch.no_grad():
        first = wrapper(idx[:, :4], attention_mask=mask[:, :4], past_key_values=past)
        rest = wrapper(idx[:, 4:], attention_mask=mask, past_key_values=first.past_key_values)
        for row, prompt in enumerate(prompts):
            whole, _ = model(torch.tensor([prompt]))
            assert torch.allclose(rest.logits[row], whole[0, -2:], atol=1e-5)
    assert (past.get_seq_length(), past.batch_size, past.get_max_length()) == (6, 2, 13)
    past.batch_repeat_interleave(2)
    assert past.keys.lengths == [6, 6, 4, 4]
    past.batch_select_indices(torch.tensor([3]))
    assert past.keys.lengths == [4]
    past.crop(-2)
    with torch.no_grad():
        again = wrapper(idx[1:, 4:], past_key_values=past).logits
    assert torch.allclose(again, rest.logits[1:], atol=1e-5)
    past.reset()
    assert past.get_seq_length() == 0
    chunked = wrapper.generate(
        torch.tensor([prompts[0]]), max_new_tokens=5, prefill_chunk_size=4, **GREEDY
    )
    assert chunked[0, 6:].tolist() == model.generate([prompts[0]], max_new_tokens=5)[0]


def test_energies_and_states():
    model, wrapper = small()
    prompts = [[1, 2, 3, 4, 5], [7, 8, 9]]
    idx, mask = padded(prompts)
    out = wrapper(
        idx, attention_mask=mask, output_energies=True, output_hidden_states=True, num_steps=4
    )
    assert len(out.hidden_states) == 5
    for row, prompt in enumerate(prompts):
        states = [*model.states(torch.tensor([prompt]), steps=4)]
        for name, energy in model.energies(states[-1]).items():
            found = out.energies[name][row]
            assert torch.allclose(found[5 - len(prompt) :], energy[0], atol=1e-5)
            assert found[: 5 - len(prompt)].eq(0).all()
        for found, state in zip(out.hidden_states, states, strict=True):
            assert torch.allclose(found[row, 5 - len(prompt) :], state[0], atol=1e-5)
    assert wrapper(idx, attention_mask=mask).energies is None
    _, gpt = small(block="gpt")
    with pytest.raises(ValueError, match="block = 'gpt' has no energy"):
        gpt(torch.tensor([[1, 2]]), output_energies=True)


def test_labels_are_shifted_inside():
    model, wrapper = small()
    idx = torch.randint(11, (3, 9))
    _, expected = model(idx[:, :-1], idx[:, 1:])
    assert wrapper(idx, labels=idx).loss.item() == pytest.approx(expected.item(), abs=1e-6)
    part = wrapper(idx, labels=idx, num_items_in_batch=torch.tensor(48)).loss
    assert part.item() == pytest.approx(expected.item() / 2, abs=1e-6)
    assert len(wrapper(idx, labels=idx, return_dict=False)) == 2
    # Padding on either side does not count, nor do predictions from it.
    text = idx[:1, :5]
    _, expected = model(text[:, :-1], text[:, 1:])
    for left, right in ((3, 0), (0, 3), (1, 2)):
        pads = torch.tensor([0] * left + [1] * 5 + [0] * right)[None]
        padded_text = torch.nn.functional.pad(text, (left, right), value=99)
        labels = padded_text.masked_fill(pads == 0, -100)
        loss = wrapper(padded_text, attention_mask=pads, labels=labels).loss
        assert loss.item() == pytest.approx(expected.item(), abs=1e-6)


def test_logits_to_keep():
    _, wrapper = small()
    idx = torch.randint(11, (2, 9))
    whole = wrapper(idx).logits
    assert torch.allclose(wrapper(idx, logits_to_keep=2).logits, whole[:, -2:], atol=1e-6)
    chosen = torch.tensor([0, 4])
    assert torch.allclose(wrapper(idx, logits_to_keep=chosen).logits, whole[:, chosen], atol=1e-6)


@pytest.mark.parametrize("block", BLOCKS)
def test_gradient_checkpointing_changes_no_gradient(block):
    _, wrapper = small(block=block)
    idx = torch.randint(11, (2, 9))
    wrapper.train()
    wrapper(idx, labels=idx).loss.backward()
    plain = [p.grad.clone() for p in wrapper.parameters()]
    wrapper.zero_grad()
    wrapper.gradient_checkpointing_enable()
    assert wrapper.is_gradient_checkpointing
    assert wrapper.language_model.checkpoint_steps
    wrapper(idx, labels=idx).loss.backward()
    for before, p in zip(plain, wrapper.parameters(), strict=True):
        assert torch.allclose(before, p.grad, atol=1e-6)
    wrapper.gradient_checkpointing_disable()
    assert not wrapper.language_model.checkpoint_steps


def test_mistakes():
    _, wrapper = small()
    idx = torch.tensor([[1, 2, 3]])
    for options, said in (
        (
            {"input_ids": torch.zeros(1, 14, dtype=torch.int64)},
            "14 tokens is longer than this .* 13",
        ),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.int64)}, "not empty"),
        ({"input_ids": torch.tensor([[11]])}, "token 11, and the vocabulary ends at 10"),
        ({"input_ids": idx, "num_step": 3}, "no argument 'num_step'; did you mean 'num_steps'"),
        ({"input_ids": idx, "num_steps": 0}, "steps = 0: must be a whole number"),
        ({"input_ids": idx, "position_ids": idx}, "positions count from the first token"),
        ({"input_ids": idx, "attention_mask": torch.zeros_like(idx)}, "row 0 .* all padding"),
        (
            {"input_ids": idx, "attention_mask": idx[:, 1:]},
            r"shape \(1, 2\); it must have \(1, 3\)",
        ),
        ({"input_ids": idx, "use_cache": True, "output_energies": True}, "use_cache=False"),
        ({"inputs_embeds": torch.zeros(1, 2, 9)}, "no argument 'inputs_embeds'"),
    ):
        with pytest.raises(ValueError, match=said):
            wrapper(**options)
    with pytest.raises(ValueError, match="14 tokens is longer"):
        wrapper.generate(torch.zeros(1, 14, dtype=torch.int64), max_new_tokens=1)
    with pytest.raises(ValueError, match="a cache of its own"):
        wrapper.generate(idx, cache_implementation="static", max_new_tokens=1)
    with pytest.raises(ValueError, match="num_step"):  # transformers' own words
        wrapper.generate(idx, num_step=3, max_new_tokens=1)
    past = wrapper(idx, use_cache=True, num_steps=2).past_key_values
    with pytest.raises(ValueError, match="num_steps = 3: the cache was filled with 2 steps"):
        wrapper(idx[:, :1], past_key_values=past)
    with pytest.raises(ValueError, match="2 rows; the cache 1"):
        wrapper(torch.ones(2, 1, dtype=torch.int64), past_key_values=past, num_steps=2)
    with pytest.raises(ValueError, match="vocabulary of an NRGPT is fixed"):
        wrapper.resize_token_embeddings(12)


def test_an_empty_prompt_starts_with_the_first_token():
    model, wrapper = small()
    with pytest.raises(ValueError, match="bos_token_id"):  # transformers' own words
        wrapper.generate(max_new_tokens=3)
    wrapper.generation_config = GenerationConfig(bos_token_id=4)
    new = wrapper.generate(max_new_tokens=3, **GREEDY)
    assert new[0].tolist() == [4, *model.generate([[4]], max_new_tokens=3)[0]]


def test_a_batch_with_nothing_to_predict_adds_nothing():
    """Trainer adds up the losses of several batches."""
    _, wrapper = small()
    idx = torch.randint(11, (2, 7))
    nothing = torch.full_like(idx, -100)
    assert wrapper(idx, labels=nothing, num_items_in_batch=12).loss == 0
    mean = wrapper(idx, labels=idx).loss
    assert torch.allclose(wrapper(idx, labels=idx, num_items_in_batch=24).loss, mean / 2)
