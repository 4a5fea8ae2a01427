# SPDX-License-Identifier: MIT
"""ABC in a decoder-only model: python -m results.gpt [TASK SEED]

One causal layer, as in GPT, continues a question by its answer, `$0129&$0310&`. Rows of the answer
see the question by the lines of cross-attention, and the answer by those of self-attention."""

import math
import sys

import torch
from torch import nn

import lengen as L
from results import own

class Model(own.Model):
    def __init__(self):
        super().__init__()
        # With relu or gelu, this layer of torch 2.13 gives NaN in tests if masks are numbers.
        self.layer = nn.TransformerEncoderLayer(
            64, 4, 256, 0, nn.functional.silu, batch_first=True, norm_first=True)

    def mask(self, S, T):
        """The bias (4, S + T, S + T) is causal at first. Later, tokens of the question see only
        themselves, and half of an answer's weights are for the question, as windows expect."""
        mask = L.causal_bias(S + T).repeat(4, 1, 1)
        if self.bias:
            mask[:, :S, :S] = torch.full((S, S), -math.inf).fill_diagonal_(0)
            question, answer = self.bias(0, "cross", T, S), self.bias(0, "self", T, T)
            mask[:, S:, :S] = question.log_softmax(2)
            mask[:, S:, S:] = answer.log_softmax(2)
        return mask

    def forward(self, source, target):
        """Source (B, S) and target (B, T) give logits (B, T, V)."""
        S, T = source.shape[1], target.shape[1]
        x = self.embed(torch.cat([source, target], 1))
        mask = self.mask(S, T).repeat(len(x), 1, 1)  # a matrix for each question and head
        return self.head(self.layer(x, mask)[:, S:])

    def attention(self, source, target):
        """Rows of the answer on the answer (1, 4, T, T) and on the question (1, 4, T, S)."""
        [weights] = super().attention(source, target)
        S = source.shape[1]
        return weights[:, :, S:, S:], weights[:, :, S:, :S]

if __name__ == "__main__":
    own.main(*sys.argv[1:], kind=Model)
