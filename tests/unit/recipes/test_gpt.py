from __future__ import annotations

import pytest
import torch

from ckpt.errors import ConfigurationError
from recipes.training.gpt import GPT, SIZES, next_token_loss


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_default_model_has_about_a_million_parameters() -> None:
    assert 0.9e6 < count(GPT()) < 1.2e6


def test_gpt2_has_the_shapes_of_gpt2() -> None:
    size = SIZES["gpt2"]
    assert (size.vocabulary, size.context, size.layers, size.heads, size.width) == (50257, 1024, 12, 12, 768)


def test_parameters_are_named_as_in_gpt2() -> None:
    names = [name for name, _ in GPT().named_parameters()]
    block = ["ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"]
    expected = [f"h.0.{part}.{kind}" for part in block for kind in ("weight", "bias")]
    assert names[:2] == ["wte.weight", "wpe.weight"]
    assert names[2 : 2 + len(expected)] == expected
    assert names[-3:] == ["ln_f.weight", "ln_f.bias", "lm_head.weight"]


def test_initial_values_follow_from_the_seed_alone() -> None:
    first = GPT(seed=3).state_dict()
    torch.rand(100)
    again, other = GPT(seed=3).state_dict(), GPT(seed=4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["wte.weight"], other["wte.weight"])


def test_making_a_model_draws_no_global_random_number() -> None:
    before = torch.get_rng_state()
    GPT(seed=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_no_parameter_is_left_without_an_initial_value() -> None:
    for name, parameter in GPT().named_parameters():
        constant = name.endswith("bias") or "ln_" in name
        expected = (0.0, 0.0) if name.endswith("bias") else (1.0, 1.0)
        if constant:
            assert (parameter.min().item(), parameter.max().item()) == expected
        else:
            assert 0.005 < parameter.std().item() < 0.025 and parameter.abs().max() < 0.2


def test_a_fresh_model_is_as_good_as_guessing() -> None:
    tokens = torch.randint(0, 256, (4, 65))
    loss = next_token_loss(GPT().eval()(tokens[:, :-1]), tokens[:, 1:])
    assert loss.item() == pytest.approx(5.545, abs=0.15)  # ln 256


def test_a_token_sees_none_after_it() -> None:
    model = GPT(dropout=0.0)
    tokens = torch.randint(0, 256, (1, 17))
    other = tokens.clone()
    other[0, -1] = (other[0, -1] + 1) % 256
    assert torch.equal(model(tokens)[:, :16], model(other)[:, :16])
    assert not torch.equal(model(tokens)[:, 16], model(other)[:, 16])


def test_dropout_draws_from_the_global_generator_and_can_be_left_out() -> None:
    tokens = torch.randint(0, 256, (2, 32))
    model = GPT()
    torch.manual_seed(0)
    first = model(tokens)
    second = model(tokens)
    torch.manual_seed(0)
    assert not torch.equal(first, second) and torch.equal(model(tokens), first)
    without = GPT(dropout=0.0)
    assert torch.equal(without(tokens), without(tokens))


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
def test_the_stages_one_after_the_other_are_the_whole_model(num_stages: int) -> None:
    whole = GPT(dropout=0.0, seed=1)
    hidden = tokens = torch.randint(0, 256, (2, 32))
    names: list[str] = []
    for stage in range(num_stages):
        part = GPT(dropout=0.0, seed=1)
        part.keep_stage(stage, num_stages)
        hidden = part(hidden)
        names += part.state_dict()
    assert torch.equal(hidden, whole(tokens))
    assert names == list(whole.state_dict()), "each name once, in the order of the whole model"


def test_a_head_can_be_cut_off_by_its_rows() -> None:
    """The cut of tensor parallelism: each rank has only the query, key and value rows of its own heads."""
    attention = GPT(seed=2).h["0"].attn
    half = GPT(seed=2).h["0"].attn
    rows = 3 * 128 // 2
    half.c_attn.weight = torch.nn.Parameter(attention.c_attn.weight[rows:].detach())
    half.c_attn.bias = torch.nn.Parameter(attention.c_attn.bias[rows:].detach())
    seen: dict[str, torch.Tensor] = {}
    half.c_proj = torch.nn.Identity()
    attention.c_proj.register_forward_pre_hook(lambda _, inputs: seen.update(whole=inputs[0]))
    half.c_proj.register_forward_pre_hook(lambda _, inputs: seen.update(half=inputs[0]))
    hidden = torch.randn(2, 16, 128)
    attention(hidden)
    half(hidden)
    torch.testing.assert_close(seen["half"], seen["whole"][..., 64:])


def test_a_tied_head_is_the_embedding_and_says_so() -> None:
    tied, untied = GPT(tie_embeddings=True), GPT()
    assert tied.lm_head.weight is tied.wte.weight
    assert tied.tied_names == {"lm_head.weight": "wte.weight"} and untied.tied_names == {}
    assert count(untied) - count(tied) == 256 * 128
    assert "lm_head.weight" in tied.state_dict()


def test_a_size_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(ConfigurationError, match="model.size=huge: .* tiny, gpt2"):
        GPT(size="huge")


@pytest.mark.parametrize("dropout", [-0.1, 1.0])
def test_a_dropout_that_is_no_probability_is_refused(dropout: float) -> None:
    with pytest.raises(ConfigurationError, match="model.dropout"):
        GPT(dropout=dropout)
