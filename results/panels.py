# SPDX-License-Identifier: MIT
"""What pictures share: matplotlib set up to draw to files, maps of matrices, colours of Okabe and
Ito."""

from statistics import median

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osv^DPX<>phd*8"

def pyplot():
    """matplotlib.pyplot that draws to files. Raises: ValueError where it is missing."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise ValueError("matplotlib is missing: pip install matplotlib") from None
    plt.switch_backend("agg")
    cycle = plt.cycler(color=COLOURS * 2, marker=list(MARKERS))
    plt.rcParams.update({"axes.prop_cycle": cycle, "font.size": 9, "image.aspect": "auto",
                         "savefig.dpi": 80, "figure.constrained_layout.use": True})
    return plt

def heat_maps(panels, names, matrices, keys, rows, unit, low=None, high=None):
    """Matrices (T, S) on one scale of colours, grey where -inf."""
    for axes, name, matrix in zip(panels, names, matrices):
        image = axes.imshow(matrix.numpy(), vmin=low, vmax=high)
        axes.set(title=name, xlabel=keys, ylabel=rows, facecolor="0.8")
    panels[0].figure.colorbar(image, ax=list(panels), label=unit, aspect=30)

def draw_shares(axes, runs, label):
    """The median seed in a band from least to most."""
    shares = {}
    for r in runs:
        for (digits, name), row in r["columns"].items():
            if name == "random":
                shares.setdefault(digits, []).append(100 * row["correct"] / row["n"])
    lengths = sorted(shares)
    low = [min(shares[n]) for n in lengths]
    high = [max(shares[n]) for n in lengths]
    [line] = axes.plot(lengths, [median(shares[n]) for n in lengths], label=label)
    axes.fill_between(lengths, low, high, color=line.get_color(), alpha=0.2)
