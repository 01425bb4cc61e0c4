"""Every command in a line: what the command line knows before one runs. It needs neither torch nor plug-ins."""

from __future__ import annotations

BAD_INPUT = 2
"""The status."""

COMMANDS = {
    "selftest": ("selftest:selftest", "Does it work on these machines, and does it pay? On every rank."),
    "doctor": ("listings:doctor", "What runs on this machine, what does not, and why."),
    "probe": ("probe:probe", "Measure a cluster: links, codecs and what overlap costs."),
    "profile": ("profile:profile", "Describe a real model, for predictions: sizes and times of its tensors."),
    "predict": ("predict:predict", "Will it help? How long a step takes, for each wire and number of workers."),
    "advise": ("predict:advise", "Which wire to take, or which cluster to buy."),
    "report": ("study:report", "Turn the results of a study into one HTML file."),
    "formats": ("listings:formats", "List the number formats."),
    "codecs": ("listings:codecs", "List every codec: bits, error, and speed on this machine."),
}
"""By name, in the order of the help: where its function is, and what it does."""

GROUPS = {
    "bench": ("bench:app", "Speed, beside something measured in the same run."),
    "study": ("study:app", "Can few bits improve training with no loss of accuracy? Run a study and see."),
    "lab": ("lab:app", "A cluster in a box: hosts joined by links that hold a rate."),
    "data": ("data:app", "Real data sets: fetched from packages, checked, cached."),
}
