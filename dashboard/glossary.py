"""The words of the dashboard, and how each page is read. Plain text and Markdown of our own, nothing of the store."""

from __future__ import annotations

from typing import Final

from dashboard.theme import LOOKS, VERDICTS
from harness.metric_names import METRICS

WORDS: Final = {
    "technique": "One idea with a name in the literature, as a pair: the plain way and the optimized way.",
    "variant": "One implementation: `baseline`, `optimized`, more of our own, and library peers.",
    "peer": "What one line of torch, or a library, gives. Beating it decides whether a technique pays.",
    "workload": "Named dimensions, a dtype and a tier (`smoke`, `quick`, `full`).",
    "layer": "Where a technique acts: `kernel`, `graph` or `system`.",
    "claim": "What a technique promises to move, and which way.",
    "series": "Records of one technique, variant, workload, dtype, GPU type, ranks, metric, method version, clock and "
    "cache policy, in commit order.",
    "interval": "95 % interval of the median. Intervals that do not overlap are told from noise; others may not be.",
    "speedup": "Ratio of medians, baseline over variant, from paired rounds. Above 1 is faster.",
    "floor": "The least time that the workload needs on this machine: its work over each ceiling, the largest.",
    "limit": "The term of the floor that is largest: compute, memory, link, launch.",
    "ceiling": "What this machine was measured to reach, whatever its datasheet says.",
    "roofline": "Rate against arithmetic intensity; the roof is the lower of bandwidth × intensity and peak rate.",
    "sentinel": "A fixed product and a fixed copy at both ends of a run. When they move, the machine is to blame.",
    "change point": "Where a series goes to another level and stays there.",
    "smallest visible change": "The smallest change at the end of a series that three runs would show.",
    "side": "Which half of the pair moved at a change: baseline, optimized, both, or the machine.",
    "dirty": "Measured with uncommitted changes: shown hollow, never judged.",
    "orphan": "A commit that is on no branch any more. Kept and shown, never judged.",
    "stale": LOOKS["stale"].means + ".",
    "SLO": "Bounds on TTFT and TPOT that a request must meet to count as good.",
    "goodput": "Requests a second that met every part of the SLO.",
    "Pareto front": "Points that no other one beats in both directions.",
    "bubble": "Share of a pipeline's time that its stages wait: (P−1)/(M+P−1) for P stages and M micro-batches "
    "under GPipe and 1F1B.",
    "FLOPs": "Model FLOPs: causal attention counts as half, recomputation is not counted.",
}

READING: Final = {
    "overview": """
Each cell is a technique on a GPU type. The number is the optimized variant's speedup over the baseline, the geometric
mean over its workloads; the small line is its 95 % interval. Blue is faster, orange-brown is slower, white is no
difference. A cell without a number says by its sign why there is none. Select a cell, or a row of the table under it,
to open the technique there.

*Over the best one-liner* shows the speedup over the best that one line of torch gives: that decides whether it pays.
""",
    "technique": """
The claim stands beside what was measured. A promise is kept when the whole interval lies on the promised side.
In the chart of speedups, a point is a variant on a workload, its bar the 95 % interval, the line at 1 the baseline.
In the roofline, a point under the slope is limited by memory, one under the flat roof by compute; its distance to the
roof is what is left to gain.
""",
    "history": """
A point is a commit, the median of its runs; the bar is the 95 % interval. Lines are broken where nothing was measured.
Hollow points are of dirty trees, of other branches or of merged side branches, and are not judged. Triangles mark
changes that the detector found (down: regressed, up: improved, star: accepted with a reason). Dotted lines mark a new
torch, Triton, driver or machine. Move the slider to look at a stretch of commits, or choose *Box Select* above the
chart and drag over it; the stretch stays in the address. Click a point to see its commit and the command that measures
it again.
""",
    "regressions": """
A verdict needs magnitude and separation, by the metric's own direction. The change is new over old with its 95 %
interval. *Side* says which half of the pair moved, or that the machine did. *Smallest change* is what three more runs
would show: a smaller one is invisible here. Select a row for its suspects and for the command that reproduces it.
""",
    "compare": """
A and B are commits, branches, tags, runs, or `gpu:`, `torch:`, `triton:`, `driver:`, `machine:`, `variant:` and a
name. Bars are B over A in percent; to the right is more, whether that is better or worse is told by colour and sign.
Series that only one side has stand apart, with what is known of them on the other side.
""",
    "serving": """
Up and to the left is better: more tokens a second at less waiting. A line is a variant over its loads, everything
else alike: another model, trace or cache makes another line. Points on the Pareto front have a ring and are joined: no
variant that serves the same beats them in both. TTFT is from arrival to the first token, ITL between tokens, per token.
Move the SLO to see how many requests meet it. The record keeps quantiles, not requests, so that a goodput under two
bounds at once lies between two ends; both are shown.
""",
    "scaling": """
The dotted line is ideal: twice the ranks, twice the throughput or half the time. Throughput and latency stand apart,
since some techniques raise the one and never lower the other. Exposed communication is what a step takes longer
because of it.
""",
    "runs": """
A run is one call of `pairbench run`. Its sentinel tells whether the machine stayed as it was; the conditions tell
clocks, throttling and other processes around each measurement. Failures stand with their reason and log.
""",
}


def markdown() -> str:
    """The whole glossary as Markdown."""
    lines = [f"**{word}** – {text}" for word, text in WORDS.items()]
    lines += ["", "**Signs**", ""]
    lines += [f"{look.sign} **{look.title}** – {look.means}" for look in (*LOOKS.values(), *VERDICTS.values())]
    lines += ["", "**Metrics**", ""]
    lines += [f"**{m.title}** ({m.unit}, {m.better} is better) – {m.means}" for m in METRICS.values()]
    return "\n\n".join(line for line in lines if line)
