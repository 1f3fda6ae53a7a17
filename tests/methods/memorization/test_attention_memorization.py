# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from diffusers.models.attention_processor import Attention
from official_memorization import fixture, official_unet, parameters

from diffusers_ext.methods.memorization.attention_memorization import (
    CrossAttentionRescaling,
    attention_entropy,
    cross_attention_layers,
    layer_entropy,
    record_attention,
)
from diffusers_ext.methods.memorization.metrics_memorization import auc


TENSORS, MADE = fixture("baseline_cross_attention"), parameters("baseline_cross_attention")


class OneLayer(torch.nn.Module):
    """A U-Net of one cross-attention whose projections do nothing."""

    def __init__(self, heads, channels):
        super().__init__()
        self.block = torch.nn.Module()
        self.block.attn2 = Attention(channels, channels, heads=heads, dim_head=channels // heads, bias=False)
        for layer in (self.block.attn2.to_q, self.block.attn2.to_k, self.block.attn2.to_v):
            layer.weight.data = torch.eye(channels)
        self.block.attn2.to_out[0].weight.data = torch.eye(channels)
        self.block.attn2.to_out[0].bias.data.zero_()

    def forward(self, query, text):
        return self.block.attn2(query, encoder_hidden_states=text)


def merged(x):
    return x.transpose(1, 2).flatten(2)


def probabilities(model):
    """Attention of the fixture's query over its keys, with identity for the projections of queries and keys."""
    with record_attention(model) as maps:
        output = model(merged(TENSORS["query"]), merged(TENSORS["key"]))
    return output, maps["block.attn2"]


@pytest.mark.parametrize("mask, name", [(True, "masked"), (False, "unmasked")])
def test_rescaled_weights_of_the_published_function(mask, name):
    model = OneLayer(TENSORS["query"].shape[1], merged(TENSORS["query"]).shape[2])
    rescaling = CrossAttentionRescaling(model, [MADE["mask_length"]], MADE["c1"], mask=mask)
    _, weights = probabilities(model)
    torch.testing.assert_close(weights, TENSORS[f"weights_{name}"], atol=1e-5, rtol=0)
    torch.testing.assert_close(weights @ TENSORS["value"], TENSORS[f"out_{name}"], atol=1e-5, rtol=0)
    rescaling.remove()


def test_recording_does_not_change_the_output():
    model = OneLayer(2, 8)
    query, text = merged(TENSORS["query"]), merged(TENSORS["key"])
    expected, processor = model(query, text), model.block.attn2.processor
    recorded, weights = probabilities(model)
    assert recorded.equal(expected) and model.block.attn2.processor is processor
    torch.testing.assert_close(weights @ TENSORS["key"], expected.unflatten(2, (2, -1)).transpose(1, 2))


class TestUNet:
    def run(self, unet):
        embeds = torch.cat([TENSORS["negative_prompt_embeds"], TENSORS["prompt_embeds"]])
        with torch.no_grad():
            return unet(TENSORS["unet_in"], TENSORS["timestep"], embeds).sample

    def test_whole_unet(self):
        unet = official_unet("eps")
        torch.testing.assert_close(self.run(unet), TENSORS["unet_out_plain"], atol=1e-5, rtol=1e-5)
        rescaling = CrossAttentionRescaling(unet, [MADE["mask_length"]], MADE["c1"])
        torch.testing.assert_close(self.run(unet), TENSORS["unet_out_rescaled"], atol=1e-5, rtol=1e-5)
        rescaling.remove()

    def test_removal_is_bit_equal(self):
        unet = official_unet("eps")
        before, processors = self.run(unet), unet.attn_processors
        CrossAttentionRescaling(unet, [4]).remove()
        assert self.run(unet).equal(before) and unet.attn_processors == processors

    def test_layers_come_in_the_order_of_the_forward_pass(self):
        unet, ran = official_unet("eps"), []
        layers = cross_attention_layers(unet)
        for name, layer in layers.items():
            layer.register_forward_hook(lambda *args, name=name: ran.append(name))
        self.run(unet)
        assert ran == list(layers)

    def test_rows_add_up_to_one(self):
        unet = official_unet("eps")
        with record_attention(unet) as maps:
            self.run(unet)
        assert list(maps) == list(cross_attention_layers(unet))
        for attention in maps.values():
            torch.testing.assert_close(attention.sum(-1), torch.ones(attention.shape[:-1]))

    def test_processors_come_back_after_an_error(self):
        unet = official_unet("eps")
        before = unet.attn_processors
        with pytest.raises(RuntimeError), record_attention(unet):
            raise RuntimeError
        assert unet.attn_processors == before


@pytest.mark.parametrize("kind", ["mem", "nonmem"])
class TestScores:
    def test_layer_entropy(self, kind):
        attention = TENSORS[f"attn_{kind}"][0, :, 3]
        mine = layer_entropy(attention).double()
        torch.testing.assert_close(mine, TENSORS[f"score_E_{kind}"], atol=1e-5, rtol=0)

    def test_attention_entropy(self, kind):
        attention = TENSORS[f"attn_{kind}"].mean((2, 3))
        mine = attention_entropy(attention[1:], TENSORS[f"prompt_length_{kind}"].tolist(), attention[0]).double()
        torch.testing.assert_close(mine, TENSORS[f"score_D_{kind}"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("score", ["D", "E"])
def test_published_auc(score):
    found = auc(TENSORS[f"score_{score}_mem"], TENSORS[f"score_{score}_nonmem"])
    assert found == pytest.approx(MADE["auroc"][score], abs=1e-9)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: CrossAttentionRescaling(official_unet("eps"), [1]), "at least 2"),
        (lambda: cross_attention_layers(torch.nn.Linear(2, 2)), "has no cross-attention layers"),
        (lambda: record_attention(official_unet("eps"), ["mid"]).__enter__(), "no cross-attention layer 'mid'"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()
