"""From legs to figures: medians, paired ratios, and whether a ratio may be called measured."""

import dataclasses
import statistics


def quartiles(values):
    """(first quartile, median, third quartile)."""
    if len(values) == 1:
        return (values[0],) * 3
    return tuple(statistics.quantiles(values, n=4, method="inclusive"))


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a ratio should be. Quartiles further apart than `margin` say nothing about it."""

    bound: float
    margin: float
    at_least: bool = True

    def __str__(self):
        return f"{'>=' if self.at_least else '<='} {self.bound:g}"

    def verdict(self, ratios):
        first, median, third = quartiles(ratios)
        if third - first > self.margin:
            return "not measured"
        return "met" if (median >= self.bound) == self.at_least or median == self.bound else "MISSED"


def figure(name, unit, ours, theirs, *, against, asked=None, lower_is_better=False):
    """One line of the table. `ours[i]` and `theirs[i]` were taken one after the other.

    The ratio is ours by theirs, whichever way is better; `asked` bounds it.
    """
    assert len(ours) == len(theirs), name
    ratios = [mine / other for mine, other in zip(ours, theirs)]
    first, median, third = quartiles(ratios)
    return {
        "name": name,
        "unit": unit,
        "against": against,
        "waystation": statistics.median(ours),
        "other": statistics.median(theirs),
        "ratio": median,
        "ratio_quartiles": [first, third],
        "lower_is_better": lower_is_better,
        "pairs": len(ratios),
        "asked": str(asked) if asked else None,
        "margin": asked.margin if asked else None,
        "verdict": asked.verdict(ratios) if asked else "shown",
        "legs": {"waystation": ours, "other": theirs},
    }


def number(value):
    """Three digits that count, never in exponent form."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def table(rows, headings):
    """Lines of a table; the first column is left-aligned, all others right."""
    widths = [max(len(str(row[i])) for row in [headings, *rows]) for i in range(len(headings))]
    lines = []
    for row in [headings, *rows]:
        cells = [str(cell).ljust(w) if i == 0 else str(cell).rjust(w) for i, (cell, w) in enumerate(zip(row, widths))]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * len(lines[0]))
    return lines
