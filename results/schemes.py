# SPDX-License-Identifier: MIT
"""Other people's position schemes and changes of the authors' rules: python -m results.schemes

This is the command line of lengen.py with more entries of METHODS, each made from its formula, and
of RULES. The simplest scheme is LearnedAlibi: `forward` gets the distances d (T, S) between queries
and keys and returns a bias (H, T, S). `by_distance` makes of it a bias of all attention, and an
entry of SCHEMES a method: python -m results.schemes --method learned-alibi. With `--json`, the run
prints its record, which is a line of records/schemes.jsonl.

Positions of the source are counted from its end, so that digit i of a number is as far from row i
at every length. Source and target share random draws, which are made in training alone."""

import math
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

import lengen as L

MOST = 1024  # learned or random positions

# Biases of distances d >= 0, (T, S) -> (H, T, S)
class T5(nn.Embedding):
    """A scalar for each bucket: exact up to 15, then in logarithmic steps up to 128. Source: Raffel
    et al. 2020, Sec. 2.1 and code (Apache 2.0)."""
    def __init__(self, config):
        super().__init__(32, config.n_head)

    def forward(self, d):
        far = 16 + 16 * (d.clamp(min=16) / 16).log() / math.log(128 / 16)
        return super().forward(torch.where(d < 16, d, far.long().clamp(max=31))).permute(2, 0, 1)

class KerpleLog(nn.Module):
    """-r1 log(1 + r2 d), r1 and r2 learned. Source: Chi et al. 2022 (KERPLE; Apache 2.0)."""
    def __init__(self, config):
        super().__init__()
        self.r = nn.Parameter(torch.zeros(2, config.n_head, 1, 1))

    def forward(self, d):
        r1, r2 = F.softplus(self.r)
        return -r1 * (1 + r2 * d).log()

class LearnedAlibi(nn.Module):
    """-slope * d, slopes learned. Source: Press et al. 2022, Sec. 3 (MIT)."""
    def __init__(self, config):
        super().__init__()
        self.log_slope = nn.Parameter(L.alibi_slopes(config.n_head).log()[:, None, None])

    def forward(self, d):
        return -self.log_slope.exp() * d

class Dynamic(nn.Sequential):
    """A small network of log(1 + d). Source: Liu et al. 2022 (Swin V2; MIT)."""
    def __init__(self, config):
        super().__init__(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, config.n_head))

    def forward(self, d):
        return super().forward(d.log1p()[..., None]).permute(2, 0, 1)

class Fire(Dynamic):
    """The network of psi(d) / psi(max(limit, largest d of the row)), psi(x) = log(c x + 1). Source:
    Li et al. 2024 (FIRE)."""
    def __init__(self, config):
        super().__init__(config)
        self.c, self.limit = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(8.0))

    def forward(self, d):
        largest = torch.maximum(self.limit.abs(), d.amax(1, keepdim=True))
        share = (self.c.abs() * d).log1p() / (self.c.abs() * largest).log1p()
        return nn.Sequential.forward(self, share[..., None]).permute(2, 0, 1)

class Sandwich(nn.Module):
    """Sum of cos(d / 10000^(k / 64)), k = 0 .. 63, over 8 h / H. Source: Chi et al. 2023."""
    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head

    def forward(self, d):
        wave, head = 10000.0 ** (-torch.arange(64) / 64), torch.arange(1, self.n_head + 1)
        return (d[..., None] * wave).cos().sum(2) / (8 * head[:, None, None] / self.n_head)

class ByDistance(nn.Module):
    """A bias with a `part` for keys behind a query, another one for those ahead, and others for
    each attention; layers share them."""
    def __init__(self, config):
        super().__init__()
        sides = ["self", "cross behind", "cross ahead"]
        if config.n_encoder:
            sides += ["encoder behind", "encoder ahead"]
        self.parts = nn.ModuleDict({side: self.part(config) for side in sides})

    def forward(self, layer, attention, T, S):
        index = torch.arange(S)
        if attention == "cross":
            index = index.flip(0)
        d = torch.arange(T)[:, None] - index
        if attention == "self":
            return self.parts["self"](d.clamp(min=0))
        behind = self.parts[f"{attention} behind"](d.clamp(min=0))
        return torch.where(d < 0, self.parts[f"{attention} ahead"]((-d).clamp(min=0)), behind)

def by_distance(part):
    """-> the class of a bias that is made of such parts."""
    return type(f"{part.__name__}ByDistance", (ByDistance,), dict(part=part))

class Abacus(nn.Embedding):
    """A learned vector for the place of a digit, 1 for a number's last, from a random place on in
    training; markers are at place 0. Source: McLeish et al. 2024 (MIT)."""
    coupled = False

    def __init__(self, config):
        L.demand(config.model == "seq2seq", f"--method: {config.method} needs a decoder")
        super().__init__(MOST, config.d_model)
        nn.init.normal_(self.weight, std=0.3)
        self.config = L.Config(**config.values | dict(rules="ours"))  # whose blocks are the numbers
        self.start = 0

    def forward(self, side, index):
        place = index  # START, digit 1, digit 2, ...
        if side == "source":
            self.start = torch.randint(100, ()) if self.training else 0
            sizes = L.blocks_of(self.config, "cross", len(index))
            blocks = [torch.arange(size, 0, -1) for size in sizes]
            for block in blocks[-1:] if self.coupled else blocks:
                block[0] = 0
            place = torch.cat(blocks)
        needed = 1 + place.max() + 99 * self.training
        L.demand(needed <= MOST, f"--width, --lengths: {needed} positions are needed of {MOST}")
        moved = torch.ones_like(place) if self.coupled else (place > 0)
        return super().forward(place + self.start * moved)

class Coupling(Abacus):
    """Abacus with markers that take part: the one in front of a number is one above its first
    digit, as END is in the answer. Source: Cho et al. 2024 (Position Coupling)."""
    coupled = True

class Randomized(nn.Module):
    """Sinusoids at a sorted random subset of MOST positions in training (of all if a source is
    longer), at the first ones in tests. Source: Ruoss et al. 2023 (Apache 2.0), which draws in
    tests, too."""
    def __init__(self, config):
        L.demand(config.model == "seq2seq", f"--method: {config.method} needs a decoder")
        super().__init__()
        self.d_model = config.d_model

    def forward(self, side, index):
        T, at = len(index), index
        if self.training and side == "source":
            self.drawn = torch.randperm(max(T, MOST))[:T].sort().values
        if self.training:
            at = self.drawn[:T]
        return L.sinusoidal(at.flip(0) if side == "source" else at, self.d_model)

# Scores of q (B, H, T, D) and k (B, H, S, D), one module for each attention. They are divided by
# sqrt(D) afterwards.
class Cope(nn.Module):
    """Keys gain a learned vector for how many keys there are to the query's, or in cross-attention
    to the end; key l counts by sigmoid(q_i k_l). Source: Golovneva et al. 2024 (CoPE), Sec. 4."""
    def __init__(self, config, attention):
        super().__init__()
        self.attention = attention
        self.vectors = nn.Parameter(torch.zeros(64, config.d_model // config.n_head))

    def forward(self, q, k):
        products = q @ k.transpose(2, 3)
        gates = products.sigmoid()
        if self.attention == "self":
            gates = gates.tril()
        count = gates.flip(3).cumsum(3).flip(3).clamp(max=len(self.vectors) - 1)
        below, above = count.floor().long(), count.ceil().long()
        known = q @ self.vectors.T
        return products + torch.lerp(known.gather(3, below), known.gather(3, above), count - below)

class Forgetting(nn.Module):
    """The sum of log f over the keys from one's next to the query's, f = sigmoid(w k + b). Source:
    Lin et al. 2025 (Forgetting Transformer; MIT), where f is read from the layer's input. Differs:
    in cross-attention row i is at place i of the source, with other gates for keys ahead."""
    def __init__(self, config, attention):
        super().__init__()
        self.attention = attention
        self.w = nn.Parameter(torch.zeros(2, config.n_head, config.d_model // config.n_head, 1))
        self.b = nn.Parameter(torch.zeros(2, config.n_head, 1, 1))

    def between(self, side, k, rows):
        """-> (B, H, T, S) of rows at these keys, counted from the last one in cross-attention."""
        f = F.logsigmoid(k @ self.w[side] + self.b[side])  # (B, H, S, 1)
        behind = f.cumsum(2)
        return behind[:, :, rows] - behind.transpose(2, 3)

    def forward(self, q, k):
        rows = torch.arange(q.shape[2], device=q.device).clamp(max=k.shape[2] - 1)
        if self.attention == "self":
            bias = self.between(0, k, rows)
        else:
            k_from_end = k.flip(2)
            behind, ahead = (self.between(side, k_from_end, rows) for side in (0, 1))
            bias = torch.where(behind <= 0, behind, -ahead).flip(3)
        return q @ k.transpose(2, 3) + bias * math.sqrt(q.shape[3])

SCHEMES = {
    "t5": L.Method("T5's buckets", bias=by_distance(T5)),
    "kerple": L.Method("KERPLE, logarithmic", bias=by_distance(KerpleLog)),
    "fire": L.Method("FIRE", bias=by_distance(Fire)),
    "sandwich": L.Method("Sandwich", bias=by_distance(Sandwich)),
    "learned-alibi": L.Method("ALiBi, slopes learned", bias=by_distance(LearnedAlibi)),
    "dynamic": L.Method("a network of the distance", bias=by_distance(Dynamic)),
    "abacus": L.Method("Abacus", Abacus),
    "coupling": L.Method("Position Coupling", Coupling),
    "randomized": L.Method("randomized positions", Randomized),
    "cyclic": L.Method("position index modulo 3 alone", L.sinusoids, period=3),
    "cope": L.Method("CoPE", scores=Cope),
    "forgetting": L.Method("forgetting attention", scores=Forgetting),
}
for name in "coupling", "dynamic", "fire", "forgetting":
    SCHEMES[f"{name}-9"] = SCHEMES[name]._replace(about=f"{name} at nine widths", n_width=9)
# Other windows w and periods T than those of v2's table (App. C.5); ABC that keeps positions (v1,
# Sec. 5, step 3); ABC by lines of other attention (see choose_lines).
for w, T in (1, 4), (2, 3), (2, 4), (2, 5):
    SCHEMES[f"window-{w}-{T}"] = L.METHODS["window-cyclic"]._replace(window=w, period=T)
SCHEMES["abc-positions"] = L.METHODS["abc"]._replace(position=L.sinusoids)
SCHEMES["abc-random"] = SCHEMES["abc-untrained"] = L.METHODS["abc"]
L.METHODS.update(SCHEMES)

# The authors' rules with some of three changes. start: a row without a line sees the start token,
# not everything; vertical: cross-attention has verticals, too; self: kappa is that of
# cross-attention in self-attention, too. v2-each: v2 by App. F, each direction cut by itself.
code, v2 = L.RULES["code"], L.RULES["v2"]
wider = code | dict(cross=code["cross"] | dict(directions=(-1, 0)))
stricter = dict(self=code["self"] | dict(kappa=code["cross"]["kappa"]))
L.RULES.update({
    "code+start": code, "code+start+self": code | stricter,
    "code+vertical": wider, "code+start+vertical": wider,
    "code+vertical+self": wider | stricter, "code+start+vertical+self": wider | stricter,
    "v2-each": {side: rule | dict(together=False) for side, rule in v2.items()}})

def bias_of_lines(lines, n_head, blocks, rules, *others, usual=L.bias_of_lines):
    """As in lengen.py, by changed rules."""
    return usual(lines, n_head, blocks, "ours" if "start" in rules.split("+") else rules, *others)

L.bias_of_lines = bias_of_lines

@torch.no_grad()
def choose_lines(config, attention, usual=L.choose_lines):
    """As in lengen.py. As a control, the attention is random, or that of the untrained model."""
    L.seed_draws(config.seed, "vanilla")
    if config.method == "abc-random":
        own, cross = map(torch.randn_like, attention)
        attention = L.masked_softmax(own, L.causal_bias(own.shape[3])), cross.softmax(3)
    if config.method == "abc-untrained":
        plain = L.Config(**config.values | dict(method="vanilla", lengths=(6,)))
        model = L.Transformer(plain).eval()
        source, target = L.draw_questions(plain, L.draw_exact, 6, 1000)
        model(source, target[:, :-1])
        [layer] = model.decoder
        attention = [x.weights.mean(0)[None]
                     for x in (layer.self_attention, layer.cross_attention)]
    return usual(config, attention)

L.choose_lines = choose_lines

def draw_pairs(config, B, length, usual=L.draw_pairs):
    """As in lengen.py; in half of the planted sequences, the last integer follows the one before."""
    source, target = usual(config, B, length)
    if config.task == "planted":
        tokens = source[:, -length:]  # a view
        tokens[:B // 2, -1] = (tokens[:B // 2, -2] + 1) % config.d_vocab
        target[:, 1:] = ((tokens[:, None] - tokens[:, :, None]).abs() == 1).any(2)
    return source, target

L.draw_pairs = draw_pairs
L.PAIRS_TASKS["planted"] = L.PAIRS_TASKS["consecutive"]

def add_digits(a, b):
    """15, 27 -> "32", the sum without carries. Source: Jelassi, App. A.2."""
    n = len(str(max(a, b)))
    places = zip(str(a).zfill(n), str(b).zfill(n))
    return "".join(str((int(x) + int(y)) % 10) for x, y in places)

L.ENCODER_TASKS["elementwise-addition"] = L.EncoderTask(
    "a + b, carries dropped", "+", add_digits, 6000)

if __name__ == "__main__":
    sys.exit(L.main())
