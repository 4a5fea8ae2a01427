# SPDX-License-Identifier: MIT
"""ABC in a model of one's own: python -m results.own [STEPS SEED]

A decoder layer of torch learns successor with sinusoids; `abc_bias` continues the lines of its
attention, averaged over 1,000 questions, to any size; it is trained further with that bias in place
of positions, and tested."""

import sys

import torch
from torch import nn

import lengen as L

class Model(nn.Module):
    """One decoder layer, its bias a function of the number of rows."""
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(64, 4, 256, 0, batch_first=True, norm_first=True)
        self.head = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 15))
        self.embedding = nn.Embedding(15, 64)
        self.positions = 1

    def biases(self, T):
        """-> bias of self-attention (4, T, T), of cross-attention (4, T, T + 1)."""
        return L.causal_bias(T).repeat(4, 1, 1), torch.zeros(4, T, T + 1)

    def embed(self, tokens):
        """Tokens (B, T) -> (B, T, 64)."""
        waves = L.sinusoidal(torch.arange(tokens.shape[1]), 64)
        return 0.3 * self.embedding(tokens) + self.positions * waves

    def forward(self, source, target):
        """source (B, S), target (B, T) -> logits (B, T, 15)."""
        own, cross = self.biases(target.shape[1])
        own = own.repeat(len(source), 1, 1)  # a matrix for each question and head
        cross = cross.repeat(len(source), 1, 1)
        return self.head(self.layer(self.embed(target), self.embed(source), own, cross))

def train(model, data):
    """Short numbers come more often at first; the rate falls."""
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, data.steps)
    for step in range(data.steps):
        source, target = data.batch(step, 64)
        logits = model(source, target[:, :-1])
        optimizer.zero_grad()
        nn.functional.cross_entropy(logits.mT, target[:, 1:]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        falling.step()

def averaged_attention(model, source, target):
    """-> self (4, T, T), cross (4, T, S), averaged over questions."""
    seen = []

    def ask_for_heads(module, inputs, options):
        return inputs, options | dict(need_weights=True, average_attn_weights=False)

    def keep(module, inputs, outputs):
        seen.append(outputs[1].mean(0))

    for module in model.layer.self_attn, model.layer.multihead_attn:
        module.register_forward_pre_hook(ask_for_heads, with_kwargs=True)
        module.register_forward_hook(keep)
    model.eval()
    with torch.no_grad():
        model(source, target[:, :-1])
    return seen

def main(steps=800, seed=0):
    torch.manual_seed(seed)
    model, numbers = Model(), L.split_numbers(seed)
    plain = L.Config("successor", method="vanilla")
    abc = L.Config("successor", method="abc")  # at several widths
    first, second = (L.numbers_data(config, numbers, steps, first_training=True)
                     for config in (plain, abc))
    train(model, first)
    own, cross = averaged_attention(model, *first.batch(steps, 1000))

    def biases(T):
        return (L.abc_bias(own, T, T, groups=((1,),)) + L.causal_bias(T),
                L.abc_bias(cross, T, T + 1, groups=((-1,),), kappa=0.1))

    model.biases, model.positions = biases, 0
    train(model, second)
    for row in L.evaluate(model, abc)["rows"]:
        print(row["digits"], row["set"], row["correct"], "of", row["n"])

if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
