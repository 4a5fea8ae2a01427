# SPDX-License-Identifier: MIT
"""ABC in a model of one's own: python -m results.own [TASK SEED]

An encoder-decoder of torch's own layers learns a task, by default successor, with sinusoids. Lines
of its attention become a bias in place of positions. It is trained until it is proved."""

import sys

import torch
from torch import nn

import lengen as L

class Model(nn.Module):
    """A model of one decoder layer. As there is no encoder, source tokens see only themselves."""
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(len(L.VOCAB), 64)
        self.layer = nn.TransformerDecoderLayer(64, 4, 256, 0, batch_first=True, norm_first=True)
        self.head = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, len(L.VOCAB)))
        self.bias = None  # later bias(0, "self" or "cross", T, N) -> (4, T, N), causal in "self"

    def use(self, bias):
        """Attend by this bias alone, without positions, queries and keys; their gradients stay 0."""
        self.bias = bias
        for module in attentions(self):
            module.in_proj_weight.data[:128] = 0
            module.in_proj_bias.data[:128] = 0

    def embed(self, tokens):
        """Tokens (B, T) become vectors (B, T, 64), with positions as long as there is no bias."""
        x = 0.3 * self.embedding(tokens)
        if self.bias is None:
            x = x + L.sinusoidal(torch.arange(tokens.shape[1]), 64)
        return x

    def forward(self, source, target):
        """Source (B, S) and target (B, T) give logits (B, T, V)."""
        T, S = target.shape[1], source.shape[1]
        own, cross = L.causal_bias(T).repeat(4, 1, 1), torch.zeros(4, T, S)
        if self.bias:
            own, cross = self.bias(0, "self", T, T), self.bias(0, "cross", T, S)
        own = own.repeat(len(source), 1, 1)  # a matrix for each question and head
        cross = cross.repeat(len(source), 1, 1)
        return self.head(self.layer(self.embed(target), self.embed(source), own, cross))

    @torch.no_grad()
    def attention(self, source, target):
        """Self-attention (1, 4, T, T) and cross-attention (1, 4, T, S), averaged over questions."""
        seen = []
        def look(module, inputs, options):
            options = options | dict(need_weights=True, average_attn_weights=False)
            weights = module.forward(*inputs, **options)[1]  # (B, 4, rows, columns)
            seen.append(weights.mean(0)[None])
        hooks = [x.register_forward_pre_hook(look, with_kwargs=True) for x in attentions(self)]
        self(source, target)
        for hook in hooks:
            hook.remove()
        return seen

def attentions(model):
    return [x for x in model.modules() if isinstance(x, nn.MultiheadAttention)]

def main(task="successor", seed=0, kind=Model):
    """Teach a model of this kind by ABC. Its proof and the rows of its tests are returned."""
    if task == "--help":
        return print(sys.modules[kind.__module__].__doc__)
    torch.set_num_threads(1)  # of small kernels, more are slower
    plain = L.Config(task, method="vanilla", seed=seed, lr=3e-3)
    abc = L.Config(task, method="abc", seed=seed, lr=4e-3, lengths=(6, 10, 20, 60, 150))
    torch.manual_seed(plain.seed)
    model, data = kind(), L.numbers_data(plain, 1000, first_training=True)
    L.train(L.Run(plain, {}), model, "vanilla", data)
    # Attention is averaged over right answers. Lines that determine the answer are chosen.
    source, target = data.batch(data.steps, 1000)
    right = L.right_tokens(model, source, target).all(1)
    attention = model.attention(source[right], target[right, :-1])
    _, lines, windows = L.choose_lines(abc, attention)
    model.use(L.CalibratedBias(abc, lines))
    # The model is trained at several widths until it is right on all windows.
    data = L.numbers_data(abc, 2000, first_training=False)
    proof = L.train(L.Run(abc, {}), model, "abc", data, windows)
    print(f"{task}, seed {seed}: {proof}")
    rows = L.evaluate(model, abc)["rows"]
    for row in rows:
        print(row["digits"], row["set"], row["correct"], "of", row["n"])
    return proof, rows

if __name__ == "__main__":
    main(*sys.argv[1:])
